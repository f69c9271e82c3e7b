"""Restart of runs after the loss of a rank, an executor or a host: history, files and snapshots of earlier attempts.

Start with ``history.py`` for runs that begin a new attempt, and with ``sleeping_twin.py`` for runs in which forks of
the ranks go on.
"""
