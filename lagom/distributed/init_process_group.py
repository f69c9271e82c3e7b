"""``own_init_process_group``: gives a distributed program a process group of lagom's ranks, and turns patches off."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

import torch.distributed as dist
import torch.distributed.device_mesh  # noqa: F401  (has init_process_group by its name: torch's, if imported now)
from torch.distributed import distributed_c10d
from torch.utils.data import DistributedSampler

from lagom.disk import share_disk
from lagom.errors import LagomError
from lagom.exchange.run_store import reconnected
from lagom.exchange.sockets.encryption import Credentials
from lagom.exchange.torch_transport import refuse_gloo
from lagom.patching.importers import Importers
from lagom.patching.replace import replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from lagom.session.session import Session

_ENDS_S = 30 * 24 * 3600.0
"""Seconds that rank 0 waits for the other ranks' ends: in effect for ever, since only the host process may give up."""
_importers = Importers(distributed_c10d, "init_process_group")
_kept: list[Any] = []
"""Groups and their stores, which live to the end of the process. See Note [Kept groups]."""


@contextmanager
def own_init_process_group(session: Session) -> Iterator[None]:
    """Context manager in which ``init_process_group`` makes a group of lagom's ranks and turns the patches off.

    At the end, restore ``sys.excepthook``, which torch sets, and destroy a group that the program has left initialized;
    after a failure, only if there is one rank. If the program has made a group and has not failed, rank 0 then waits
    for the ends of the other ranks. See Note [Joining].
    """
    original = distributed_c10d.init_process_group
    was_initialized = dist.is_initialized()
    excepthook = sys.excepthook  # ``init_process_group`` replaces it
    with ExitStack() as stack:
        joining = _Joining(session, original, stack)
        patched = joining.patched()
        for module, name in _importers.find():
            stack.enter_context(replaced(module, name, patched))
        if session.group is not None and session.group.credentials.encrypt:
            stack.enter_context(replaced(distributed_c10d, "ProcessGroupGloo", _RefusedGloo))
        if session.world_size > 1:
            stack.enter_context(replaced(DistributedSampler, "__iter__", _iterated(session)))
        succeeded = False
        try:
            yield
            succeeded = True
        finally:
            joining.over = True
            # After a failure do not destroy the group: NCCL would wait for the exchanges of other ranks, and so delay
            # the report of the failure. The rank's process ends anyway.
            if dist.is_initialized() and not was_initialized and (succeeded or session.world_size == 1):
                if session.world_size > 1:
                    _kept.extend(distributed_c10d._world.pg_map)
                dist.destroy_process_group()
            sys.excepthook = excepthook
    if session.has_joined:
        _wait_for_all(session)


