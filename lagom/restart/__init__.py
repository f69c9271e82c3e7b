"""Restart of runs after the loss of a rank, an executor or a host: history, files and snapshots of earlier attempts.

Start with ``history.py``.
"""
