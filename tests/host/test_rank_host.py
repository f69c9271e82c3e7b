"""``lagom.host.rank_host`` and ``child``: a rank is forked, heard, ended and reported, with and without a driver."""

from __future__ import annotations

import atexit
import concurrent.futures
import dataclasses
import multiprocessing
import os
import resource
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

import lagom
from lagom.cluster import Cluster
from lagom.config import TorchDistributedConfig
from lagom.errors import LagomError
from lagom.host import descendants
from lagom.host.rank_host import allow_files, make_rank_spec, run_task_ranks
from lagom.host.workspace import host_workspace
from lagom.plan import plan
from lagom.program.payload import Parcel, unpack_file
from lagom.program.signature import Call
from lagom.wire.client import DriverClient
from lagom.wire.framing import anonymous_file
from lagom.wire.messages import Failed, Join, Log, Message, Peers, RankAddress, RankReport, Stop
from lagom.wire.rendezvous import Stopped, peers
from lagom.wire.spec import RunSpec


@pytest.fixture(autouse=True)
def own_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))


M = TypeVar("M", bound=Message)


def spec(world_size: int, **env: str) -> RunSpec:
    cluster = Cluster(launcher="spark", slots=1, gpus_per_slot=world_size)
    return RunSpec(
        run_id="test",
        plan=_without_gpus(plan(TorchDistributedConfig(), cluster)),
        env=env,
        whole_env=False,
        cwd=os.getcwd(),
        sys_path=(),
        argv=(),
        python="",
        token="",
        payload_size=0,
    )


def _without_gpus(the_plan: Any) -> Any:
    import dataclasses

    return dataclasses.replace(the_plan, gpu=False)


def held(
    function: Callable[[], Any], world_size: int = 2, link: DriverClient | None = None, **env: str
) -> tuple[list[RankReport], list[Any]]:
    """Reports and outcomes of the ranks of one task."""
    call = Call(function=function, provided={"hparams": {}})
    files = [anonymous_file(str(rank)) for rank in range(world_size)]
    payload = anonymous_file("payload")
    try:
        Parcel(call).write(payload)
        with host_workspace(spec(world_size), payload_fd=payload) as place:
            gather = None if link else lambda text: [text]
            reports = run_task_ranks(spec(world_size, **env), 0, place, link, gather, files, "127.0.0.1")
        return reports, [unpack_file(fd) if os.fstat(fd).st_size else None for fd in files]
    finally:
        for fd in [payload, *files]:
            os.close(fd)