class _Joining:
    """Serves the program's calls of ``init_process_group``."""

    def __init__(self, session: Session, original: Callable[..., None], stack: ExitStack) -> None:
        self.over = False
        """Whether the run has ended, so that later calls of the patched function call torch's own."""
        self._session = session
        self._original = original
        self._signature = inspect.signature(original)
        self._pid = os.getpid()
        self._num = 0
        self._stack = stack

    def patched(self) -> Callable[..., None]:
        @functools.wraps(self._original)
        def init_process_group(*args: Any, **kwargs: Any) -> None:
            if self.over or os.getpid() != self._pid or dist.is_initialized() or _is_fake(args, kwargs):
                self._original(*args, **kwargs)
                return
            if self._session.world_size == 1:
                self._original(*args, **kwargs)
            else:
                self._join(self._signature.bind(*args, **kwargs).arguments)
            if self._session.device_facts:  # a run on accelerators
                from lagom.exchange.device_backend import class_of_program

                self._session.device_facts["program"] = class_of_program(self._session.device)
            self._session.live, self._session.has_joined = False, True
            share_disk()

        return init_process_group

    def _join(self, asked: dict[str, Any]) -> None:
        session = self._session
        _check(session, asked)
        if not session.has_joined:
            session.check_place("init_process_group()")
            _tell(session)
            if (call := session.events.program_joins.call) is not None:
                call()
        timeout = asked.get("timeout")
        assert session.store is not None
        store = reconnected(session.store, timeout if isinstance(timeout, timedelta) else None)
        # A program may destroy its group and make another, which must not find the keys of the first: hence a prefix.
        _kept.append(store)  # a PrefixStore does not keep a store written in Python alive
        prefixed = dist.PrefixStore(f"joined/{self._num}", store)
        self._num += 1
        rest = {key: value for key, value in asked.items() if key not in ("init_method", "store", "rank", "world_size")}
        backend = asked.get("backend")
        from lagom.exchange.torch_backend.registration import register  # for distributed programs only
        from lagom.exchange.torch_backend.shared_group import BACKEND

        if BACKEND in str(backend or "").lower():
            register(*_credentials(session))
        elif backend is None and session.device.type == "cpu":
            self._share_memory()
        self._original(**rest, store=prefixed, rank=session.rank, world_size=session.world_size)
        _kept.append(dist.group.WORLD)

    def _share_memory(self) -> None:
        """Make "lagom" the default backend for CPU tensors until the run's end, if ``Group.sums_itself``."""
        if self._session.group is None or not self._session.group.sums_itself:
            return
        from lagom.exchange.torch_backend.registration import register
        from lagom.exchange.torch_backend.shared_group import BACKEND

        register(*_credentials(self._session))
        defaults = dist.Backend.default_device_backend_map
        if defaults["cpu"] != BACKEND:
            ours = {**defaults, "cpu": BACKEND}
            self._stack.enter_context(replaced(dist.Backend, "default_device_backend_map", ours))


class _RefusedGloo(dist.ProcessGroupGloo):
    """Replaces torch's class in runs that encrypt between hosts, and refuses to be made, since gloo cannot encrypt."""

    def __init__(self, *_: object, **__: object) -> None:
        refuse_gloo()


def _credentials(session: Session) -> tuple[Credentials, str]:
    """Return the credentials of the run's ranks, and this host's address ("" without a group)."""
    return (Credentials(session.key), "") if session.group is None else (session.group.credentials, session.group.ip)


def _tell(session: Session) -> None:
    plan = session.plan
    if plan.config.gradient_compression or plan.config.lr_scaling or plan.config.reduction != "mean":
        session.say_once(
            "the program is distributed by itself: gradient_compression, reduction and lr_scaling are not for it"
        )


