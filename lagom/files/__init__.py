"""A disk of each rank's own: ranks of one program write to it as one process would to one disk."""

from lagom.files.install import (
    asked_for_rank,
    downloading,
    found,
    has_asked,
    own_disk,
    share_disk,
    writes_for_real,
    written,
)

__all__ = [
    "asked_for_rank",
    "downloading",
    "found",
    "has_asked",
    "own_disk",
    "share_disk",
    "writes_for_real",
    "written",
]
