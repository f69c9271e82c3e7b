"""Snapshots of a running program, from which other processes go on. Start with ``snapshot_taker.py``."""