def _is_fake(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether the backend is torch's "fake", which simulates a large world in one process."""
    return (args[0] if args else kwargs.get("backend")) == "fake"


def _check(session: Session, asked: Mapping[str, Any]) -> None:
    """Raise a LagomError unless lagom's ranks can form the requested group."""
    if session.distributed_part:
        raise LagomError(
            "init_process_group() was called after training began as an ordinary program: "
            f"{session.distributed_part}, and lagom distributed it; call init_process_group() before, or leave it out"
        )
    rank, world_size, whence = _asked_place(asked)
    if rank not in (-1, session.rank) or world_size not in (-1, session.world_size):
        raise LagomError(
            f"init_process_group() was asked for rank {'?' if rank == -1 else rank} of "
            f"{'?' if world_size == -1 else world_size}, by {whence}, but this is rank {session.rank} of the "
            f"{session.world_size} that lagom runs; leave rank and world_size out, or take them from RANK and "
            f"WORLD_SIZE in the environment, or run it with world_size={max(world_size, 1)}"
        )
    backend = str(asked.get("backend") or "").lower()
    if "mpi" in backend:
        raise LagomError(
            f"init_process_group() was asked for the backend {backend!r}, but lagom's ranks were not started by "
            "mpirun; use 'gloo', 'lagom', 'nccl' or none"
        )
    if "nccl" in backend and not (session.group is not None and session.group.has_gpus):
        raise LagomError(
            f"init_process_group() was asked for the backend {backend!r}, but not every rank of this run has a GPU to "
            "itself; use 'gloo' or none, or run on as many GPUs as there are ranks"
        )


def _asked_place(asked: Mapping[str, Any]) -> tuple[int, int, str]:
    """Return the requested rank and world size (-1 if absent), and the place where they were given, as a text."""
    by_argument = int(asked.get("rank", -1)), int(asked.get("world_size", -1))
    if by_argument != (-1, -1) or asked.get("store") is not None:
        return *by_argument, "its arguments"
    url = asked.get("init_method") or "env://"
    query = parse_qs(urlsplit(url).query)
    if "rank" in query or "world_size" in query:
        return int(query.get("rank", ["-1"])[0]), int(query.get("world_size", ["-1"])[0]), url
    if not url.startswith("env://"):
        return -1, -1, url
    return int(os.environ.get("RANK", -1)), int(os.environ.get("WORLD_SIZE", -1)), "the environment"


def _iterated(session: Session) -> Callable[..., Iterator[Any]]:
    original = vars(DistributedSampler)["__iter__"]

    @functools.wraps(original)
    def iterate(sampler: Any) -> Iterator[Any]:
        if session.distributed and sampler.num_replicas > 1:
            raise LagomError(
                f"a DistributedSampler for {sampler.num_replicas} replicas was used before init_process_group(), and "
                "lagom shares out loaders itself then; call init_process_group() first, or use an ordinary sampler"
            )
        iterator: Iterator[Any] = original(sampler)
        return iterator

    return iterate


def _wait_for_all(session: Session) -> None:
    """Tell rank 0 that this rank has ended; on rank 0, which has the store, wait for all other ranks.

    This is not an exchange, which would time out if rank 0 alone works long at the end, such as on an evaluation.
    """
    notes = session.notes
    if notes is None or session.world_size == 1:
        return
    if session.rank:
        notes.set(f"ended/{session.rank}", "")
    else:
        for rank in range(1, session.world_size):
            notes.wait(f"ended/{rank}", _ENDS_S)


# Note [Joining]
#
# torch's own init_process_group makes the group, so backends, devices, options and errors are torch's. Only the
# rendezvous is replaced: the address, file or store that the program names was meant for another launcher, so ranks
# find each other by lagom's store. Rank and world size are lagom's. A program that requests another rank or world size
# gets an error, since it has split its data or its work by them. At world size 1 the call is left to torch.
#
# A program that names no backend gets a default for its device. On the CPU the default is "lagom" if ranks share
# memory, or lagom connects their hosts (``HostTransport``); else gloo. "lagom" works as a default because its group is
# a Python object: for other groups torch assumes that a backend without a name is gloo, and DDP asks for gloo. A
# program that names "gloo" gets gloo, since it may need features that only gloo has.
#
# After the first call the program itself does the work that lagom does for other programs, so all patches are off
# (session.live is False). A loader follows its sampler, a backward reduces nothing, BatchNorm uses the rank's own
# statistics, and forwards draw from the common stream, whose start is equal on all ranks. Ranks write to the same disk
# without lagom's checks. All this holds also after destroy_process_group. The call must not come late: if a loader was
# split or gradients were averaged before it, results would differ from those under torchrun, so this is an error.
#
# All ranks must make the first call. It begins with an exchange that detects ranks at another place of the program (a
# backward, a loader, the end), and raises an error on all ranks. After it, torch's timeouts hold.

# Note [Kept groups]
#
# A gloo group joins its threads when its last reference is dropped, usually in destroy_process_group or later with a
# DDP module. The thread that drops the reference holds the GIL while it waits. A gloo thread that is releasing the
# tensors of its last exchange needs the GIL: a deadlock. This was seen in torch 2.13 without lagom's patches: 4 of 20
# runs of DDP on 3 ranks and 2 busy cores hung, and 0 of 20 with the group kept alive. A rank ends by os._exit, so
# keeping its groups alive costs nothing. At world size 1, where the process may go on after the run, groups are left to
# torch.
