"""``lagom.wire.server``: the driver's end serves its own ranks, whoever else comes."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import os
import resource
import secrets
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lagom.wire.client import DriverClient, LinkClosed, deliver, dial
from lagom.wire.fetch import fetch_file
from lagom.wire.framing import MAX_FRAME, NONCE, PROOF, FrameKeys, FrameSeals, anonymous_file, body_of, frame_of
from lagom.wire.messages import Lost, Message, Stop, TaskHello, own_version, to_json
from lagom.wire.server import DriverServer


def hello_of(task: int) -> TaskHello:
    return TaskHello(task=task, version=own_version())


def said(text: str) -> Lost:
    """Return some message."""
    return Lost(message=text)


class Driver:
    """A channel that takes down what it is told."""

    def __init__(self, payload_fd: int | None = None, hello_s: float = 5.0) -> None:
        self.messages: list[tuple[int, Message]] = []
        self.closed: list[int] = []
        self.channel = DriverServer(self.take, self.closed.append, payload_fd, hello_s=hello_s)

    def take(self, task: int, message: Message) -> None:
        self.messages.append((task, message))
        if message == said("odd"):
            raise KeyError("rank")

    def rank(self, task: int) -> DriverClient:
        link = dial(self.address, self.channel.secret, hello_of(task), 30.0)
        assert link is not None
        return link

    def stranger(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=30.0)

    def __enter__(self) -> Driver:
        self.channel.__enter__()
        self.address = self.channel.listen("127.0.0.1")
        return self

    def __exit__(self, *exc: object) -> None:
        self.channel.__exit__(*exc)


@pytest.fixture
def driver() -> Iterator[Driver]:
    with Driver() as driver:
        yield driver


def until(condition: Callable[[], Any], patience_s: float = 30.0) -> bool:
    deadline = time.monotonic() + patience_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    return bool(condition())


def served(driver: Driver, task: int = 7) -> bool:
    """Whether an honest rank is heard and answered."""
    link = driver.rank(task)
    try:
        before = len(driver.messages)
        link.send(said("hello"))
        if not until(lambda: (task, said("hello")) in driver.messages[before:]):
            return False
        driver.channel.send(task, said("answer"))
        return link.receive(30.0) == said("answer")
    finally:
        link.close()


def exactly(connection: socket.socket, size: int) -> bytes:
    return connection.recv(size, socket.MSG_WAITALL)


def introduced(driver: Driver, connection: socket.socket, **hello: Any) -> tuple[bytes, FrameSeals]:
    """Return a rank's first message, and the seals of its next ones."""
    nonce = secrets.token_bytes(NONCE)
    keys = FrameKeys(driver.channel.secret, exactly(connection, NONCE), nonce)
    seals = FrameSeals(keys.from_rank)
    return nonce + keys.rank_proof + frame_of(json.dumps(hello).encode(), seals), seals


def ended(connection: socket.socket) -> bool:
    """Whether the driver hangs up."""
    connection.settimeout(30.0)
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False
    return True


def test_ranks_are_heard_and_answered_each_its_own(driver: Driver) -> None:
    links = [driver.rank(task) for task in range(3)]
    for task, link in enumerate(links):
        link.send(said(f"from {task}"))
    assert until(lambda: len(driver.messages) == 3)
    assert sorted(driver.messages) == [(task, said(f"from {task}")) for task in range(3)]
    for task in range(3):
        driver.channel.send(task, said(f"to {task}"))
    assert [link.receive(30.0) for link in links] == [said(f"to {task}") for task in range(3)]
    driver.channel.broadcast(said("to all"))
    assert [link.receive(30.0) for link in links] == [said("to all")] * 3
    for link in links:
        link.close()
    assert until(lambda: sorted(driver.closed) == [0, 1, 2])


