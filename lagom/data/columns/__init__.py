"""Columns in memory: which types become tensors, and how; petastorm's schemas and codecs.

Start with ``tensor_columns.py``; ``types.py`` lists Arrow's types.
"""
