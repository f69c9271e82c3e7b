"""``lagom doctor``: what it looks at, what it says, and its exit status."""

from __future__ import annotations

import json
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from lagom import cli
from lagom.config import TorchDistributedConfig
from lagom.errors import CollectiveError, PlanError
from lagom.extensions.observe.doctor import visit as module
from lagom.extensions.observe.doctor.findings import Finding, findings
from lagom.extensions.observe.doctor.visit import print_findings, visit
from lagom.launch import choose
from lagom.program.signature import Call


def fact(rank: int, **more: Any) -> dict[str, Any]:
    """Return the facts that a rank of a healthy cluster finds."""
    return {
        "rank": rank,
        "local_rank": rank,
        "host": "a",
        "python": "3.11.7",
        "torch": "2.13.0",
        "lagom": "0.1.0",
        "cores": 8,
        "ranks_here": 2,
        "memory": 16 << 30,
        "device": None,
        "nvidia": False,
        "cuda_build": None,
        "no_compiled_part": "",
        "compiler": "/usr/bin/g++",
        "shared": 8 << 30,
        "scratch": 50 << 30,
        "files": 1 << 20,
        "ip": "10.0.0.1",
        "interface": "eth0",
        "reaches_driver": "",
        "latency_s": 2e-5,
        "bytes_s": 5e9,
        "way": "shared memory",
        "clock_s": 0.0,
    } | more


def said(*facts: dict[str, Any], seconds: float = 1.0) -> dict[str, Finding]:
    return {one.what: one for one in findings(facts, seconds)}


def gpu(uuid: str, **more: Any) -> dict[str, Any]:
    model = {"kind": "cuda", "name": "H100", "multiprocessors": 132, "driver": "570.1"} | more
    return {"device": {"memory": 80 << 30, "uuid": uuid, **model}, "nvidia": True, "cuda_build": "13.0"}


def test_a_healthy_cluster_passes() -> None:
    found = said(fact(0), fact(1))
    assert {one.level for one in found.values()} == {"pass"}
    assert not any(one.remedy for one in found.values())
    assert found["exchanges"].found == "shared memory: 4 KB take 20 us, 16 MB go at 5.00 GB/s"
    assert found["hosts"].found == "a: 2 ranks"
    one = said(fact(0, way="none", latency_s=None, bytes_s=None, reaches_driver=None, ip=None, interface=None))
    assert not {"exchanges", "clocks", "driver", "network"} & one.keys()
    assert found["network"].found == "ranks are on one host, at eth0 (10.0.0.1)"


@pytest.mark.parametrize(
    ("changes", "what", "level", "found", "remedy"),
    [
        ({"torch": "2.12.0", "host": "b"}, "versions", "warn", "torch: 2.13.0 on a, 2.12.0 on b", "install the same"),
        ({"nvidia": True}, "GPUs", "warn", "a has NVIDIA GPUs, and ranks there see none", "CUDA build of torch"),
        (gpu("x"), "GPUs", "fail", "ranks [0] have none", "give every task one GPU"),
        ({"ranks_here": 9}, "cores", "warn", "a has 9 ranks on 8 cores", "fewer ranks"),
        ({"memory": 500 << 20}, "memory", "warn", "524 MB", "memoryOverhead"),
        ({"reaches_driver": "timed out"}, "driver", "warn", "a cannot reach it: timed out", "spark.driver.host"),
        ({"scratch": 10 << 20}, "disk", "warn", "10 MB", "TMPDIR"),
        ({"shared": 64 << 20, "host": "b"}, "/dev/shm", "warn", "67 MB or more on each host (b)", "--shm-size"),
        (
            {"host": "b", "ip": "10.0.0.2", "interface": "ib0"},
            "network",
            "pass",
            "a: eth0 (10.0.0.1), b: ib0 (10.0",
            "",
        ),
        ({"files": 1024, "host": "b"}, "open files", "warn", "a process may open 1024 on b", "ulimit -Hn"),
        ({"no_compiled_part": "none"}, "compiled part", "warn", "not on a: none", "C++ compiler"),
        ({"compiler": None}, "C++ compiler", "warn", "none on a", "apt-get install g++"),
        ({"clock_s": -7.5, "host": "b"}, "clocks", "warn", "b is -7.5 s off", "NTP"),
    ],
)
def test_what_is_wrong_on_one_rank_is_said_with_a_remedy(
    changes: dict[str, Any], what: str, level: str, found: str, remedy: str
) -> None:
    one = said(fact(0), fact(1, **changes))[what]
    assert one.level == level
    assert found in one.found
    assert remedy in one.remedy


