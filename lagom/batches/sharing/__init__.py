"""One set of workers for all ranks, if these are on one host: rank 0 has it, and gives its batches to all.

Start with ``worker_sharing.py`` (patches torch's iterator). ``loader_trial.py`` finds out whether sharing is harmless,
by ``worker_watch.py`` (side effects of workers), ``shared_mappings.py`` and ``equal_batches.py``. A loader that
``shared_objects.py`` finds to hold shared memory has no trial.
"""
