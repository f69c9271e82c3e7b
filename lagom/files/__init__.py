"""A disk of each rank's own: ranks of one program write to it as one process would to one disk."""

from lagom.files.install import (
    asked_for_rank,
    downloading,
    finish_writes,
    flush_at_save,
    found,
    growing_lengths,
    has_asked,
    keep_disk,
    lost_tracked_runs,
    note_tracked_run,
    notice_changes,
    own_disk,
    reach_disk,
    share_disk,
    writes_for_real,
    written,
)

__all__ = [
    "asked_for_rank",
    "downloading",
    "finish_writes",
    "flush_at_save",
    "found",
    "growing_lengths",
    "has_asked",
    "keep_disk",
    "lost_tracked_runs",
    "note_tracked_run",
    "notice_changes",
    "own_disk",
    "reach_disk",
    "share_disk",
    "writes_for_real",
    "written",
]