def test_gpus_that_ranks_share_are_counted() -> None:
    assert said(fact(0, **gpu("x")), fact(1, **gpu("y")))["GPUs"].found == "H100: one for each rank"
    shared = said(fact(0, **gpu("x")), fact(1, **gpu("x")))["GPUs"]
    assert (shared.level, shared.found) == ("warn", "H100: 2 ranks share 1")


def test_accelerators_that_are_no_gpus_are_not_called_so() -> None:
    found = said(*(fact(rank, **gpu(str(rank), kind="hpu", name="Gaudi")) for rank in range(2)))
    assert found["accelerators"].found == "Gaudi: one for each rank"
    shared = said(*(fact(rank, **gpu("x", kind="hpu")) for rank in range(2)))["accelerators"]
    assert shared.remedy.startswith("one accelerator for each task")
    assert "GPU" not in found


def test_models_on_which_random_numbers_depend_are_compared() -> None:
    same = said(*(fact(rank, **gpu(str(rank))) for rank in range(2)))
    assert "GPU models" not in same
    found = said(fact(0, **gpu("x")), fact(1, **gpu("y", multiprocessors=16), host="b"))["GPU models"]
    assert found.level == "warn"
    assert "rank 1 on b: H100 (16 multiprocessors, driver 570.1)" in found.found


def test_sockets_on_one_host_and_a_slow_launch_are_said() -> None:
    found = said(*(fact(rank, way="sockets") for rank in range(2)), seconds=30.0)
    assert found["exchanges"].level == found["launch"].level == "warn"
    across = said(fact(0, way="sockets"), fact(1, way="sockets", host="b"))
    assert across["exchanges"].level == "pass"


def test_it_runs_on_every_rank_and_its_exit_status_says_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "-n", "2", "--json"]) == 0
    found = {one["what"]: one for one in json.loads(capsys.readouterr().out)}
    assert found["cluster"]["found"] == "this machine, 2 ranks"
    assert found["launch"]["found"].startswith("2 ranks ran and came back in")
    assert found["hosts"]["found"].endswith(": 2 ranks")
    assert "4 KB take" in found["exchanges"]["found"]
    assert found["network"]["found"] == "ranks are on one host, at lo (127.0.0.1)"
    assert "/dev/shm" in found
    assert {one["level"] for one in found.values()} <= {"pass", "warn"}


@pytest.mark.parametrize("fails", ["cluster", "launch"])
def test_what_keeps_a_run_from_starting_is_a_line_too(
    fails: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Launcher:
        def cluster(self) -> Any:
            if fails == "cluster":
                raise PlanError("there are no slots")
            return choose("local").cluster()

        def where(self) -> str:
            return "nowhere"

        def run(self, *_: Any) -> Any:
            raise PlanError("executors have different versions of torch")

    monkeypatch.setattr(module, "choose", lambda kind: Launcher() if kind == "spark" else choose(kind))
    found = visit(TorchDistributedConfig(launcher="spark", world_size=1))
    assert (found[-1].level, found[-1].what) == ("fail", fails)
    assert "PlanError: " in found[-1].found
    assert f"FAIL  {fails}" in print_findings(found)


def visit_with(launcher: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The findings where the ranks are started by an object of the class ``launcher``."""
    monkeypatch.setattr(launcher, "cluster", lambda _: choose("local").cluster())
    monkeypatch.setattr(launcher, "where", lambda _: "nowhere")
    monkeypatch.setattr(module, "choose", lambda _: launcher())
    return visit(TorchDistributedConfig(launcher="local", world_size=2))


def test_the_tasks_and_ranks_of_many_slots_reach_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    class Launcher:
        facts = SimpleNamespace(bind="127.0.0.1", advertise=None)
        cluster = where = None

        def run(self, the_plan: Any, call: Call) -> Any:
            for _ in range(200):
                socket.create_connection(call.provided["hparams"]["address"], timeout=1.0).close()
            raise PlanError("all have reached it")

    found = visit_with(Launcher, monkeypatch)
    assert found[-1].found == "PlanError: all have reached it"


def test_ranks_that_do_not_reach_each_other_are_told_what_to_open(monkeypatch: pytest.MonkeyPatch) -> None:
    class Launcher:
        cluster = where = None

        def run(self, *_: Any) -> Any:
            raise CollectiveError("the ranks did not connect")

    found = visit_with(Launcher, monkeypatch)
    assert (found[-1].level, found[-1].what) == ("fail", "launch")
    assert "GLOO_SOCKET_IFNAME" in found[-1].remedy
