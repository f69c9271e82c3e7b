"""``lagom.extensions.observe.doctor.executors``: what a survey of executors means."""

from __future__ import annotations

import socket
from typing import Any

from lagom.extensions.observe.doctor.executors import executor_findings
from lagom.plan import Package
from lagom.spark.executor_survey import dial_all, peers_to_dial


def task(number: int, host: str = "a", **more: Any) -> dict[str, Any]:
    """Return the answer of a task in a healthy cluster."""
    seen = {"task": number, "host": host, "python": "3.11.7", "executable": "/usr/bin/python3", "torch": "2.13.0+cpu"}
    return seen | {"ip": "10.0.0.1", "no_address": "", "unreached": []} | more


def test_healthy_executors_are_one_line() -> None:
    found = executor_findings([task(0), task(1), task(2, "b")])
    assert [(one.level, one.found) for one in found] == [
        ("pass", "3 tasks on 2 hosts: Python 3.11.7 (/usr/bin/python3)")
    ]


def test_an_executor_without_torch_is_named_with_its_python() -> None:
    found = executor_findings([task(0), task(1, "b", torch=None, executable="/opt/py/bin/python3")])
    assert found[0].found == (
        "2 tasks on 2 hosts: Python 3.11.7 (/usr/bin/python3) on a; Python 3.11.7 (/opt/py/bin/python3) on b"
    )
    assert (found[1].level, found[1].what, found[1].found) == (
        "fail",
        "torch",
        "there is none for /opt/py/bin/python3 on b",
    )
    assert "PYSPARK_PYTHON" in found[1].remedy


def test_versions_of_torch_that_differ_fail_and_builds_do_not() -> None:
    assert len(executor_findings([task(0), task(1, torch="2.13.0")])) == 1
    found = executor_findings([task(0), task(1, "b", torch="2.12.1")])[1]
    assert (found.level, found.found) == ("fail", "several versions: 2.13.0 on a, 2.12.1 on b")


def test_who_cannot_reach_whom_is_said_by_address_and_port() -> None:
    def lost(host: str) -> list[dict[str, Any]]:
        return [{"host": host, "address": "10.0.0.1:4711", "why": "no answer within 3 s"}]

    found = executor_findings([task(0, "a"), task(1, "b", unreached=lost("a")), task(2, "b", unreached=lost("a"))])[1]
    assert (found.level, found.what) == ("fail", "network")
    assert found.found == "b does not reach a at 10.0.0.1:4711 (no answer within 3 s)"
    assert "all ports" in found.remedy
    many = executor_findings([task(number, f"h{number}", unreached=lost("a")) for number in range(9)])[1]
    assert many.found.endswith("; and 5 more")


def test_an_interface_that_is_not_there_is_said() -> None:
    found = executor_findings([task(0), task(1, "b", no_address="GLOO_SOCKET_IFNAME is 'ib7', and b has no such")])[1]
    assert (found.level, found.found) == (
        "fail",
        "b has no address for the others: GLOO_SOCKET_IFNAME is 'ib7', and b has no such",
    )


def test_each_other_host_is_dialled_once_and_by_different_tasks() -> None:
    everyone = [{"task": n, "host": f"h{n // 2}", "address": ["10.0.0.1", n]} for n in range(100)]
    dialled = [[one["task"] for one in peers_to_dial(mine, everyone)] for mine in everyone]
    assert all(len(tasks) == 32 for tasks in dialled)
    assert dialled[0] == list(range(2, 66, 2))
    assert dialled[99] == list(range(0, 64, 2))
    assert {task for tasks in dialled for task in tasks} >= set(range(0, 100, 2))
    assert peers_to_dial(everyone[0], everyone[:2]) == []


def test_what_does_not_answer_is_told_with_the_reason() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as closed:
        address, gone = list(server.getsockname()), list(closed.getsockname())
        closed.close()
        peers = [{"host": "here", "address": address}, {"host": "gone", "address": gone}]
        assert dial_all(peers) == [{"host": "gone", "address": f"127.0.0.1:{gone[1]}", "why": "connection refused"}]


PACKAGES = [
    Package(name="sklearn", distribution="scikit-learn", version="1.5.2", is_needed=True),
    Package(name="numpy", distribution="numpy", version="2.4.6", is_needed=True),
    Package(name="yaml", distribution="PyYAML", version="6.0"),
    Package(name="own_name"),
]


def packages(**found: str | None) -> dict[str, Any]:
    return {"packages": {"sklearn": "1.5.2", "numpy": "2.4.6", "yaml": "6.0", "own_name": ""} | found}


def test_the_programs_packages_are_compared_with_the_drivers() -> None:
    found = executor_findings([task(0, **packages()), task(1, "b", **packages())], PACKAGES)[1:]
    assert [(one.level, one.found) for one in found] == [
        ("pass", "scikit-learn 1.5.2 (sklearn), numpy 2.4.6, PyYAML 6.0 (yaml), own_name: the same on all executors")
    ]
    others = packages(numpy="1.26.4", yaml="5.4")
    (found_one,) = executor_findings([task(0, **packages()), task(1, "b", **others)], PACKAGES)[1:]
    assert (found_one.level, found_one.what) == ("warn", "packages")
    assert found_one.found == "numpy 2.4.6 on the driver, 1.26.4 on b; PyYAML 6.0 (yaml) on the driver, 5.4 on b"
    assert "lagom pack" in found_one.remedy


def test_packages_that_executors_lack_fail_if_they_are_needed() -> None:
    lacking = packages(sklearn=None, own_name=None, numpy=None)
    failed, warned = executor_findings([task(0, **lacking), task(1, "b", **packages(numpy=None))], PACKAGES)[1:]
    assert (failed.level, failed.found) == (
        "fail",
        "scikit-learn 1.5.2 (sklearn) is not on a; numpy 2.4.6 is not on a, b",
    )
    assert failed.remedy.startswith("install them there; or send the driver's environment ('lagom pack'")
    assert (warned.level, warned.found) == ("warn", "own_name is not on a: for code that imports it")
