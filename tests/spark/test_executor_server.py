"""The fork server of an executor, with processes of this machine in the place of Spark's daemon and its workers."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import lagom
from lagom.errors import LagomError, PlanError
from lagom.host.workspace import base_dir
from lagom.spark.executor_link import disconnect, run_in_server
from lagom.wire.framing import anonymous_file
from tests.spark.probes import Facts, Sleeps, TakesPayload

_PATIENCE_S = 60.0


_getpgrp = os.getpgrp


class Daemon:
    """Stands in for Spark's daemon, with a ``sleep`` process.

    ``os.getppid`` returns the pid of that process. So this process finds the executor servers that a Python worker of
    the daemon would find.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        disconnect()  # from the server of another daemon
        self.process = subprocess.Popen(["sleep", "1000"])
        # For a moment after its start a process has no command line, and then does not count as one that was there.
        wait_until(lambda: bool(Path(f"/proc/{self.process.pid}/cmdline").read_bytes()))
        patch.setattr(os, "getppid", lambda: self.process.pid)
        patch.setattr(os, "getpgrp", lambda: self.process.pid)  # Spark's daemon leads the group of its workers

    def end(self) -> None:
        """End; the server ends, too."""
        disconnect()
        self.process.kill()
        self.process.wait()
        wait_until(lambda: not servers(self.process.pid))


@pytest.fixture(scope="module")
def lasting() -> Iterator[Daemon]:
    """A daemon for all tests that leave it alive: each of its servers imports torch."""
    with pytest.MonkeyPatch.context() as patch:
        found = Daemon(patch)
        try:
            yield found
        finally:
            found.end()


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemon]:
    found = Daemon(monkeypatch)
    try:
        yield found
    finally:
        found.end()


def servers(daemon: int) -> list[int]:
    """Return the servers of a daemon's workers."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (path / "cmdline").read_bytes().decode().split("\0")
            if any(word.endswith("spark/start_server.py") for word in words) and str(daemon) in words:
                found.append(int(path.name))
    return found


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def lives(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def told(file: int) -> Any:
    return json.loads(os.pread(file, 1 << 20, 0) or "null")


def facts() -> dict[str, Any]:
    file = anonymous_file("told")
    try:
        assert run_in_server(Facts(), [file], lambda text: [text, "another's"]) == "ended"
        found: dict[str, Any] = told(file)
        return found
    finally:
        os.close(file)


@contextlib.contextmanager
def sleeping() -> Iterator[tuple[Any, list[int]]]:
    """Yield a worker whose task does not end; and the task's host process, a child of that, and the server."""
    file = anonymous_file("told")

    def work() -> None:
        disconnect()  # this process's copy of the other's connection
        print(run_in_server(Sleeps(), [file], None), flush=True)

    worker = multiprocessing.get_context("fork").Process(target=work)
    worker.start()
    try:
        wait_until(lambda: told(file) is not None)
        yield worker, told(file)
    finally:
        worker.kill()
        worker.join()
        os.close(file)


def test_a_host_process_gets_what_only_the_worker_can_get(lasting: Daemon, tmp_path: Path) -> None:
    file = anonymous_file("told")
    task = TakesPayload(str(tmp_path / "payload"))

    def write(path: str) -> None:
        Path(path).write_text("of Spark's broadcast")

    try:
        ended = run_in_server(task, [file], None, write)
        assert (ended, told(file)) == ("ended", "of Spark's broadcast")
    finally:
        os.close(file)


