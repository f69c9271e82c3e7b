"""Parquet tables as data sets of torch, with loaders that read each row group once and shuffle within windows.

Start with ``dataset.py`` (``ParquetDataset``); ``shard.py`` computes which rank reads which rows.
"""
