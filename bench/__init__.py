"""Measurements of Sideband beside the inline path and the machine's own limits.

``python -m bench`` runs the rows in ``bench.rows``, each with all its sides in one run, and writes
the tables and plots of ``docs/performance.md``.
"""
