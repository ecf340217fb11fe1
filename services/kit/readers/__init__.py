"""Reads large bodies in processes of their own, where no event loop waits for it.

Parsing JSON, or any other call into C, holds the interpreter's lock from begin to end: a thread
does not help. What a process gives back is compact.
"""
