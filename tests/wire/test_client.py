"""``lagom.wire.client``: a rank's end of the channel."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from lagom.wire import client as module
from lagom.wire.client import DriverClient, LinkClosed, dial
from lagom.wire.framing import MAX_FRAME, NONCE, PROOF, FrameKeys, body_of
from lagom.wire.messages import Dropped, Log, Lost, Stop, TaskHello

HELLO = TaskHello(task=0, version="0")


def log(number: int, size: int = 0) -> Log:
    return Log(rank=number, stream="stdout", data="x" * size)


@pytest.fixture
def pair() -> Iterator[tuple[DriverClient, DriverClient]]:
    left, right = (DriverClient(end) for end in socket.socketpair())
    yield left, right
    left.close()
    right.close()


def test_receive_takes_one_and_leaves_the_rest(pair: tuple[DriverClient, DriverClient]) -> None:
    left, right = pair
    for number in range(3):
        left.send(log(number))
    assert right.receive(1.0) == log(0)
    assert right.receive(1.0) == log(1)
    assert right.poll() == [log(2)]


def test_receive_gives_up_in_time(pair: tuple[DriverClient, DriverClient]) -> None:
    started = time.monotonic()
    assert pair[0].receive(0.05) is None
    assert time.monotonic() - started > 0.04


def test_a_program_may_have_thousands_of_files_open() -> None:
    held = [os.dup(2) for _ in range(1100)]
    try:
        left, right = (DriverClient(end) for end in socket.socketpair())
        assert right.fileno() > 1024
        assert right.receive(0.01) is None
        drawing = threading.Thread(target=lambda: received.append(right.receive(10.0)))
        received: list[object] = []
        drawing.start()
        left.send(log(0, 600_000))  # more than the kernel holds
        drawing.join()
        assert received == [log(0, 600_000)]
        left.close()
        right.close()
    finally:
        for number in held:
            os.close(number)


def test_what_arrived_before_the_end_is_still_given(pair: tuple[DriverClient, DriverClient]) -> None:
    left, right = pair
    left.send(log(1))
    left.close()
    assert right.poll() == [log(1)]
    with pytest.raises(LinkClosed):
        right.poll()
    with pytest.raises(LinkClosed):
        right.receive(1.0)


def test_a_reset_connection_is_the_end_of_a_link(pair: tuple[DriverClient, DriverClient]) -> None:
    left, right = pair
    left.send(log(1))
    right.close()
    with pytest.raises(LinkClosed, match="reset"):
        left.receive(1.0)


def test_a_message_that_fits_no_frame_is_refused_here_and_not_there() -> None:
    with pytest.raises(ValueError, match="frame"):
        body_of(Lost(message="x" * MAX_FRAME))


@pytest.mark.parametrize("body", [b"no json", b"\xff\xfe", b'{"half":', b"[1, 2]", b"3", b"{}"])
def test_garbage_is_the_end_of_a_link_and_no_crash(pair: tuple[DriverClient, DriverClient], body: bytes) -> None:
    left, right = pair
    left.socket.send(struct.pack(">I", len(body)) + body)
    with pytest.raises(LinkClosed):
        right.poll()


def test_send_to_nobody_says_so(pair: tuple[DriverClient, DriverClient]) -> None:
    left, right = pair
    right.close()
    with pytest.raises(LinkClosed):
        left.send(Stop())


def test_send_to_somebody_who_does_not_read_gives_up(pair: tuple[DriverClient, DriverClient]) -> None:
    left, _ = pair
    for _ in range(10):
        left.offer(log(0, 100_000))
    with pytest.raises(LinkClosed, match=r"0\.1 s"):
        left.send(Stop(), timeout_s=0.1)


def test_offers_to_a_slow_reader_cost_no_time_and_are_dropped_and_counted(
    pair: tuple[DriverClient, DriverClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_BACKLOG_BYTES", 4 << 20)
    left, right = pair
    for number in range(1000):
        left.offer(log(number, 20_000))  # one that waits for the reader waits for ever
    assert left.waiting()
    found = []
    while left.flush() or left.waiting():
        found += right.poll()
    left.offer(log(1000))
    found += right.poll()
    numbers = [message.rank for message in found if isinstance(message, Log)]
    dropped = [message.messages for message in found if isinstance(message, Dropped)]
    assert numbers == sorted(numbers)
    assert numbers[-1] == 1000
    assert len(dropped) == 1
    assert len(numbers) + dropped[0] == 1001


def test_sure_messages_wait_for_what_was_offered_before(pair: tuple[DriverClient, DriverClient]) -> None:
    left, right = pair
    for number in range(100):
        left.offer(log(number, 10_000))
    found: list[int] = []

    def read() -> None:
        while len(found) < 101:
            message = right.receive(5.0)
            assert isinstance(message, Log)
            found.append(message.rank)

    reader = threading.Thread(target=read)
    reader.start()
    left.send(log(100))
    reader.join()
    assert found == list(range(101))


def test_proofs_and_keys_are_good_for_one_secret_and_one_connection_only() -> None:
    every = [
        FrameKeys(b"secret", b"a", b"b"),
        FrameKeys(b"secret", b"a", b"c"),
        FrameKeys(b"secret", b"c", b"b"),
        FrameKeys(b"x", b"a", b"b"),
    ]
    values = [value for keys in every for value in vars(keys).values()]
    assert len(set(values)) == len(values) == 16
    assert vars(FrameKeys(b"secret", b"a", b"b")) == vars(every[0])
    assert not any(b"secret" in value for value in values)


def test_an_address_where_nobody_listens_is_no_exception() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
    assert dial(address, b"secret", HELLO, 1.0) is None


def test_a_listener_that_says_nothing_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert dial(server.getsockname(), b"secret", HELLO, 0.1) is None


@pytest.mark.parametrize("greeting", [b"SSH-2.0-OpenSSH\r\n", b"", b"x" * NONCE, b"x" * (NONCE + PROOF)])
def test_a_listener_that_is_something_else_is_no_exception(greeting: bytes) -> None:
    with listener(greeting) as (address, _):
        assert dial(address, b"secret", HELLO, 0.5) is None


@contextmanager
def listener(*says: bytes) -> Iterator[tuple[tuple[str, int], bytearray]]:
    """A listener that sends ``says`` one after the other to each connection, and keeps the bytes that it gets."""
    heard = bytearray()

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = server.accept()
                with connection:
                    connection.settimeout(2)
                    for text in says:
                        connection.sendall(text)
                        heard.extend(connection.recv(4096))

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve)
        thread.start()
        yield server.getsockname(), heard
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_one_that_only_repeats_what_ranks_say_is_not_taken_for_the_driver() -> None:
    secret = b"0123456789abcdef" * 2
    with listener(bytes(NONCE)) as (address, heard):
        assert dial(address, secret, HELLO, 0.5) is None
    rank_proof = bytes(heard[NONCE : NONCE + PROOF])
    assert rank_proof == FrameKeys(secret, bytes(NONCE), bytes(heard[:NONCE])).rank_proof
    assert secret not in heard
    assert secret.hex().encode() not in heard
    with listener(bytes(NONCE), rank_proof) as (address, _):
        assert dial(address, secret, HELLO, 0.5) is None
