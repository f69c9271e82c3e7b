"""Decoders, in lagom's own C++, of the Parquet pages that usual writers make; Arrow reads all other pages.

Start with ``page_decoder.py``.
"""