class Driver:
    """Plays the driver: answers ``Join`` with the table of ranks and ``Failed`` with ``Stop``; keeps all messages."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.link, self.theirs = DriverClient(ours), DriverClient(theirs)
        self.messages: list[Message] = []
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while (message := self._next()) is not None:
            self.messages.append(message)
            if isinstance(message, Join):
                self.link.send(peers([message]))
            if isinstance(message, Failed):
                self.link.send(Stop())

    def _next(self) -> Message | None:
        try:
            return self.link.receive(10.0)
        except ConnectionError:
            return None

    def of(self, kind: type[M]) -> list[M]:
        return [message for message in self.messages if isinstance(message, kind)]

    def close(self) -> None:
        self.theirs.close()
        self._thread.join()
        self.link.close()


@pytest.fixture
def driver() -> Iterator[Driver]:
    driver = Driver()
    yield driver
    driver.close()


def test_sys_exit_ends_every_rank_as_python_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lagom.host.supervisor.LEAVE_S", 60.0)
    late, last = tmp_path / "late", tmp_path / "last"

    def leave() -> None:
        if lagom.rank() == 0:
            time.sleep(0.3)  # the other one is there first
        atexit.register(lambda: last.write_text("at exit"))
        threading.Timer(0.1, late.write_text, ["in a thread"]).start()
        sys.exit(3)

    reports, _ = held(leave)
    assert [report.exit for report in reports] == [3, 3]
    assert (late.read_text(), last.read_text()) == ("in a thread", "at exit")


@pytest.mark.soak  # tests/driver/test_local.py shows it by default
def test_ranks_run_and_their_outcomes_lie_in_their_files(driver: Driver) -> None:
    reports, outcomes = held(lambda: lagom.rank() * 10, link=driver.theirs)
    assert [report.ok for report in reports] == [True, True]
    assert [outcome["value"] for outcome in outcomes] == [0, 10]


@pytest.mark.soak  # tests/driver/test_local.py shows it by default
def test_only_rank_0_is_passed_on(driver: Driver) -> None:
    held(lambda: print("from", lagom.rank()), link=driver.theirs)
    driver.close()
    assert "".join(message.data for message in driver.of(Log)) == "from 0\n"


@pytest.mark.soak  # tests/integration/test_out_of_reach.py shows it by default
def test_what_is_printed_without_a_driver_travels_with_the_results() -> None:
    reports, _ = held(lambda: print("from", lagom.rank()))
    assert "".join(message.data for message in reports[0].output if isinstance(message, Log)) == "from 0\n"
    assert reports[1].output == []


def test_a_failure_without_a_driver_ends_the_others_and_is_reported() -> None:
    def train() -> None:
        if lagom.rank() == 1:
            raise KeyError("lr")
        time.sleep(1000)

    reports, outcomes = held(train)
    assert reports[0].stopped
    assert (reports[1].error, reports[1].message) == ("KeyError", "'lr'")
    assert outcomes[0] is None
    assert outcomes[1]["error"].args == ("lr",)


def test_ranks_are_ended_where_the_kernel_does_not_list_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descendants, "adopts_orphans", True)
    monkeypatch.setattr(descendants, "children", lambda pid: [])

    def train() -> None:
        if lagom.rank() == 1:
            raise KeyError("x")
        time.sleep(1000)

    reports, _ = held(train)
    assert [report.error for report in reports] == ["", "KeyError"]


@pytest.mark.soak  # tests/driver/test_local.py shows it by default
def test_a_failure_is_told_to_the_driver_before_its_ranks_are_ended(driver: Driver) -> None:
    def train() -> None:
        if lagom.rank() == 1:
            raise KeyError("lr")
        time.sleep(1000)

    held(train, link=driver.theirs)
    driver.close()
    (failed,) = driver.of(Failed)
    assert (failed.report.rank, failed.report.error) == (1, "KeyError")


def test_a_driver_that_goes_away_takes_the_ranks_along(driver: Driver) -> None:
    def leave() -> None:
        while not driver.of(Log):
            time.sleep(0.01)
        driver.link.socket.shutdown(socket.SHUT_RDWR)

    thread = threading.Thread(target=leave)
    thread.start()

    def train() -> None:
        print("here", flush=True)
        time.sleep(1000)

    reports, _ = held(train, link=driver.theirs)
    thread.join()
    assert all(report.stopped for report in reports)


def test_a_run_that_is_over_before_it_began_starts_no_rank() -> None:
    ours, theirs = (DriverClient(end) for end in socket.socketpair())
    ours.send(Stop())
    with pytest.raises(Stopped):
        held(lambda: None, link=theirs)
    ours.close()
    theirs.close()


def test_no_process_and_no_file_is_left() -> None:
    held(lambda: None)
    files, processes = len(os.listdir("/proc/self/fd")), _children()
    held(lambda: os.kill(os.getpid(), signal.SIGKILL))
    assert len(os.listdir("/proc/self/fd")) == files
    assert _children() == processes


def _children() -> set[str]:
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def test_the_first_of_openmps_list_of_numbers_counts() -> None:
    with host_workspace(spec(1), payload_fd=0) as place:
        table = Peers(ranks=[RankAddress(0, "here", "1.2.3.4", None)], store=("1.2.3.4", 5), nccl=False)
        assert make_rank_spec(table, 0, spec(1, OMP_NUM_THREADS="4,3"), place, 0, None, None).threads == 4


def test_a_rank_knows_the_hosts_that_have_a_rank_of_its_local_rank() -> None:
    hosts = ["a", "b", "b", "a", "c"]
    ranks = [RankAddress(rank, host, "1.2.3.4", None) for rank, host in enumerate(hosts)]
    table = Peers(ranks=ranks, store=("1.2.3.4", 5), nccl=False)
    with host_workspace(spec(5), payload_fd=0) as place:
        rank_specs = [make_rank_spec(table, rank, spec(5), place, 0, None, None) for rank in range(5)]
    assert [(rank_spec.local_rank, rank_spec.local_world_size) for rank_spec in rank_specs] == [
        (0, 2),
        (0, 2),
        (1, 2),
        (1, 2),
        (0, 1),
    ]
    assert [(rank_spec.cross_rank, rank_spec.cross_size) for rank_spec in rank_specs] == [
        (0, 3),
        (1, 3),
        (0, 2),
        (1, 2),
        (2, 3),
    ]


@pytest.mark.parametrize(
    ("masks", "nccl", "already_distributed", "wanted"),
    [
        (["GPU-b", "GPU-a"], True, True, ("GPU-b,GPU-a", 1)),
        (["3", "1"], True, True, ("3,1", 1)),
        (["3", "1"], True, False, ("1", 0)),
        (["3", "3"], False, True, ("3", 0)),
        (["MIG-x", "MIG-y"], True, True, ("MIG-y", 0)),
        ([None, None], True, True, (None, 0)),
    ],
)
def test_a_program_for_torchrun_sees_the_gpus_of_its_host_in_the_order_of_its_ranks(
    masks: list[str | None], nccl: bool, already_distributed: bool, wanted: tuple[str | None, int]
) -> None:
    its = dataclasses.replace(spec(2), plan=dataclasses.replace(spec(2).plan, already_distributed=already_distributed))
    with host_workspace(its, payload_fd=0) as place:
        here = [RankAddress(rank, "here", "1.2.3.4", gpu) for rank, gpu in enumerate(masks)]
        there = RankAddress(2, "there", "1.2.3.5", "0")
        table = Peers(ranks=[*here, there], store=("1.2.3.4", 5), nccl=nccl)
        rank_spec = make_rank_spec(table, 1, its, place, 0, None, masks[1])
    assert (rank_spec.gpu, rank_spec.gpu_index) == wanted


def test_a_host_allows_the_files_of_its_ranks_or_says_how_many_it_needs() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        assert pool.submit(_limits, 512, min(4096, hard), 2).result() == "512"
        assert pool.submit(_limits, 512, min(4096, hard), 248).result() == "2184"
        assert (
            "take 2184 open files in one process, and it may open 1900" in pool.submit(_limits, 512, 1900, 248).result()
        )
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (soft, hard)


def _limits(soft: int, hard: int, num_ranks: int) -> str:
    """Return the error of a process with these limits that is to hold ranks, or its new limit."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    try:
        allow_files(num_ranks)
    except LagomError as error:
        return str(error)
    return str(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
