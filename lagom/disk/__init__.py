"""A disk for each rank, from which the rank reads back its own writes.

Rank 0 has the real disk, except in a search or a rehearsal. Any other rank has an overlay: its changes go to a folder
of its own. Start with ``install.py``: it has the patches and all functions below. Then read ``overlay.py``. For
``torch.save`` to a path start with ``saving.py``; to an open file with ``attempt_calls.py`` (rank 0) or ``calls.py``.
"""

from lagom.disk.install import (
    asked_for_rank,
    downloading,
    finish_writes,
    flush_at_save,
    growing_lengths,
    has_asked,
    keep_disk,
    lost_tracked_runs,
    note_tracked_run,
    own_disk,
    path_to_read,
    path_to_write,
    reach_disk,
    share_disk,
    writes_for_real,
)

__all__ = [
    "asked_for_rank",
    "downloading",
    "finish_writes",
    "flush_at_save",
    "growing_lengths",
    "has_asked",
    "keep_disk",
    "lost_tracked_runs",
    "note_tracked_run",
    "own_disk",
    "path_to_read",
    "path_to_write",
    "reach_disk",
    "share_disk",
    "writes_for_real",
]