def test_an_inherited_pair_of_sockets_is_served_without_a_proof(driver: Driver) -> None:
    ours, theirs = socket.socketpair()
    driver.channel.adopt(ours, 0)
    link = DriverClient(theirs)
    link.send(said("a"))
    assert until(lambda: driver.messages == [(0, said("a"))])
    driver.channel.send(0, said("b"))
    assert link.receive(30.0) == said("b")
    link.close()
    assert until(lambda: driver.closed == [0])


@pytest.mark.parametrize("secret", [secrets.token_bytes(32), b"", bytes(32)], ids=["another", "none", "zeros"])
def test_a_stranger_with_a_wrong_secret_is_sent_away_unheard(driver: Driver, secret: bytes) -> None:
    with driver.stranger() as connection:
        keys = FrameKeys(secret, exactly(connection, NONCE), bytes(NONCE))
        frames = frame_of(body_of(hello_of(0)), FrameSeals(keys.from_rank))
        connection.sendall(bytes(NONCE) + keys.rank_proof + frames)
        assert ended(connection)
    assert not driver.messages
    assert not driver.closed
    assert served(driver)


def test_a_stranger_is_read_no_further_than_its_proof(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    def parsed(*_: Any) -> None:
        raise AssertionError("something was parsed")

    monkeypatch.setattr("lagom.wire.framing.json.loads", parsed)
    with driver.stranger() as connection:
        connection.sendall(b"x" * (NONCE + PROOF - 1))
        connection.settimeout(0.2)
        exactly(connection, NONCE)
        with pytest.raises(TimeoutError):  # it waits for the rest
            connection.recv(100)
        connection.sendall(b"x" + frame_of(body_of(hello_of(0))))
        assert ended(connection)
    assert not driver.messages
    assert not driver.closed


def test_a_recorded_introduction_opens_nothing(driver: Driver) -> None:
    with driver.stranger() as first:
        hello, seals = introduced(driver, first, **to_json(hello_of(0)))
        hello += frame_of(body_of(said("honest")), seals)
        first.sendall(hello)
        assert until(lambda: driver.messages == [(0, said("honest"))])
    with driver.stranger() as second:
        exactly(second, NONCE)
        second.sendall(hello)
        assert ended(second)
    assert driver.messages == [(0, said("honest"))]


def changed(frame: bytes) -> bytes:
    return frame[:-2] + bytes([frame[-2] ^ 1]) + frame[-1:]


@pytest.mark.parametrize(
    "tampered",
    [
        lambda one, two: one + one,  # replayed
        lambda one, two: two,  # one is missing
        lambda one, two: two + one,  # in another order
        lambda one, two: changed(one),
        lambda one, two: one[:4] + bytes(16) + one[20:],  # a seal of somebody else's
        lambda one, two: frame_of(one[20:]),  # no seal
    ],
)
def test_frames_that_somebody_on_the_way_plays_with_end_the_connection(driver: Driver, tampered: Any) -> None:
    with driver.stranger() as connection:
        hello, seals = introduced(driver, connection, **to_json(hello_of(0)))
        one, two = (frame_of(body_of(said(name)), seals) for name in ("one", "two"))
        connection.sendall(hello + tampered(one, two))
        assert ended(connection)
    assert until(lambda: driver.closed == [0])
    assert driver.messages in ([], [(0, said("one"))])  # heard once at most
    assert served(driver)


def test_a_task_with_another_version_of_lagom_is_told_of(driver: Driver) -> None:
    link = dial(driver.address, driver.channel.secret, TaskHello(task=5, version="0.0.1"), 30.0)
    assert link is not None
    assert until(lambda: driver.messages)
    ((task, message),) = driver.messages
    assert task == 5
    assert isinstance(message, Lost)
    assert message.message.startswith(f"task 5 runs lagom 0.0.1, and the driver {own_version()}; give driver and ")
    link.close()


def test_a_message_that_this_version_does_not_know_is_told_of_and_ends_its_connection(driver: Driver) -> None:
    link = driver.rank(0)
    link.send(b'{"type": "stop", "when": 3}')
    assert until(lambda: driver.closed == [0])
    assert driver.messages == [
        (
            0,
            said(
                f"a message 'stop' for lagom {own_version()} has the foreign field 'when'; "
                "give driver and executors the same version of lagom"
            ),
        )
    ]
    link.close()
    assert served(driver)


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        os.urandom(4096),
        struct.pack(">I", 0),
        struct.pack(">I", 2) + b"[]",
        struct.pack(">I", 4) + b"null",
        struct.pack(">I", 3) + b"\xff\xfe\xfd",
        struct.pack(">I", 4096) + b"[" * 4096,
        struct.pack(">I", 2**32 - 1) + b"x" * 100,
        struct.pack(">I", 5000) + b"x" * 5000,
    ],
)
def test_garbage_is_hung_up_on(driver: Driver, data: bytes) -> None:
    with driver.stranger() as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        assert ended(connection)
    assert served(driver)


