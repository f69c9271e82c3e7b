"""``run_ranks``: a function on several patched ranks, forked from the test, on this machine."""

from __future__ import annotations

import io
import itertools
import logging
import os
import pickle
import platform
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store

import lagom.gradients.reduction.sliced  # noqa: F401  # a session imports it, in every forked rank
from lagom.config import TorchDistributedConfig
from lagom.config.torch_distributed import Batches, Collectives, MixedPrecision
from lagom.disk import own_disk
from lagom.disk.libraries import loaded, slots
from lagom.disk.settle import settle
from lagom.errors import CollectiveError
from lagom.exchange.group import Group
from lagom.exchange.native import native
from lagom.exchange.run_store import SealedStore, all_gather_by
from lagom.exchange.shared_memory import shared
from lagom.exchange.sockets.connect import GatherTexts
from lagom.exchange.sockets.encryption import Credentials
from lagom.forward.rows import whole_batch
from lagom.patching.importers import remember_importers
from lagom.plan import Plan
from lagom.run_state.random_streams import seed_everything
from lagom.session.patched import patched
from lagom.session.session import Session
from lagom.watch.spans import Spans
from tests.huge_pages import use_huge_pages
from tests.rank_processes import TIMEOUT_S, WarmPool, on_new_ranks, packed
from tests.rank_processes import RankFailedError as RankFailedError

_gathers = itertools.count()
_calls = itertools.count()
_KEY = b"known to these ranks"
CREDENTIALS = Credentials(_KEY)
COLLECTIVES: Collectives = "gloo" if os.environ.get("LAGOM_TEST_COLLECTIVES") == "gloo" else "auto"
"""Transport of ranks: with "auto" they exchange through shared memory, with "gloo" not; see CONTRIBUTING.md."""
DEVICE = os.environ.get("LAGOM_TEST_DEVICE", "cpu")
"""Device of patched ranks; tensors that they return come home on the CPU. See CONTRIBUTING.md.

Ranks share "cuda:0" and "lagomtest:0"; with "lagomtest" each has a test device, and exchanges by the double of NCCL.
"""
TIMELINE = os.environ.get("LAGOM_TEST_TIMELINE") == "1"
"""Ranks note what they do; see CONTRIBUTING.md."""


def run_ranks(
    world_size: int,
    function: Callable[[Session], Any],
    *,
    batches: Batches = "split",
    seed: int = 0,
    patches: bool = True,
    always_slices: bool = True,
    collectives: Collectives = COLLECTIVES,
    credentials: Credentials = CREDENTIALS,
    **config: Any,
) -> list[Any]:
    """Run ``function(session)`` on every rank; the results in rank order.

    With ``patches=False`` torch is left alone; with ``always_slices`` forwards are sliced also where that does
    not pay; ``config`` are further fields of the config. Everything dies after 120 s.
    """
    plan = _plan(world_size, batches=batches, seed=seed, collectives=collectives, **config)
    for library in loaded():
        slots(library, platform.machine())  # once here, and not for 0.2 s in every rank; see lagom.host.preload
    native()  # likewise
    remember_importers()
    if next(_calls) % 100 == 0:  # writing splits huge pages, a few in each call
        use_huge_pages()
    with tempfile.TemporaryDirectory() as host_dir:
        job = _Job(plan, function, Path(host_dir), patches, always_slices, credentials)
        text = packed(job) if _pool is not None else None
        try:
            if _pool is None or text is None:
                return on_new_ranks(world_size, lambda rank: _answer(rank, job))
            return _pool.run(world_size, text)
        finally:
            settle(Path(host_dir), range(world_size), range(world_size))


@contextmanager
def warm_ranks() -> Iterator[None]:
    """Have ``run_ranks`` use the same processes again and again, where it is given a function that can be pickled."""
    global _pool
    _pool = pool = WarmPool(_answer)
    try:
        yield
    finally:
        _pool = None
        pool.end()


@contextmanager
def forked_ranks() -> Iterator[None]:
    """Have ``run_ranks`` fork from this process as it is now, for a while."""
    global _pool
    kept, _pool = _pool, None
    try:
        yield
    finally:
        _pool = kept


_pool: WarmPool | None = None


def alone(function: Callable[[Session], Any], seed: int = 0) -> Any:
    """The judge: ``function`` in one plain process, without any patch."""
    return run_ranks(1, function, seed=seed, patches=False)[0]


def check_against_one_process(
    function: Callable[[Session], Any], world_size: int = 2, *, rtol: float = 0.0, atol: float = 1e-12, **config: Any
) -> None:
    """Check that ``function`` returns on every rank what it returns in one plain process; ``config`` is of the run."""
    wanted = alone(function)
    for found in run_ranks(world_size, function, **config):
        torch.testing.assert_close(found, wanted, rtol=rtol, atol=atol)


