"""``Cluster``: the slots that a launcher offers; and the name and GPUs of this machine."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import itertools
import os
import re
import shutil
import socket
import subprocess
from dataclasses import dataclass

_NAME = re.compile(r"\d|GPU-|MIG-")
"""Matches the beginning of an entry of CUDA_VISIBLE_DEVICES that names a device."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """The slots that a launcher offers, as facts."""

    launcher: str
    """One of "spark", "local" and "inline"."""
    slots: int
    """Tasks that can run at the same time; a run without ``world_size`` takes all of them, up to ``most_ranks``."""
    oversubscribe: bool = False
    """True if a run may have more tasks than slots, as with processes of one machine."""
    most_ranks: int | None = None
    """Largest number of ranks, for other reasons than slots; None: no such limit."""
    gpus_per_slot: int = 0
    """Number of GPUs that each task sees; tasks share a GPU if Spark gives each a fraction of it."""
    barrier: bool = True
    """True if Spark can run barrier stages, which start all tasks at once; not with dynamic allocation."""
    encrypted: bool = False
    """True if the user has set encryption of Spark's network traffic, even if it takes no effect."""
    remedy: str = ""
    """The change by which the user gets more slots."""


def visible_gpus() -> tuple[str, ...]:
    """Return the GPUs that ranks may use, as CUDA_VISIBLE_DEVICES names them; empty if torch is a CPU build."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        if "+cpu" in importlib.metadata.version("torch"):
            return ()
    mask = os.environ.get("CUDA_VISIBLE_DEVICES")
    if mask is None:
        return _listed_gpus()
    # As CUDA does: the first entry that names no device, such as -1, hides itself and all entries after it.
    return tuple(itertools.takewhile(_NAME.match, (entry.strip() for entry in mask.split(","))))


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
    """Return the names of the GPUs in the output of ``nvidia-smi -L``: MIG devices if there are any, else indices."""
    if devices := re.findall(r"UUID: (MIG-[^)]+)\)", listing):
        return tuple(devices)
    return tuple(re.findall(r"^GPU (\d+):", listing, flags=re.MULTILINE))


@functools.cache
def this_host() -> str:
    """Return a name of this host's files; containers with files of their own count as hosts."""
    root = os.stat("/")
    return f"{socket.gethostname()}|{root.st_dev}:{root.st_ino}"
