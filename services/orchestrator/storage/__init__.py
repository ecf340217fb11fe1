"""The durable ledger: the same tables and statements in SQLite and in PostgreSQL.

Arrows: ``ledger`` → ``batch``, ``loading`` → ``rows`` → ``tables``; ``opening`` builds it.
"""
