"""``Cluster``: what a launcher can offer; and the GPUs of this machine."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
import re
import shutil
import subprocess
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """What a launcher can offer, as facts."""

    launcher: str
    """One of "spark", "local" and "inline"."""
    slots: int
    """Tasks that can run at the same time: the number taken when none is asked for."""
    oversubscribe: bool = False
    """Whether more tasks than slots may be asked for, as processes of one machine can."""
    gpus_per_slot: int = 0
    """GPUs that each of these tasks gets for itself."""
    barrier: bool = True
    """Whether all tasks of a stage can be had at once or not at all; Spark's dynamic allocation refuses it."""
    encrypted: bool = False
    """Whether Spark encrypts what it sends over the network."""
    remedy: str = ""
    """What the user would change to get more slots."""


def visible_gpus() -> tuple[str, ...]:
    """The GPUs that ranks may use, as CUDA_VISIBLE_DEVICES names them; none when torch is a CPU build."""
    mask = os.environ.get("CUDA_VISIBLE_DEVICES")
    if mask is not None and not mask.strip():
        return ()
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        if "+cpu" in importlib.metadata.version("torch"):
            return ()
    if mask is not None:
        return tuple(entry.strip() for entry in mask.split(",") if entry.strip())
    return _listed_gpus()


@functools.cache
def _listed_gpus() -> tuple[str, ...]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ()
    try:
        listing = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    return gpus_in(listing)


def gpus_in(listing: str) -> tuple[str, ...]:
    """Names of the GPUs in what ``nvidia-smi -L`` prints: MIG devices where there are any, else indices."""
    if devices := re.findall(r"UUID: (MIG-[^)]+)\)", listing):
        return tuple(devices)
    return tuple(re.findall(r"^GPU (\d+):", listing, flags=re.MULTILINE))
