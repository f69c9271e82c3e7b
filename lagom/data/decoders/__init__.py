"""Parquet pages decoded by lagom's own C++ where they are plain; Arrow reads all others.

Start with ``page_decoder.py``.
"""
