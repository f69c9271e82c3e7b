"""Data loaders: ranks follow rank 0's order, and each gets whole batches or its share of them.

Batches are split across ranks with batches="split" and "per_rank", and in sharded evaluations. In replicated
evaluations, and if a data set shards itself, each rank follows its own order.

Start with ``dataloader.py`` (patches torch's loader). ``sampler_sync.py`` makes all ranks follow the order of rank 0's
sampler, of any class; ``pass_starter.py`` decides which passes are split; ``batch_shares.py`` splits the indices of a
batch; ``iterable.py`` splits the batches of a stream; ``sharing/`` lets all ranks use rank 0's loader workers.
"""
