"""``available_memory``: finds out how many bytes each rank on this machine may use; ``format_bytes`` for texts."""

from __future__ import annotations

import re
import resource
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

from lagom.control_groups import OWN, ROOT, control_groups


class AvailableMemory(NamedTuple):
    """A memory limit of one rank, and its origin."""

    num_bytes: int
    where: str
    is_virtual: bool = False
    """Whether the limit holds for mapped memory (``ulimit -v``), and not for used memory."""


def available_memory(num_ranks: int, *, gpus: bool = True) -> AvailableMemory:
    """Return the memory limit of one of ``num_ranks`` on this machine: the memory of its smallest accelerator.

    Without any: the rank's part of the memory of the machine or container, or ``ulimit -v`` if it is less. This process
    does not begin to use accelerators, since it could no longer be forked.

    Args:
        gpus: False to ignore GPUs and other accelerators.
    """
    if gpus and (found := _of_accelerator()) is not None:
        return found
    total, what = _host()
    found = AvailableMemory(total // num_ranks, _part(num_ranks) + what)
    own = resource.getrlimit(resource.RLIMIT_AS)[0]
    return found if own == resource.RLIM_INFINITY else min(found, AvailableMemory(own, "what ulimit -v allows", True))


def format_bytes(num_bytes: int | None) -> str:
    """Format a number of bytes for a reader, as "1.2 GB"; "?" for None."""
    if num_bytes is None:
        return "?"
    value, units = float(num_bytes), ["B", "kB", "MB", "GB", "TB"]
    while value >= 999.5 and len(units) > 1:
        value /= 1000
        units.pop(0)
    return f"{value:.3g} {units[0]}"


def _of_accelerator() -> AvailableMemory | None:
    from lagom.cluster import device_word, kind_of_device, other_devices, visible_gpus

    if others := other_devices():  # then ranks use no GPU of NVIDIA's
        sizes = [device.num_bytes for device in others if device.num_bytes is not None]
        where = f"of its {device_word(kind_of_device(others[0].name))}"
    else:
        sizes, where = gpu_memory(visible_gpus()), "of its GPU"
    return AvailableMemory(min(sizes), where) if sizes else None


def _part(num_ranks: int) -> str:
    return f"a {num_ranks}th of " if num_ranks > 3 else ("", "", "half of ", "a third of ")[num_ranks]


def gpu_memory(names: tuple[str, ...]) -> list[int]:
    """Return the bytes of each of the named GPUs, from nvidia-smi; [] if nvidia-smi is missing or fails."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    found = []
    for name in names:
        command = [tool, f"--id={name}", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
        try:
            text = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
            found.append(int(text.split()[0]) << 20)
        except (OSError, subprocess.SubprocessError, ValueError, IndexError):
            return []
    return found


def _host() -> tuple[int, str]:
    match = re.search(r"MemTotal:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    assert match is not None
    limits = [(int(match[1]) * 1024, "this machine's memory")]
    limits += [(limit, "what this container may take") for limit in cgroup_limits()]
    return min(limits)


def cgroup_limits(root: Path = ROOT, own: Path = OWN) -> list[int]:
    """Return the memory limits (bytes) of this process's control groups and of their parents."""
    found = []
    for folder, is_unified in control_groups("memory", root, own):
        file = folder / ("memory.max" if is_unified else "memory.limit_in_bytes")
        if file.is_file() and (text := file.read_text().strip()).isdigit() and int(text) < 1 << 60:
            found.append(int(text))
    return found
