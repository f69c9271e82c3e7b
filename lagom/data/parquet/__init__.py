"""Parquet tables as data sets: row groups, shards, shuffled windows, batches.

Start with ``dataset.py`` (``ParquetDataset``); ``shard.py`` is the arithmetic of who reads what.
"""
