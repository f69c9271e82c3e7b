"""The process that holds the ranks of one task: on an executor of Spark, or below the local fork server.

Start with ``rank_host.py`` (forks the ranks) and ``supervisor.py`` (carries their words to the driver, ends them).
``executor.py`` and ``fork_server.py`` are the two that start it; ``descendants.py`` ends what programs leave behind.
"""
