"""A disk for each rank, so that it reads back its own writes: rank 0 has the real disk, any other rank an overlay.

Start with ``install.py``: it has the patches and all functions below. Then read ``overlay.py``, the disk of other
ranks. For ``torch.save`` start with ``saving.py``.
"""

from lagom.files.install import (
    asked_for_rank,
    downloading,
    finish_writes,
    flush_at_save,
    growing_lengths,
    has_asked,
    keep_disk,
    lost_tracked_runs,
    note_tracked_run,
    notice_changes,
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
    "notice_changes",
    "own_disk",
    "path_to_read",
    "path_to_write",
    "reach_disk",
    "share_disk",
    "writes_for_real",
]
