"""Data loaders: every rank follows rank 0's order, and gets whole batches, or its share ("split", "per_rank").

Start with ``dataloader.py`` (patches torch's loader). ``sampler_sync.py`` makes all ranks follow the order of rank 0's
sampler, of any class; ``pass_starter.py`` decides which passes are split; ``batch_shares.py`` splits the indices of a
batch; ``iterable.py`` splits the batches of a stream.
"""