@pytest.mark.parametrize(
    "what",
    [{}, {"task": 0}, {"type": "task", "task": 0}, {"type": "task", "task": "x", "version": own_version()}]
    + [{"type": kind} for kind in ("deliver", "fetch", "stop", "unheard of")],
)
def test_one_of_ours_that_talks_nonsense_is_hung_up_on(driver: Driver, what: dict[str, Any]) -> None:
    with driver.stranger() as connection:
        connection.sendall(introduced(driver, connection, **what)[0])
        connection.shutdown(socket.SHUT_WR)
        assert ended(connection)
    assert served(driver)


def test_a_rank_that_sends_a_frame_that_is_too_long_is_hung_up_on(driver: Driver) -> None:
    with driver.stranger() as connection:
        hello, _ = introduced(driver, connection, **to_json(hello_of(0)))
        connection.sendall(hello + struct.pack(">I", MAX_FRAME + 17))
        assert ended(connection)
    assert until(lambda: driver.closed == [0])
    assert served(driver)


def test_half_a_frame_and_the_end_is_the_end_of_that_rank_only(driver: Driver) -> None:
    with driver.stranger() as connection:
        hello, seals = introduced(driver, connection, **to_json(hello_of(0)))
        connection.sendall(hello + frame_of(body_of(said("a")), seals)[:-1])
    assert until(lambda: driver.closed == [0])
    assert driver.messages == []
    assert served(driver)


def test_strangers_that_say_nothing_keep_nobody_waiting() -> None:
    with Driver(hello_s=1000.0) as driver:  # who waits for one of them waits for ever
        strangers = [driver.stranger() for _ in range(200)]
        assert served(driver)
        for connection in strangers:
            connection.close()


def test_a_stranger_that_says_nothing_is_hung_up_on_in_time() -> None:
    with Driver(hello_s=0.1) as driver, driver.stranger() as connection:
        assert ended(connection)


def test_one_that_sends_a_byte_now_and_then_is_hung_up_on_in_time() -> None:
    with Driver(hello_s=0.3) as driver, driver.stranger() as connection:
        exactly(connection, NONCE)
        connection.settimeout(0.02)
        sent = 0
        with contextlib.suppress(ConnectionError):
            while sent < NONCE + PROOF:
                connection.sendall(b"x")
                sent += 1
                with contextlib.suppress(TimeoutError):
                    if not connection.recv(1):
                        break
        assert 1 <= sent < NONCE + PROOF
        assert served(driver)


