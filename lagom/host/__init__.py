"""The host process of one task: forks its ranks, on a Spark executor or below the local fork server.

Start with ``rank_host.py`` (forks the ranks) and ``supervisor.py`` (forwards their messages to the driver and ends
them). ``executor.py`` and ``fork_server.py`` start the host process; ``descendants.py`` ends the processes that
programs leave.
"""
