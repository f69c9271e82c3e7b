"""One set of workers for all ranks of a host: rank 0 has them, and gives their batches to the other ranks.

Start with ``worker_sharing.py`` (patches torch's iterator). ``loader_trial.py`` finds out whether sharing is harmless,
by ``worker_watch.py`` (side effects of workers), ``shared_mappings.py`` and ``equal_batches.py``. A loader that
``shared_objects.py`` finds to hold shared memory has no trial.
"""