@pytest.mark.soak
def test_ten_thousand_connections_harm_nobody(driver: Driver) -> None:
    """Connect from another process, 2000 at a time, since this one may open only few more files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = len(os.listdir("/proc/self/fd"))
    lasting = driver.rank(1)
    program = [sys.executable, "-c", FLOOD, str(driver.address[1]), str(10_000)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(before + 400, hard), hard))
    try:
        with subprocess.Popen(program, stdout=subprocess.PIPE, preexec_fn=many_files) as flood:
            assert flood.stdout is not None
            answered = 0
            while flood.poll() is None:
                lasting.send(said(str(answered)))
                answered += until(lambda: (1, said(str(answered))) in driver.messages)  # noqa: B023
                assert served(driver)
            assert flood.returncode == 0
            assert int(flood.stdout.read()) == 10_000
        assert answered
        assert until(lambda: len(os.listdir("/proc/self/fd")) <= before + 2, 10.0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        lasting.close()


def many_files() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


FLOOD = """
import collections, socket, sys
port, number = int(sys.argv[1]), int(sys.argv[2])
kept, made = collections.deque(), 0
while made < number:
    try:
        one = socket.create_connection(("127.0.0.1", port), timeout=5)
    except TimeoutError:
        continue
    made += 1
    kept.append(one)
    try:
        one.sendall([b"", b"x" * 48, b"GET / HTTP/1.1"][made % 3])
    except OSError:
        pass
    if len(kept) > 2000:
        kept.popleft().close()
