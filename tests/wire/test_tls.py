"""``lagom.wire.tls``: an encrypted channel serves its own ranks, and says nothing to anybody else."""

from __future__ import annotations

import datetime
import hashlib
import os
import socket
import ssl
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lagom.wire.client import DriverClient, deliver, dial
from lagom.wire.fetch import fetch_file
from lagom.wire.framing import anonymous_file
from lagom.wire.messages import Log, Lost, Message, Stopping, TaskHello, own_version
from lagom.wire.server import DriverServer
from lagom.wire.tls import NoCertificate, certificate_of_a_run

WORD = "a word that nobody else is to read"


@contextmanager
def channel(
    payload_fd: int | None = None,
    hello_s: float = 5.0,
) -> Iterator[tuple[DriverServer, tuple[str, int], str, list[tuple[int, Message]]]]:
    """An encrypted channel that keeps the messages that it gets."""
    messages: list[tuple[int, Message]] = []
    tls, certificate = certificate_of_a_run()

    def take(task: int, message: Message) -> None:
        messages.append((task, message))

    with DriverServer(take, lambda _: None, payload_fd, hello_s=hello_s) as made:
        yield made, made.listen("127.0.0.1", tls=tls), certificate, messages


@contextmanager
def wire(address: tuple[str, int]) -> Iterator[tuple[tuple[str, int], bytearray]]:
    """A way to ``address`` that takes down all that goes over it."""
    seen, threads = bytearray(), []

    def carry(source: socket.socket, target: socket.socket) -> None:
        while data := source.recv(1 << 16):
            seen.extend(data)
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)

    def accept() -> None:
        near, _ = server.accept()
        with near, socket.create_connection(address) as far:
            back = threading.Thread(target=carry, args=(far, near))
            back.start()
            carry(near, far)
            back.join()

    with socket.create_server(("127.0.0.1", 0)) as server:
        threads.append(threading.Thread(target=accept))
        threads[0].start()
        yield server.getsockname(), seen
        threads[0].join(10)
        assert not threads[0].is_alive()


def talk(address: tuple[str, int], made: DriverServer, certificate: str, messages: list[Any]) -> None:
    link = dial(address, made.secret, TaskHello(task=3, version=own_version()), 5.0, certificate)
    assert link is not None
    link.send(Lost(message=WORD * 20_000))
    link.send(Stopping())
    deadline = time.monotonic() + 10.0
    while (3, Stopping()) not in messages and time.monotonic() < deadline:
        time.sleep(0.005)
    for number in range(200):
        made.send(3, Log(rank=number, stream="", data=WORD * 1000))
    assert [wanted(link).rank for _ in range(200)] == list(range(200))
    assert [message for task, message in messages if task == 3] == [
        Lost(message=WORD * 20_000),
        Stopping(),
    ]
    link.close()


def wanted(link: DriverClient) -> Log:
    message = link.receive(10.0)
    assert isinstance(message, Log)
    return message


def test_messages_of_any_length_go_both_ways_and_nobody_reads_them() -> None:
    with channel() as (made, address, certificate, messages), wire(address) as (way, seen):
        talk(way, made, certificate, messages)
    assert len(seen) > 200_000
    assert WORD.encode() not in seen
    assert b"number" not in seen
    with DriverServer(lambda task, message: messages.append((task, message)), lambda _: None) as made:
        messages.clear()
        with wire(made.listen("127.0.0.1")) as (way, seen):  # that the wire would have told
            talk(way, made, "", messages)
    assert WORD.encode() in seen


def test_files_go_both_ways(tmp_path: Path) -> None:
    data = os.urandom(3_000_000)
    digest = hashlib.sha256(data).hexdigest()
    fd = anonymous_file("test")
    os.write(fd, data)
    with channel(fd) as (made, address, certificate, _):
        fetch_file(address, made.secret, certificate, "payload", str(tmp_path / "a"), len(data), digest, 5.0)
        assert (tmp_path / "a").read_bytes() == data
        assert deliver(address, made.secret, "outcome-0", fd, 5.0, certificate) == digest
        assert os.pread(made.delivered["outcome-0"], len(data) + 1, 0) == data
    os.close(fd)


def test_a_driver_with_another_certificate_is_not_believed() -> None:
    _, another = certificate_of_a_run()
    hello = TaskHello(task=0, version=own_version())
    with channel() as (made, address, certificate, messages):
        assert dial(address, made.secret, hello, 2.0, another) is None
        assert dial(address, made.secret, hello, 2.0) is None  # without any: in clear
        link = dial(address, made.secret, hello, 2.0, certificate)
        assert link is not None
        link.close()
    with DriverServer(lambda *_: None, lambda _: None) as made:
        address = made.listen("127.0.0.1")
        assert dial(address, made.secret, hello, 2.0, certificate) is None
    assert messages == []


def test_strangers_that_begin_no_encryption_are_hung_up_on() -> None:
    with channel(hello_s=1.0) as (made, address, certificate, messages):
        for says in (b"", b"x" * 100, b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00"):
            with socket.create_connection(address, timeout=5.0) as stranger:
                stranger.sendall(says)
                while stranger.recv(100):  # an alert of TLS, then the end
                    pass
        talk(address, made, certificate, messages)


class _InAWeek(datetime.datetime):
    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> _InAWeek:
        return super().now(tz) + datetime.timedelta(days=7)


def test_a_host_whose_clock_is_behind_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datetime, "datetime", _InAWeek)
    with channel() as (made, address, certificate, messages):
        monkeypatch.undo()
        talk(address, made, certificate, messages)
        strict = ssl.create_default_context(cadata=certificate)
        strict.check_hostname = False
        with socket.create_connection(address) as connection, pytest.raises(ssl.SSLError, match="not yet valid"):
            strict.wrap_socket(connection)


@pytest.mark.parametrize("way", ["package", "program"])
def test_the_certificate_is_made_by_what_there_is(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "program":
        monkeypatch.setitem(sys.modules, "cryptography", None)
    else:
        monkeypatch.setattr("shutil.which", lambda _: None)
    with channel() as (made, address, certificate, messages):
        assert "PRIVATE" not in certificate
        assert len({certificate, certificate_of_a_run()[1]}) == 2
        talk(address, made, certificate, messages)


def test_where_nothing_makes_one_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    monkeypatch.setattr("shutil.which", lambda _: "/bin/false")
    with pytest.raises(NoCertificate, match="/bin/false made no certificate"):
        certificate_of_a_run()
    monkeypatch.setattr("shutil.which", lambda _: None)
    with pytest.raises(NoCertificate, match="neither the Python package cryptography nor an openssl"):
        certificate_of_a_run()
