"""The host process of one task: forks its ranks, on a Spark executor or below the local fork server.

Start with ``rank_host.py`` (forks the ranks) and ``supervisor.py`` (forwards their messages to the driver and ends
them); ``rank_output.py`` forwards what they print, ``stall_detector.py`` reports those that make no progress.
``fork_server.py`` starts the host process below the local launcher, ``lagom/executor`` starts it on Spark;
``descendants.py`` ends the processes that programs leave.
"""
