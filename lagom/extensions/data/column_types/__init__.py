"""Columns in memory: which types become tensors, and how; petastorm's schemas and codecs.

Start with ``types.py``: it says which of Arrow's types become tensors, and of which type. ``tensor_columns.py``
converts a column, ``lists.py`` makes arrays.
"""
