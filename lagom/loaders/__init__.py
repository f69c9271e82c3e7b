"""Data loaders: each rank gets its share of every batch.

Start with ``dataloader.py`` (patches torch's loader); ``index_sampler.py`` shards indices, ``iterable.py`` shards
streams, ``sampler_sync.py`` has all ranks follow rank 0's order.
"""
