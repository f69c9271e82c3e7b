"""Spark for the tests in folders ``integration``: one at a time, each started once; and guards for what runs leave.

tests/conftest.py loads it for the trunk and for all extensions, which so share the sessions.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lagom.wire.connection import DriverConnection
from lagom.wire.server import DriverServer
from tests.integration import clusters, hosts


@pytest.fixture(scope="session")
def spark(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A session of the kind that a test's parameter names; tests of one kind run together."""
    if not clusters.java():
        pytest.skip("no Java here")
    if request.param.startswith(("foreign", "unplugged")) and not hosts.allowed():
        pytest.skip("no namespaces may be made here")
    with _open:
        yield _open.enter_context(clusters.KINDS[request.param]())


@pytest.fixture
def torchless(spark: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tasks run a Python that has what Spark needs and nothing else."""
    with clusters.bare_python(torch=False) as python:
        monkeypatch.setattr(spark.sparkContext, "pythonExec", str(python))
        yield


_open = contextlib.ExitStack()
"""The session that is open, if any."""


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Close Spark when its tests are over: others would run on whatever session is active."""
    if nextitem is None or "integration" not in nextitem.path.parts:
        _open.close()


@pytest.fixture(autouse=True)
def no_remains(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails an integration test after which a folder of a run, or a file in memory, is left."""
    if "integration" not in request.path.parts:
        yield
        return
    before = _remains()
    yield
    deadline = time.monotonic() + 15
    while (left := _remains() - before) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left


def _remains() -> set[str]:
    folders = {
        str(path)
        for path in Path(clusters.scratch(), f"lagom-{os.getuid()}").glob("run-*")
        if (path / ".alive").exists()
    }
    files = set[str]()
    for fd in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(fd)
        except OSError:
            continue
        if "lagom" in target:
            files.add(f"{fd} {target}")
    return folders | files


_STARTED_FOR_LONG = {"local-cluster", "standalone", "dwindling", "decommissioning", "foreign"} | {
    "foreign-encrypted",
    "unplugged",
}
"""Kinds of Spark that are in the soak only: a cluster takes a minute of processor time to start.

``test_special.py`` shows by default that lagom travels, and tests/exchange what hosts exchange.
"""
_UNCLOSED = "ignore:Exception ignored in. <socket.socket:pytest.PytestUnraisableExceptionWarning"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark everything in these folders ``integration``, and ``soak`` what a test has ``soak_on`` or others show."""
    leaves_sockets = importlib.metadata.version("pyspark").startswith("4.0.")  # each collect() leaves its own to Python
    for item in items:
        if "integration" in item.path.parts:
            item.add_marker(pytest.mark.integration)
            if leaves_sockets:
                item.add_marker(pytest.mark.filterwarnings(_UNCLOSED))
            kinds = _STARTED_FOR_LONG.union(*(marker.args for marker in item.iter_markers("soak_on")))
            callspec = getattr(item, "callspec", None)
            if callspec is not None and kinds & {value for value in callspec.params.values() if isinstance(value, str)}:
                item.add_marker(pytest.mark.soak)


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Requests of ranks to the driver, beside their links."""
    seen: list[str] = []
    hand_out, take_in = DriverServer.hand_out, DriverServer.take_in

    async def counted_out(self: DriverServer, peer: DriverConnection, fd: int | None) -> None:
        seen.append("fetch")
        await hand_out(self, peer, fd)

    def counted_in(self: DriverServer, name: str, size: int, peer: DriverConnection) -> None:
        seen.append(f"deliver {name}")
        take_in(self, name, size, peer)

    monkeypatch.setattr(DriverServer, "hand_out", counted_out)
    monkeypatch.setattr(DriverServer, "take_in", counted_in)
    return seen
