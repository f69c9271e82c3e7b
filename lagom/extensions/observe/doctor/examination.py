"""``examine``: collects facts about a rank's process, host and network; runs on every rank, returns plain values."""

from __future__ import annotations

import platform
import resource
import shutil
import socket
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lagom
from lagom.world import rank

_SMALL, _LARGE = 4096, 16 << 20  # bytes
_TURNS = 50
_DIAL_S = 3.0


def examine(reporter: Any, address: tuple[str, int] | None) -> dict[str, Any]:
    """Return facts about this rank: versions, cores, memory, accelerator, disk, network, and the speed of exchanges.

    Sizes are in bytes, times in seconds, speeds in bytes per second. A collective: all ranks must call it.

    Args:
        reporter: the run's reporter, which has the session.
        address: host and port at which the driver listens for this test; None if there is none to test.
    """
    import torch

    from lagom.accelerators import available_accelerator
    from lagom.available_memory import available_memory
    from lagom.control_groups import available_cores
    from lagom.exchange.native import reason_without_native
    from lagom.on_rank.network_interfaces import interface_of

    session = reporter._session
    device = available_accelerator()
    return {
        "rank": rank(),
        "local_rank": session.local_rank,
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lagom": lagom.__version__,
        "cores": available_cores(),
        "ranks_here": session.local_world_size,
        "memory": available_memory(session.local_world_size, gpus=False).num_bytes,
        "device": _facts_of_device(device) if device is not None else None,
        "nvidia": shutil.which("nvidia-smi") is not None,
        "cuda_build": torch.version.cuda,
        "no_compiled_part": reason_without_native(),
        "compiler": shutil.which("g++") or shutil.which("clang++") or shutil.which("c++"),
        "files": resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        "shared": _free("/dev/shm"),
        "scratch": _free(tempfile.gettempdir()),
        "ip": session.group.ip if session.group is not None else None,
        "interface": interface_of(session.group.ip) if session.group is not None else None,
        "reaches_driver": None if address is None else _reaches(address),
        **_exchanges(session),
    }


def _facts_of_device(kind: Any) -> dict[str, Any]:
    """Return the facts about the accelerator that this rank uses."""
    import torch

    from lagom.accelerators import current_index, device_model, device_property, total_bytes

    device = torch.device(kind.type, max(0, current_index()))
    uuid = device_property(device, "uuid") or ""
    return {"memory": total_bytes(device), "uuid": str(uuid), **asdict(device_model(device))}


def _free(folder: str) -> int | None:
    try:
        return shutil.disk_usage(folder).free if Path(folder).is_dir() else None
    except OSError:
        return None


def _reaches(address: tuple[str, int]) -> str:
    """Connect to ``address``; return "", or the error if that fails."""
    try:
        with socket.create_connection(address, timeout=_DIAL_S):
            return ""
    except OSError as error:
        return str(error)


def _exchanges(session: Any) -> dict[str, Any]:
    """Measure the latency and speed of exchanges between the ranks, and this rank's clock minus rank 0's clock."""
    import torch

    group = session.group
    if group is None:
        return {"latency_s": None, "bytes_s": None, "way": "none", "clock_s": 0.0}
    small, large = (torch.zeros(size // 4) for size in (_SMALL, _LARGE))
    latency = _seconds(lambda: group.all_reduce(small), _TURNS)
    way = "shared memory"
    if not group.shares_memory:
        way = "shared memory of each host, and sockets" if group.sums_itself else "sockets"
    seconds = _seconds(lambda: group.all_reduce(large), 5)
    group.barrier()
    now = time.time()
    clock = now - float(group.all_gather_bytes(str(now).encode())[0])
    return {"latency_s": latency, "bytes_s": _LARGE / seconds, "way": way, "clock_s": clock}


def _seconds(exchange: Any, turns: int) -> float:
    """Return the median seconds of ``turns`` calls of ``exchange``, after one call that sets up connections."""
    exchange()
    times = []
    for _ in range(turns):
        start = time.perf_counter()
        exchange()
        times.append(time.perf_counter() - start)
    return sorted(times)[turns // 2]
