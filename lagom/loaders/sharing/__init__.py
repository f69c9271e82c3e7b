"""One set of workers for all ranks of a host: rank 0 has them, and gives their batches to the other ranks.

Start with ``shared_workers.py`` (patches torch's iterator); ``loader_trial.py`` finds out whether sharing is harmless,
with what ``worker_watch.py``, ``shared_objects.py``, ``shared_mappings.py`` and ``equal_batches.py`` notice.
"""
