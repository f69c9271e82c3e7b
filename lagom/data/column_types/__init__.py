"""Columns in memory: which types become tensors, and how; petastorm's schemas and codecs.

Start with ``tensor_columns.py``: it accepts or refuses a type, and converts a column. ``types.py`` lists Arrow's types,
``lists.py`` makes arrays of them.
"""
