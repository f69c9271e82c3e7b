"""``lagom.host.payload_copies``: hosts, as processes, that give each other the payload of a run."""

from __future__ import annotations

import dataclasses
import hashlib
import multiprocessing
import os
import select
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from lagom.cluster import Cluster
from lagom.config import TorchDistributedConfig
from lagom.host.workspace import host_workspace
from lagom.plan import plan
from lagom.wire.client import LinkClosed
from lagom.wire.connection import DriverConnection
from lagom.wire.payload_copy import PayloadCopy
from lagom.wire.payload_sources import MOST_FROM_DRIVER
from lagom.wire.server import DriverServer, anonymous_file
from lagom.wire.spec import RunSpec
from lagom.wire.tls import certificate_of_a_run, key_and_certificate
from lagom.worker.process_tree import children
from tests.doors import listening

_SIZE = 3_000_000
_FORK: Any = multiprocessing.get_context("fork")


class Driver:
    """The driver of a run with a payload, and how many bytes of it the driver sends."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, encrypts: bool) -> None:
        self.num_bytes = 0
        self.payload = os.urandom(_SIZE)
        self._fd = anonymous_file("payload")
        os.write(self._fd, self.payload)
        self.channel = DriverServer(lambda *_: None, lambda _: None, self._fd)
        tls, self._certificate = certificate_of_a_run() if encrypts else (None, "")
        self._of_hosts = key_and_certificate() if encrypts else ""
        self._tls = tls
        write, mine = DriverConnection.write, os.getpid()

        async def counted(connection: DriverConnection, data: bytes) -> None:
            if os.getpid() == mine:
                self.num_bytes += len(data)
            await write(connection, data)

        monkeypatch.setattr(DriverConnection, "write", counted)

    def __enter__(self) -> Driver:
        self.channel.__enter__()
        self._address = self.channel.listen("127.0.0.1", 40, self._tls)
        return self

    def __exit__(self, *exc: object) -> None:
        self.channel.__exit__(*exc)
        os.close(self._fd)

    def spec(self, *, passes_on: bool = True) -> RunSpec:
        return RunSpec(
            run_id="abc",
            plan=plan(TorchDistributedConfig(), Cluster(launcher="spark", slots=1)),
            env={},
            whole_env=False,
            cwd="/nowhere/at/all",
            sys_path=(),
            argv=("program",),
            python="3.11",
            token="",
            payload_size=_SIZE,
            payload_sha256=hashlib.sha256(self.payload).hexdigest(),
            passes_payload_on=passes_on,
            address=self._address,
            secret=self.channel.secret,
            certificate=self._certificate,
            rank_certificate=self._of_hosts,
        )


class Host:
    """A process that prepares ``spec`` in a temporary folder of its own, and begins and ends when it is told.

    All hosts of a test are forked before one begins: if the driver's thread is in OpenSSL at a fork, the child finds
    OpenSSL's locks taken for ever.
    """

    def __init__(self, spec: RunSpec, folder: Path) -> None:
        folder.mkdir()
        self.told, its = _FORK.Pipe()
        self.process = _FORK.Process(target=_prepare, args=(spec, folder, its))
        self.process.start()
        its.close()

    def begin(self) -> None:
        self.told.send_bytes(b"begin")

    def payload(self) -> bytes:
        """Return the payload of this host, or the error as text."""
        found: bytes = self.told.recv_bytes()
        return found

    def end(self) -> None:
        self.told.send_bytes(b"end")
        self.process.join()
        self.told.close()


def _prepare(spec: RunSpec, folder: Path, told: Connection) -> None:
    tempfile.tempdir = str(folder)
    told.recv_bytes()
    try:
        with host_workspace(spec) as place:
            told.send_bytes(os.pread(place.payload_fd, _SIZE + 1, 0))
            told.recv_bytes()
    except LinkClosed as error:
        told.send_bytes(str(error).encode())
        told.recv_bytes()


@contextmanager
def hosts(spec: RunSpec, folder: Path, num: int) -> Iterator[list[Host]]:
    folder.mkdir()
    found = [Host(spec, folder / str(i)) for i in range(num)]
    for host in found:
        host.begin()
    try:
        yield found
    finally:
        for host in found:
            host.end()


@pytest.mark.parametrize(  # those that encrypt show it
    ("num", "encrypts"), [(6, True), *(pytest.param(num, False, marks=pytest.mark.soak) for num in (12, 32))]
)
def test_the_driver_sends_few_copies_to_many_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num: int, encrypts: bool
) -> None:
    with Driver(monkeypatch, encrypts=encrypts) as driver, hosts(driver.spec(), tmp_path / "hosts", num) as found:
        assert all(host.payload() == driver.payload for host in found)
        assert driver.num_bytes <= MOST_FROM_DRIVER * _SIZE
    assert driver.num_bytes >= _SIZE


def test_few_hosts_take_it_from_the_driver_and_listen_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Driver(monkeypatch, encrypts=False) as driver:
        with hosts(driver.spec(passes_on=False), tmp_path / "hosts", 2) as found:
            assert all(host.payload() == driver.payload for host in found)
            assert not any(children(host.process.pid) for host in found)
        assert driver.num_bytes == 2 * _SIZE


def test_bytes_that_a_host_has_changed_are_used_by_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Driver(monkeypatch, encrypts=False) as driver, hosts(driver.spec(), tmp_path / "first", 1) as (first,):
        assert first.payload() == driver.payload
        (copy,) = tmp_path.glob("first/0/*/run-abc/payload")
        with copy.open("r+b") as file:
            file.seek(_SIZE // 2)
            file.write(b"changed")
        with hosts(driver.spec(), tmp_path / "others", 5) as found:
            assert all(host.payload() == driver.payload for host in found)


def test_a_host_gives_it_to_nobody_without_the_secret_and_to_nobody_once_all_have_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Driver(monkeypatch, encrypts=False) as driver, hosts(driver.spec(), tmp_path / "hosts", 1) as (host,):
        assert host.payload() == driver.payload
        (server,) = children(host.process.pid)
        while not (found := listening([server])):  # it begins when the host has the payload
            time.sleep(0.01)
        port = int(found[0].rpartition(":")[2])
        copy = PayloadCopy(str(tmp_path / "copy"), _SIZE, driver.spec().payload_sha256)
        with pytest.raises(LinkClosed, match="hangs up on us"):
            copy.take(("127.0.0.1", port), b"another secret of thirty-two byte", "", 5.0)
        copy.take(("127.0.0.1", port), driver.channel.secret, "", 5.0)
        driver.channel.end_relay()
        _await_end(server)


def test_what_gives_it_ends_with_a_killed_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Driver(monkeypatch, encrypts=False) as driver:
        host = Host(driver.spec(), tmp_path / "host")
        host.begin()
        assert host.payload() == driver.payload
        (server,) = children(host.process.pid)
        os.kill(host.process.pid, signal.SIGKILL)
        _await_end(server)
        host.process.join()
        host.told.close()
        with hosts(driver.spec(), tmp_path / "others", 2) as found:
            assert all(other.payload() == driver.payload for other in found)


def test_a_payload_of_another_digest_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Driver(monkeypatch, encrypts=False) as driver:
        spec = dataclasses.replace(driver.spec(), payload_sha256="0" * 64)
        with hosts(spec, tmp_path / "hosts", 1) as (host,):
            assert host.payload() == b"the bytes that arrived are not those sent"


def _await_end(pid: int) -> None:
    """Wait until a process, which may be another's child, has ended."""
    try:
        number = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        poll = select.poll()
        poll.register(number, select.POLLIN)
        assert poll.poll(60_000)
    finally:
        os.close(number)