def test_tasks_share_what_the_server_has_imported_and_have_what_the_worker_has(
    lasting: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = facts()
    assert first["torch"]
    assert first["gathered"] == ["mine", "another's"]
    assert "GLIBC_TUNABLES" not in first["env"]
    assert first["lagom"] == lagom.__file__
    monkeypatch.setenv("OF_THE_WORKER", "1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    second = facts()
    assert second["server"] == first["server"]
    assert second["env"] == dict(os.environ)
    assert second["cwd"] == str(tmp_path)
    assert second["sys_path"] == sys.path


def test_a_task_ends_with_its_worker_and_the_server_stays(lasting: Daemon) -> None:
    with sleeping() as (worker, (host, child, server)):
        worker.kill()
        wait_until(lambda: not lives(host) and not lives(child))
    assert facts()["server"] == server


def test_a_killed_host_process_is_told_and_leaves_nothing(lasting: Daemon, capfd: pytest.CaptureFixture[str]) -> None:
    with sleeping() as (worker, (host, child, _)):
        os.kill(host, signal.SIGKILL)
        worker.join()
        wait_until(lambda: not lives(child))
    assert capfd.readouterr().out == "was killed by SIGKILL\n"


@pytest.mark.soak  # below, servers that are killed are replaced by default
def test_a_killed_server_ends_its_tasks_and_is_replaced(lasting: Daemon, capfd: pytest.CaptureFixture[str]) -> None:
    before = facts()["server"]
    with sleeping() as (worker, (host, child, server)):
        assert server == before
        os.kill(server, signal.SIGKILL)
        worker.join()
        wait_until(lambda: not lives(host) and not lives(child))
    assert "which was killed" in capfd.readouterr().out
    assert facts()["server"] != server


@pytest.mark.soak
def test_a_server_and_its_folder_which_has_a_long_path_go_with_its_daemon_even_if_nobody_reaps_that(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    assert facts()["server"] == facts()["server"]
    server = facts()["server"]
    folders = set(base_dir().glob("server-*"))
    daemon.process.kill()
    os.waitid(os.P_PID, daemon.process.pid, os.WEXITED | os.WNOWAIT)  # ended, and a zombie for as long as nobody reaps
    wait_until(lambda: not lives(server))
    assert len(folders - set(base_dir().glob("server-*"))) == 1


def test_the_server_of_a_worker_whose_daemon_was_killed_ends_with_the_worker() -> None:
    file = anonymous_file("told")
    begin, ended = multiprocessing.get_context("fork").Event(), multiprocessing.get_context("fork").Event()

    def work() -> None:
        disconnect()
        begin.wait()  # until the daemon is gone, and Spark gives its worker another task
        with patch.object(os, "getpgrp", _getpgrp):
            run_in_server(Facts(), [file], lambda text: [text])
        ended.wait()

    def daemon() -> None:
        os.setpgid(0, 0)  # as Spark's daemon does
        multiprocessing.get_context("fork").Process(target=work).start()
        os.kill(os.getpid(), signal.SIGKILL)

    process = multiprocessing.get_context("fork").Process(target=daemon)
    process.start()
    process.join()
    begin.set()
    wait_until(lambda: told(file) is not None)
    server = told(file)["server"]
    assert lives(server)
    ended.set()
    start = time.monotonic()
    wait_until(lambda: not lives(server))
    assert time.monotonic() - start < 10  # an unused server lives for a minute
    os.close(file)


@pytest.mark.soak
def test_a_torch_that_cannot_be_imported_is_told_until_it_is_mended(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.12: cannot open shared object file')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(PlanError, match=r"has no torch \(ImportError: libcudart.*install torch there, or set"):
        run_in_server(Facts(), [], None)
    (tmp_path / "torch.py").unlink()
    disconnect()  # as the end of a failed task's worker does
    wait_until(lambda: not servers(daemon.process.pid))
    assert facts()["torch"]


@pytest.mark.soak
def test_a_system_that_starts_no_more_processes_is_told_and_the_server_stays(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing = tmp_path / "refusing"
    (tmp_path / "sitecustomize.py").write_text(
        "import errno, os\n"
        "fork = os.fork\n"
        "def refused():\n"
        f"    if os.path.exists({str(refusing)!r}):\n"
        "        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))\n"
        "    return fork()\n"
        "os.fork = refused\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    server = facts()["server"]
    refusing.touch()
    with pytest.raises(LagomError, match=r"no process for the ranks can be started on .*: Resource temporarily unav"):
        run_in_server(Facts(), [], None)
    refusing.unlink()
    assert facts()["server"] == server


@pytest.mark.parametrize("times", [pytest.param(1, marks=pytest.mark.soak), 1000])
def test_a_server_that_is_killed_before_a_task_begins_is_replaced_some_times(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    left = tmp_path / "left"
    left.write_text("." * times)
    (tmp_path / "sitecustomize.py").write_text(
        "import os, pathlib, signal, sys\n"
        f"left = pathlib.Path({str(left)!r})\n"
        "if any(word.endswith('start_server.py') for word in sys.orig_argv) and left.read_text():\n"
        "    left.write_text(left.read_text()[1:])\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    if times == 1:
        assert facts()["torch"]
        return
    with pytest.raises(LagomError, match="ends again and again"):
        run_in_server(Facts(), [], None)
    assert times - len(left.read_text()) >= 3
