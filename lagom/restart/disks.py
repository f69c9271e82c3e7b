"""``this_host`` and ``is_on_shared_disk``: whether a path means the same file here as on another host."""

from __future__ import annotations

from contextlib import suppress

from lagom.run_folder import this_host as this_host

# File systems that several hosts may share; all of FUSE are assumed to be.
_SHARED = ("nfs", "cifs", "smb", "ceph", "lustre", "gluster", "gpfs", "beegfs", "fuse", "9p", "afs", "pvfs", "orangefs")


def is_on_shared_disk(path: str) -> bool:
    """Return whether the file system of ``path``, an absolute path without links, may be another host's as well."""
    kind, longest = "", -1
    with suppress(OSError), open("/proc/self/mounts", encoding="utf-8", errors="surrogateescape") as mounts:
        for line in mounts:
            _, at, its_kind, *_ = line.split(" ")
            at = at.replace("\\040", " ").rstrip("/")
            if len(at) >= longest and (path + "/").startswith(at + "/"):
                kind, longest = its_kind, len(at)
    return kind.startswith(_SHARED)
