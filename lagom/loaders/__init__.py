"""Data loaders: each rank gets its share of every batch.

Start with ``dataloader.py`` (patches torch's loader); ``index_sampler.py`` shards indices, ``iterable.py`` streams,
``sampler_sync.py`` keeps the order of all ranks that of rank 0.
"""