def lagom_log(level: int = logging.NOTSET) -> list[str]:
    """Return a list that gets what lagom logs in this process from now on."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lagom").addHandler(handler)
    logging.getLogger("lagom").setLevel(level)
    return said


def session_alone(host_dir: Path, device: str = "cpu", mixed_precision: MixedPrecision = False) -> Session:
    """A session of one rank, in this process."""
    plan = _plan(1, batches="split", evaluation="replicated", seed=0, mixed_precision=mixed_precision)
    return _session(plan, 0, None, None, host_dir, torch.device(device))


def _plan(world_size: int, **config: Any) -> Plan:
    return Plan(
        config=TorchDistributedConfig(**config),
        name="test",
        launcher="local",
        world_size=world_size,
        ranks_per_slot=1,
        barrier=True,
        gpu=DEVICE != "cpu",
        names_gpu=DEVICE == "cpu",
    )


def _session(
    plan: Plan, rank: int, group: Group | None, store: Store | None, host_dir: Path, device: torch.device
) -> Session:
    return Session(
        plan=plan,
        group=group,
        rank=rank,
        world_size=plan.world_size,
        local_rank=rank,
        local_world_size=plan.world_size,
        device=device,
        host_dir=host_dir,
        store=store,
        key=_KEY,
        spans=Spans(rank) if TIMELINE else None,
    )


@dataclass(frozen=True)
class _Job:
    plan: Plan
    function: Callable[[Session], Any]
    host_dir: Path
    patches: bool
    always_slices: bool
    credentials: Credentials


def _answer(rank: int, job: _Job) -> tuple[bytes, bool]:
    global _gathers
    _gathers = itertools.count()
    torch.set_num_threads(1)
    forget_spark()
    try:
        return pickle.dumps(("returned", _at_home(_run(rank, job)))), True
    except BaseException as error:
        is_consequence = isinstance(error, CollectiveError)
        return pickle.dumps(("failed", (is_consequence, traceback.format_exc()))), False


def _at_home(value: Any) -> Any:
    if DEVICE == "cpu":
        return value
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, map_location="cpu", weights_only=False)


def forget_spark() -> None:
    """Leave the Spark session of an earlier test to the process that was forked.

    What a fork does with it goes through one socket with what the test's process and the other ranks do, and each
    gets the others' answers: libraries ask for an active session (MLflow), and whatever is collected tells Java.
    """
    core = sys.modules.get("pyspark.core.context")
    sql = sys.modules.get("pyspark.sql")
    if core is None or core.SparkContext._gateway is None:
        return
    core.SparkContext._gateway._gateway_client.is_connected = False  # what is collected is told no more
    core.SparkContext._gateway = core.SparkContext._jvm = core.SparkContext._active_spark_context = None
    if sql is not None:
        sql.SparkSession._instantiatedSession = None


def _run(rank: int, job: _Job) -> Any:
    plan, host_dir = job.plan, job.host_dir
    group, store = None, None
    if plan.world_size > 1:
        timeout = timedelta(seconds=TIMEOUT_S)
        store = FileStore(str(host_dir / "store"), -1)
        store.set_timeout(timeout)
        group = Group(
            rank,
            plan.world_size,
            all_gather_by(SealedStore(store, _KEY), "ways", rank, plan.world_size, TIMEOUT_S),
            lambda name, place, size: gloo(PrefixStore(name, store), place, size),
            nccl=partial(_on_devices, store, rank, plan.world_size) if DEVICE == "lagomtest" and job.patches else None,
            credentials=job.credentials,
            shares_memory=plan.config.collectives == "auto",
        )
    session = _session(plan, rank, group, store, host_dir, _device(rank) if job.patches else torch.device("cpu"))
    whole_batch.ALWAYS = job.always_slices
    if not job.patches:
        seed_everything(plan.config.seed or 0)
        return job.function(session)
    with own_disk(str(host_dir), rank, plan.world_size, plan.world_size), patched(session):
        seed_everything(plan.config.seed or 0)
        value = job.function(session)
        if session.backwards.divergence is not None and session.backwards.divergence.error is not None:
            # Tests catch the error on the ranks, to compare it; a program that does is told again at its end.
            session.backwards.divergence.check_end = lambda _: None  # type: ignore[assignment,method-assign]
    if group is not None:
        group.barrier()  # a rank that has ended would break what the others are still in
    return value


def _device(rank: int) -> torch.device:
    """Return the device of a patched rank, which loads the test device if that is meant."""
    if DEVICE.startswith("lagomtest"):
        from tests.accelerator.device_module import load

        os.environ.setdefault("LAGOMTEST_NUM_DEVICES", "8")
        load()
    device = torch.device(DEVICE, rank) if DEVICE == "lagomtest" else torch.device(DEVICE)
    if device.type == "lagomtest":
        torch.get_device_module(device).set_device(device.index)
    return device


def _on_devices(store: Store, rank: int, size: int, name: str) -> Any:
    from tests.accelerator.collective_backend import Communicator

    return Communicator(PrefixStore(name, store), rank, size, timedelta(seconds=TIMEOUT_S / 4))


def text_gather(session: Session) -> GatherTexts:
    """An exchange of texts among all ranks, through the store, with which they can set up another one."""
    assert session.store is not None
    name = f"gather {next(_gathers)}"
    return all_gather_by(SealedStore(session.store, _KEY), name, session.rank, session.world_size, TIMEOUT_S)


def gloo_of(session: Session) -> Any:
    """A gloo group of all ranks, to compare with."""
    assert session.store is not None
    return gloo(PrefixStore(f"gloo {next(_gathers)}", session.store), session.rank, session.world_size)


def communicator(session: Session, timeout_s: float = 60.0) -> Any:
    """A communicator of all ranks, which are on one host."""
    found = shared(session.rank, text_gather(session), timeout_s)
    assert not isinstance(found, str), found
    return found[1][0]


def gloo(store: Store, rank: int, world_size: int) -> Any:
    """A private gloo group on the loopback device."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # not in the stubs
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=TIMEOUT_S)
    return dist.ProcessGroupGloo(store, rank, world_size, options)
