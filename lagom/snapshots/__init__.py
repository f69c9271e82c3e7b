"""Snapshots of a running program, from which a run goes on in another process. See Note [Snapshots] in snapshot_taker.py."""
