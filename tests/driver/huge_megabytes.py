"""``huge_megabytes``; in a file that a rank imports without pytest."""

from __future__ import annotations

import os
from pathlib import Path

import torch


def huge_megabytes() -> tuple[int, str | None]:
    """Huge pages of this process with a tensor of 128 MB, and the variable by which the C library is asked for them."""
    kept = torch.ones(2**25)  # noqa: F841
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    (found,) = [line.split()[1] for line in lines if line.startswith("AnonHugePages")]
    return int(found) >> 10, os.environ.get("GLIBC_TUNABLES")
