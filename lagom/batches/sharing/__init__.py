"""Loads each sample once where all ranks see whole batches: by one set of workers, or without workers by parts.

Start with ``worker_sharing.py`` (patches torch's iterator): rank 0 has the workers, and gives their batches to all
ranks of the host. ``loader_trial.py`` finds out whether that is harmless, by ``worker_watch.py`` (side effects of
workers) and ``equal_batches.py``; ``shared_objects.py`` finds memory that workers share with the program.

A loader without workers begins in ``divided_fetch.py``: each rank loads a part of a batch. ``loading_state.py`` and
``loading_watch.py`` notice what loading leaves behind, ``sample_exchange.py`` gives the samples to all ranks.
"""
