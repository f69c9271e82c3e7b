"""Finds the files of a table, reads their footers, and notices when a file has changed.

Start with ``files.py``.
"""
