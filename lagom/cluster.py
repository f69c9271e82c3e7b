"""``Cluster``: the slots that a launcher offers; and the name and accelerators of this machine, without torch."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import itertools
import json
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from typing import NamedTuple

log = logging.getLogger("lagom")
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
    """Number of GPUs, or other accelerators, that each task sees; tasks share one if Spark gives each a fraction."""
    device_kind: str = "cuda"
    """Kind of these accelerators, by torch's name for it."""
    barrier: bool = True
    """True if Spark can run barrier stages, which start all tasks at once; not with dynamic allocation."""
    encrypted: bool = False
    """True if the user has set encryption of Spark's network traffic, even if it takes no effect."""
    remedy: str = ""
    """The change by which the user gets more slots."""


class OtherDevice(NamedTuple):
    """An accelerator that is not NVIDIA's."""

    name: str
    """Name of the device in torch, such as "xpu:0"."""
    num_bytes: int | None
    """Bytes of its memory; None if unknown."""


NVIDIA = "cuda"
"""torch's name for the kind of NVIDIA's GPUs, and of AMD's, whose build of torch takes its place."""


def device_word(kind: str) -> str:
    """Return the word for an accelerator of torch's ``kind``, such as "xpu": "GPU" for those that are."""
    return "GPU" if kind in (NVIDIA, "xpu", "mps", "") else "accelerator"


def kind_of_device(entry: str | None) -> str:
    """Return torch's kind of the device of an entry of ``visible_devices``."""
    kind, colon, _ = (entry or "").partition(":")
    return kind if colon else NVIDIA


def backend_word(kind: str) -> str:
    """Return the name of the library by which accelerators of ``kind`` exchange tensors, for an error."""
    return "NCCL" if kind == NVIDIA else f"torch's backend for {kind!r}"


def hiding(kind: str) -> str:
    """Return the setting of the environment that hides accelerators of ``kind`` from torch."""
    return "CUDA_VISIBLE_DEVICES=''" if kind == NVIDIA else "TORCH_DEVICE_BACKEND_AUTOLOAD=0"


def visible_devices() -> tuple[str, ...]:
    """Return the accelerators that ranks may use.

    NVIDIA's are named as CUDA_VISIBLE_DEVICES names them; a rank sees no other than its own. That variable is NVIDIA's,
    and other makers have none that means the same: their devices have names in torch, such as "xpu:0", and a rank
    selects its own among all of its host. Beside them NVIDIA's are not used: torch has one kind of accelerator in a
    process, and prefers a package's.
    """
    others, gpus = tuple(device.name for device in other_devices()), visible_gpus()
    if others and gpus:
        _tell_choice(kind_of_device(others[0]))
    return others or gpus


@functools.cache
def _tell_choice(kind: str) -> None:
    log.warning(
        "this machine has NVIDIA's GPUs and %r devices: torch's accelerator is %r, so ranks train on these; set "
        "TORCH_DEVICE_BACKEND_AUTOLOAD=0 or use a CUDA build of torch to train on the GPUs",
        kind,
        kind,
    )


def visible_gpus() -> tuple[str, ...]:
    """Return NVIDIA's GPUs that ranks may use, as CUDA_VISIBLE_DEVICES names them; empty if torch is a CPU build."""
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


def other_devices() -> tuple[OtherDevice, ...]:
    """Return the accelerators of this machine that are not NVIDIA's and that this Python's torch serves.

    torch tells of them in a process of its own, since the ranks, which are forked, could not use devices that this
    process had begun to use. No process is started unless torch may serve any: in a build for Intel's GPUs, or with a
    package that extends torch by a kind of device.
    """
    return _listed_by_torch().devices if other_kind() is not None else ()


def other_kind() -> str | None:
    """Return the kind of accelerator of this Python's torch, if it is not NVIDIA's, whether or not there is a device.

    None also for Apple's, which is not used; see accelerators.py.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return _listed_by_torch().kind if _may_serve_others() else None
    with contextlib.suppress(AttributeError, RuntimeError):  # as when torch is being imported, and in torch 2.6
        accelerator = torch.accelerator.current_accelerator()
        return str(accelerator.type) if accelerator is not None and accelerator.type not in (NVIDIA, "mps") else None
    return None


@functools.cache
def _may_serve_others() -> bool:
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return False
    return "+xpu" in version or bool(importlib.metadata.entry_points(group="torch.backends"))


class _Listing(NamedTuple):
    """Kind and devices that torch names in a process of its own."""

    kind: str | None
    devices: tuple[OtherDevice, ...]


@functools.cache
def _listed_by_torch() -> _Listing:
    # lagom may be in an archive on the path.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", _LISTING]
    why = "it printed no list"
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
        lines = (run.stdout if run.returncode == 0 else run.stderr).strip().splitlines() or [f"status {run.returncode}"]
        if run.returncode == 0:
            kind, devices = json.loads(lines[-1])
            return _Listing(kind, tuple(OtherDevice(*device) for device in devices))
        why = lines[-1]
    except subprocess.TimeoutExpired:
        why = "it took longer than 120 s"
    except OSError as error:
        why = str(error)
    except (ValueError, TypeError):
        pass
    log.warning(
        "a new Python with torch could not list this machine's accelerators (%s), so ranks do not use them; "
        '%s -c "import torch; print(torch.accelerator.device_count())" shows the whole error, and '
        "TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps torch from loading packages for accelerators",
        why,
        sys.executable,
    )
    return _Listing(None, ())


_LISTING = """
import json
from lagom.accelerators import current_accelerator, device_module, total_bytes
import torch
kind = current_accelerator()
if kind is not None and kind.type == "cuda":
    kind = None
count = device_module(kind).device_count() if kind is not None and device_module(kind).is_available() else 0
devices = [torch.device(kind.type, index) for index in range(count)]
print()
print(json.dumps([kind and kind.type, [(str(device), total_bytes(device)) for device in devices]]))
"""
"""Program that prints torch's kind of accelerator and the devices of this machine, unless they are NVIDIA's."""


@functools.cache
def this_host() -> str:
    """Return a name of this host's files; containers with files of their own count as hosts."""
    root = os.stat("/")
    return f"{socket.gethostname()}|{root.st_dev}:{root.st_ino}"
