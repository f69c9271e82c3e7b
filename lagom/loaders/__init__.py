"""Data loaders: each rank gets its share of every batch.

Start with ``dataloader.py`` (patches torch's loader); ``batch_shares.py`` shards indices, ``iterable.py`` shards
streams, ``sampler_sync.py`` has all ranks follow rank 0's order, whatever sampler the program brings.
"""
