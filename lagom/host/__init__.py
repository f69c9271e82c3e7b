"""The host process of one task: forks the task's ranks.

A host process is a child of a fork server: of ``fork_server.py`` with the local launcher, and of
``lagom/spark/executor_server.py`` on Spark. Start with ``rank_host.py`` (forks the ranks) and ``supervisor.py``
(forwards their messages to the driver, and ends the ranks). ``forked_rank.py`` forwards the output of ranks,
``stall_detector.py`` reports ranks that make no progress, and ``descendants.py`` ends processes that programs leave.
"""
