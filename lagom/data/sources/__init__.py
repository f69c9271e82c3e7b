"""Sources of a table: finds its files, reads their footers, and notices when a file has changed.

Start with ``files.py``.
"""
