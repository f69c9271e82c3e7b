"""``run_task_ranks``: fork the ranks of one task, forward their messages to the driver, and end them."""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
import importlib.metadata
import os
import platform
import re
import resource
import socket
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from lagom.control_groups import available_cores
from lagom.errors import LagomError
from lagom.host.descendants import heard_sigterm
from lagom.host.forked_rank import ForkedRank, open_pidfd
from lagom.host.supervisor import RankSupervisor
from lagom.host.workspace import HostWorkspace
from lagom.on_rank.rank_process import run_rank
from lagom.restart.written_files import prepare_files
from lagom.wire.client import DriverClient
from lagom.wire.framing import anonymous_file
from lagom.wire.messages import Join, Peers, RankReport
from lagom.wire.rendezvous import join_run
from lagom.wire.spec import RankSpec, RunSpec

_FILES_OF_RANK = 8  # link, output, errors, stacks, outcome, end, SIGTERM, and one for its fork
_FILES = 200  # other open files of this process


def run_task_ranks(
    spec: RunSpec,
    task: int,
    workspace: HostWorkspace,
    link: DriverClient | None,
    gather: Callable[[str], Sequence[str]] | None,
    outcome_fds: Sequence[int],
    ip: str,
    gpus: Sequence[str] = (),
) -> list[RankReport]:
    """Run the ranks of ``task`` to their end; return a report for each, in rank order.

    Each rank writes its result or error to its file of ``outcome_fds``. ``gpus`` are the ranks' accelerators, in order.
    ``link`` and ``gather`` are as for ``join_run``, by which the tasks find each other.

    Raises:
        Stopped: the run ended before it began.
        LinkClosed, PlanError: the ranks could not form a group.
        LagomError: the system allows this process too few open files.
        OSError: there are not enough processes, files or memory.
    """
    first = task * spec.plan.ranks_per_slot
    ranks = range(first, min(first + spec.plan.ranks_per_slot, spec.plan.world_size))
    allow_files(len(ranks))
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket()) if task == 0 else None
        if listener is not None:
            listener.bind((ip, 0))  # reserves the port, but accepts no connection yet
        store = listener.getsockname()[:2] if listener is not None else None
        if task == 0 and spec.files is not None:
            prepare_files(spec.files)
        table = join_run(
            link, gather, join_message(task, ranks, workspace, ip, store, gpus), in_clear=spec.plan.in_clear
        )
        if listener is not None and table.store is not None:
            listener.listen(1024)
        watch = RankSupervisor(link, spec.plan)
        stack.callback(watch.end_all)
        local_ranks = list[int]()
        for rank, outcome_fd in zip(ranks, outcome_fds, strict=True):
            gpu = gpus[rank - first] if gpus else None
            store_fd = listener.fileno() if listener is not None and table.store is not None and rank == 0 else None
            rank_spec = make_rank_spec(table, rank, spec, workspace, outcome_fd, store_fd, gpu)
            watch.add(fork_rank(spec, rank_spec, workspace))
            local_ranks.append(rank_spec.local_rank)
        if spec.snapshots is not None and link is not None:
            watch.hear(stack.enter_context(heard_sigterm()))
        watch.report_start()
        reports = watch.supervise()
        if spec.plan.rehearsal is None:
            _settle_files(watch, workspace, ranks, local_ranks)
        return watch.driver.with_unsaid(reports)


def _settle_files(
    watch: RankSupervisor, workspace: HostWorkspace, ranks: Sequence[int], local_ranks: Sequence[int]
) -> None:
    """Put files that the ranks have left where they belong, and report those for which this fails."""
    from lagom.disk.settle import settle  # imported after the ranks have ended: settle imports torch

    for problem in settle(workspace.host_dir, ranks, local_ranks):
        watch.driver.say(f"[lagom] {problem}\n")