print(made)
"""


def test_a_rank_that_was_thrown_out_in_a_crowd_tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lagom.wire.listener.MAX_STRANGERS", 0)
    with Driver() as driver:
        address, secret = driver.address, driver.channel.secret
        crowd = threading.Timer(0.01, lambda: monkeypatch.setattr("lagom.wire.listener.MAX_STRANGERS", 10))
        assert dial(address, secret, hello_of(0), 2.0) is None  # each time the oldest, and only one
        crowd.start()
        link = dial(address, secret, hello_of(0), 5.0)
        crowd.join()
        assert link is not None
        link.close()


def test_a_message_to_nobody_is_no_error(driver: Driver) -> None:
    driver.channel.send(99, said("a"))
    driver.channel.broadcast(said("a"))
    assert served(driver)


def test_a_rank_that_does_not_read_holds_up_no_other(driver: Driver) -> None:
    lazy = driver.rank(0)
    lazy.send(said("here"))
    assert until(lambda: driver.messages)
    for _ in range(50):
        driver.channel.send(0, said("x" * 500_000))
    assert served(driver)
    lazy.close()


def test_a_message_that_breaks_the_drivers_side_ends_its_connection_only(driver: Driver) -> None:
    link = driver.rank(0)
    link.send(said("odd"))
    assert until(lambda: driver.closed == [0])
    link.close()
    assert served(driver)


def test_closing_leaves_no_thread_and_no_file(driver: Driver) -> None:
    gc.collect()
    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    with Driver() as other:
        assert served(other)
        link, stranger = other.rank(1), other.stranger()
        link.send(said("a"))
        assert until(lambda: (1, said("a")) in other.messages)
    assert ended(stranger)
    assert ended(link.socket)
    link.close()
    stranger.close()
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) == files


def test_closing_gives_a_last_message_the_time_to_leave() -> None:
    with Driver() as driver:
        link = driver.rank(0)
        link.send(said("a"))
        assert until(lambda: driver.messages)
        driver.channel.broadcast(Stop())
    assert link.receive(30.0) == Stop()
    link.close()


def test_a_message_after_the_end_is_no_error() -> None:
    with Driver() as driver:
        pass
    driver.channel.send(0, said("a"))
    driver.channel.broadcast(said("a"))


def test_call_later_is_forgotten_when_the_channel_closes() -> None:
    called: list[str] = []
    with Driver() as driver:
        driver.channel.call_later(0.01, lambda: called.append("soon"))
        driver.channel.call_later(60.0, lambda: called.append("later"))
        assert until(lambda: called)
    assert called == ["soon"]


# --- files that travel beside the messages


@pytest.fixture
def payload() -> Iterator[tuple[int, bytes]]:
    data = os.urandom(3_000_000)
    fd = anonymous_file("payload")
    os.write(fd, data)
    yield fd, data
    os.close(fd)


def fetched(driver: Driver, path: Path, size: int, digest: str, secret: bytes | None = None) -> bytes:
    secret = secret or driver.channel.secret
    fetch_file(driver.address, secret, "", "payload", str(path), size, digest, 2.0)
    return path.read_bytes()


def test_hosts_fetch_the_payload_whole_at_the_same_time(tmp_path: Path, payload: tuple[int, bytes]) -> None:
    fd, data = payload
    digest = hashlib.sha256(data).hexdigest()
    found: list[bytes] = []
    with Driver(fd) as driver:
        threads = [
            threading.Thread(target=lambda n=n: found.append(fetched(driver, tmp_path / str(n), len(data), digest)))
            for n in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == [data] * 3
    assert (tmp_path / "0").stat().st_mode & 0o077 == 0


def test_a_payload_that_is_not_the_one_announced_is_refused(tmp_path: Path, payload: tuple[int, bytes]) -> None:
    fd, data = payload
    with Driver(fd) as driver:
        with pytest.raises(LinkClosed, match="not those sent"):
            fetched(driver, tmp_path / "a", len(data), "0" * 64)
        with pytest.raises(LinkClosed, match=f"{len(data)} of {len(data) + 1} bytes"):
            fetched(driver, tmp_path / "b", len(data) + 1, "0" * 64)


def test_the_payload_is_not_for_strangers(tmp_path: Path, payload: tuple[int, bytes]) -> None:
    fd, data = payload
    with Driver(fd) as driver, pytest.raises(LinkClosed, match="hangs up on us"):
        fetched(driver, tmp_path / "a", len(data), "0" * 64, secret=secrets.token_bytes(32))
    assert not (tmp_path / "a").exists()


def test_a_driver_that_is_gone_is_named(tmp_path: Path) -> None:
    with Driver() as driver:
        pass
    with pytest.raises(LinkClosed, match="cannot be reached"):
        fetched(driver, tmp_path / "a", 1, "0" * 64)


def test_an_outcome_is_delivered_whole_and_its_digest_known(driver: Driver, payload: tuple[int, bytes]) -> None:
    fd, data = payload
    digest = deliver(driver.address, driver.channel.secret, "outcome-0", fd, 2.0)
    assert digest == hashlib.sha256(data).hexdigest()
    kept = driver.channel.delivered["outcome-0"]
    assert os.pread(kept, len(data) + 1, 0) == data


def test_a_second_delivery_replaces_the_first(driver: Driver, payload: tuple[int, bytes]) -> None:
    fd, data = payload
    short = anonymous_file("short")
    os.write(short, b"earlier")
    for each in (short, fd):
        assert deliver(driver.address, driver.channel.secret, "outcome-0", each, 2.0)
    os.close(short)
    assert os.fstat(driver.channel.delivered["outcome-0"]).st_size == len(data)


def test_half_a_delivery_is_none(driver: Driver) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with driver.stranger() as connection:
        hello, _ = introduced(driver, connection, type="deliver", name="outcome-0", size=1000)
        connection.sendall(hello + b"x" * 500)
    assert until(lambda: len(os.listdir("/proc/self/fd")) == before)
    assert driver.channel.delivered == {}
    assert served(driver)


def test_a_delivery_with_a_wrong_secret_is_none(driver: Driver, payload: tuple[int, bytes]) -> None:
    assert deliver(driver.address, secrets.token_bytes(32), "outcome-0", payload[0], 2.0) is None
    assert driver.channel.delivered == {}


def test_a_delivery_to_nobody_is_none(payload: tuple[int, bytes]) -> None:
    with Driver() as driver:
        pass
    assert deliver(driver.address, driver.channel.secret, "outcome-0", payload[0], 1.0) is None


def test_an_empty_file_is_delivered(driver: Driver) -> None:
    fd = anonymous_file("empty")
    assert deliver(driver.address, driver.channel.secret, "outcome-0", fd, 2.0) == hashlib.sha256().hexdigest()
    os.close(fd)


def test_an_anonymous_file_has_no_name_to_leave_behind() -> None:
    fd = anonymous_file("test")
    os.write(fd, b"x")
    assert "(deleted)" in os.readlink(f"/proc/self/fd/{fd}")
    os.close(fd)
