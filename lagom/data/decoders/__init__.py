"""Decoders of plain Parquet pages in lagom's own C++; Arrow reads all other pages.

Start with ``page_decoder.py``.
"""
