"""The backend of torch.distributed for an accelerator, and process groups of it that torch does not know of."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

if TYPE_CHECKING:
    import datetime
    from collections.abc import Iterator

    import torch

_KNOWN = {"cuda": "nccl", "xpu": "xccl", "hpu": "hccl"}
"""Backends of the kinds of accelerators that have one by NVIDIA, Intel and Habana."""
_OF_CPU = frozenset(("gloo", "mpi", "ucc", "fake", "lagom", "undefined"))
"""Backends that carry no tensors of accelerators, or not in every operation."""


def device_backend(kind: str) -> str | None:
    """Return the backend for tensors on accelerators of ``kind``, which this torch has; None if there is none.

    It is the one that torch, or the package that brings the kind, has registered for it.
    """
    found: str | None = dist.Backend.default_device_backend_map.get(kind)
    if found is None or found in _OF_CPU:
        found = _KNOWN.get(kind)
    return found if found is not None and _is_there(found) else None


def _is_there(backend: str) -> bool:
    _register(backend)
    return backend.upper() in dist.Backend._plugins or dist.is_backend_available(backend)


def _register(backend: str) -> None:
    # torch 2.14 and newer find backends of packages, and their own second NCCL, by name when they are asked for.
    ensure = getattr(dist.Backend, "_ensure_backend_registered", None)
    if ensure is not None:
        ensure(backend)


def is_served(group: dist.ProcessGroup | None, device: torch.device) -> bool:
    """Return whether ``group`` of torch.distributed exchanges tensors on ``device`` by the backend of its kind."""
    backend = device_backend(device.type)
    return backend is not None and f"{device.type}:{backend}" in dist.get_backend_config(group)


def make_device_group(
    backend: str, device: torch.device, store: dist.Store, name: str, rank: int, size: int, timeout: datetime.timedelta
) -> Any:
    """Return a process group of ``backend`` that torch.distributed does not know of; see Note [The class of "nccl"].

    Args:
        name: differs between groups of the same ranks, whose keys in ``store`` begin with it.
    """
    store = dist.PrefixStore(name, store)
    _register(backend)
    plugin = dist.Backend._plugins.get(backend.upper())
    with _bound(device):
        if plugin is None:
            return _built_in(backend, store, rank, size, timeout)
        if not plugin.extended_api:
            return plugin.creator_fn(store, rank, size, timeout)
        options = distributed_c10d._DistributedBackendOptions()
        options.store = store
        options.group_rank, options.group_size = rank, size
        options.timeout = timeout
        options.group_id = f"lagom {name}"
        options.global_ranks_in_group = list(range(size))
        return plugin.creator_fn(options, None)


def _built_in(backend: str, store: dist.Store, rank: int, size: int, timeout: datetime.timedelta) -> Any:
    """Return a group of a class that this build of torch has: NVIDIA's ``ProcessGroupNCCL``, Intel's, and the like."""
    group_class: Any = getattr(distributed_c10d, f"ProcessGroup{backend.upper()}")
    options = group_class.Options()
    options._timeout = timeout
    return group_class(store, rank, size, options)


@contextmanager
def _bound(device: torch.device) -> Iterator[None]:
    """Set LOCAL_RANK to the number of ``device`` in the context: a group that connects at once takes it from there."""
    before = os.environ.get("LOCAL_RANK")
    os.environ["LOCAL_RANK"] = str(device.index or 0)
    try:
        yield
    finally:
        if before is None:
            del os.environ["LOCAL_RANK"]
        else:
            os.environ["LOCAL_RANK"] = before


def class_of_program(device: torch.device) -> str:
    """Return the name of the class that carries tensors on ``device`` in the program's own default group."""
    world: Any = dist.group.WORLD
    try:
        return type(world._get_backend(device)).__name__
    except RuntimeError:  # no backend of the group serves the device
        return "none"


# Note [The class of "nccl"]
#
# A name of a backend does not say which class carries it out. Up to torch 2.14 "nccl" is ``ProcessGroupNCCL``. In
# torch 2.15 (PyTorch pull request 192281) it is ``ProcessGroupNCCL2``, unless TORCH_DIST_USE_NCCL2 is 0, and
# "nccl-legacy" is the older class. There torch has "nccl" among its plug-ins, as backends of other packages are. So
# lagom asks the plug-in first, and builds a class of torch's only where no plug-in has the name. A program's own
# ``init_process_group("nccl")`` is torch's. ``run.json`` says which class ran. The newer class may connect when it is
# made, and takes its device from LOCAL_RANK, which a rank of an ordinary program does not have, so lagom sets the
# variable while a group is made.
