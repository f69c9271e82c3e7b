"""Which files a table has, where they are, and whether they have changed.

Start with ``files.py``.
"""
