"""ZeRO: optimizer state, gradients and parameters, each sharded over the ranks.

Start with ``sharded_optimizer.py`` (level 1), ``gradient_shards.py`` (level 2), ``parameters/`` (level 3).
``gradient_access.py`` has the functions of torch that see shards; all else that reads a gradient makes it whole.
"""