def allow_files(num_ranks: int) -> None:
    """Raise this process's limit of open files (RLIMIT_NOFILE) if it is too low for ``num_ranks`` ranks.

    The ranks, which are forked later, inherit the limit.

    Raises:
        LagomError: if the hard limit is too low.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES + _FILES_OF_RANK * num_ranks
    if soft == resource.RLIM_INFINITY or wanted <= soft:
        return
    if hard != resource.RLIM_INFINITY and wanted > hard:
        raise LagomError(
            f"{num_ranks} ranks on {platform.node()} take {wanted} open files in one process, and it may open {hard}; "
            "raise the limit (ulimit -Hn), or ask for fewer ranks"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def join_message(
    task: int, ranks: Sequence[int], workspace: HostWorkspace, ip: str, store: Any, gpus: Sequence[str]
) -> Join:
    """Describe the ranks of ``task`` and their host to the driver."""
    return Join(
        task=task,
        pid=os.getpid(),
        ranks=list(ranks),
        host=workspace.host,
        ip=ip,
        store=store,
        python=".".join(platform.python_version_tuple()[:2]),
        torch=importlib.metadata.version("torch").split("+")[0],
        gpus=list(gpus[: len(ranks)]),
        cores=available_cores(),
    )


def chosen_threads(spec: RunSpec) -> int:
    """Return the number of threads that the user has set before the call; 0 for none."""
    chosen = spec.env.get("OMP_NUM_THREADS", "").partition(",")[0]
    return int(chosen) if chosen.isdigit() else 0


def make_rank_spec(
    table: Peers,
    rank: int,
    spec: RunSpec,
    workspace: HostWorkspace,
    outcome_fd: int,
    store_fd: int | None,
    gpu: str | None,
) -> RankSpec:
    own = table.ranks[rank]
    hosts: dict[str, list[int]] = {}
    for other in table.ranks:
        hosts.setdefault(other.host, []).append(other.rank)
    here = hosts[own.host]
    local_rank = here.index(rank)
    equals = sorted(there[local_rank] for there in hosts.values() if len(there) > local_rank)
    cores = available_cores()
    alone = spec.whole_env and len(here) == 1  # keep torch's default number of threads, as in a plain run
    gpu, gpu_index = _gpu_mask(table, rank, here, gpu) if spec.plan.already_distributed else (gpu, 0)
    return RankSpec(
        rank=rank,
        local_rank=local_rank,
        local_world_size=len(here),
        ip=own.ip,
        store=table.store,
        store_fd=store_fd,
        control_fd=-1,
        outcome_fd=outcome_fd,
        payload_fd=workspace.payload_fd,
        stacks_fd=None,
        host_dir=str(workspace.host_dir),
        threads=chosen_threads(spec) or (0 if alone else max(1, cores // len(here))),
        gpu=gpu,
        gpu_index=gpu_index,
        cross_rank=equals.index(rank),
        cross_size=len(equals),
        nccl=table.nccl,
        key=hmac.digest(spec.secret, f"ranks of {spec.run_id}".encode(), "sha256"),
        certificate=spec.rank_certificate if spec.plan.encrypts_ranks and table.store is not None else "",
    )


def _gpu_mask(table: Peers, rank: int, here: Sequence[int], gpu: str | None) -> tuple[str | None, int]:
    """Return the GPU mask of a program that is distributed already, and the index of the rank's own GPU in it.

    Such a program selects its device by LOCAL_RANK, so it must see the GPUs of all ranks of its host, in their order.
    The mask stays the rank's own if ranks share GPUs or use parts of a GPU (MIG): a process can see only one part. A
    rank sees all accelerators that are not NVIDIA's; such a mask is the name of its own.
    """
    masks = [str(table.ranks[other].gpu) for other in here]
    if gpu is None or not table.nccl or any(re.search("MIG|[,:]", mask) for mask in masks):
        return gpu, 0
    return ",".join(masks), here.index(rank)


def _pipe(stack: contextlib.ExitStack) -> tuple[int, int]:
    """Return a pipe that ``stack`` closes."""
    ends = os.pipe()
    for end in ends:
        stack.callback(os.close, end)
    return ends


def fork_rank(spec: RunSpec, rank_spec: RankSpec, workspace: HostWorkspace) -> ForkedRank:
    """Fork the process of ``rank_spec``; return it as its host process sees it.

    Raises:
        OSError: if there are not enough processes, files or memory.
    """
    ours, theirs = socket.socketpair()
    parent = os.getpid()
    # Until Python 3.12, invalidate_caches() in a rank reads every archive in this cache again: 0.1 s for Spark's.
    sys.path_importer_cache.clear()
    with contextlib.ExitStack() as unless_forked, warnings.catch_warnings():
        out_read, out_write, err_read, err_write = (*_pipe(unless_forked), *_pipe(unless_forked))
        stacks_fd = anonymous_file("stacks")
        unless_forked.callback(os.close, stacks_fd)
        notice_fd = sigterm_read = sigterm_write = None
        if spec.snapshots is not None and rank_spec.rank == 0:
            notice_fd = anonymous_file("notice")
            unless_forked.callback(os.close, notice_fd)
            os.pwrite(notice_fd, b"\0", 0)
        if spec.snapshots is not None:
            sigterm_read, sigterm_write = _pipe(unless_forked)
        rank_spec = dataclasses.replace(
            rank_spec,
            control_fd=theirs.fileno(),
            stacks_fd=stacks_fd,
            notice_fd=notice_fd,
            sigterm_fd=sigterm_write,
        )
        # Python 3.12 warns that the child lacks the parent's threads; the child uses none of them.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
        unless_forked.pop_all()
    if pid == 0:
        run_rank(spec, rank_spec, workspace, out_write, err_write, parent)
    with contextlib.suppress(OSError):
        os.setpgid(pid, pid)  # parent and child both call setpgid, as either may run first
    theirs.close()
    os.close(out_write)
    os.close(err_write)
    if sigterm_write is not None:
        os.close(sigterm_write)
    for fd in (out_read, err_read):
        os.set_blocking(fd, False)
    pidfd, control = open_pidfd(pid), DriverClient(ours)
    return ForkedRank(rank_spec.rank, pid, pidfd, control, out_read, err_read, stacks_fd, notice_fd, sigterm_read)
