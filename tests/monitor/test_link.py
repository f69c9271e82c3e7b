"""``lagom.monitor.link``: a rank's end of the channel."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest

from lagom.monitor import link as module
from lagom.monitor.link import MAX_FRAME, Link, LinkClosed, dial, encode, proof


@pytest.fixture
def pair() -> Iterator[tuple[Link, Link]]:
    left, right = (Link(end) for end in socket.socketpair())
    yield left, right
    left.close()
    right.close()


def test_messages_arrive_in_order_and_as_they_were(pair: tuple[Link, Link]) -> None:
    left, right = pair
    sent = [{"type": "log", "data": "ünïcödé\x00\r\n", "n": number} for number in range(50)]
    for message in sent:
        left.send(message)
    assert right.poll() == sent
    assert right.poll() == []


def test_messages_go_both_ways(pair: tuple[Link, Link]) -> None:
    left, right = pair
    left.send({"to": "right"})
    right.send({"to": "left"})
    assert left.receive(1.0) == {"to": "left"}
    assert right.receive(1.0) == {"to": "right"}


def test_receive_takes_one_and_leaves_the_rest(pair: tuple[Link, Link]) -> None:
    left, right = pair
    for number in range(3):
        left.send({"n": number})
    assert right.receive(1.0) == {"n": 0}
    assert right.receive(1.0) == {"n": 1}
    assert right.poll() == [{"n": 2}]


def test_receive_gives_up_in_time(pair: tuple[Link, Link]) -> None:
    started = time.monotonic()
    assert pair[0].receive(0.05) is None
    assert 0.04 < time.monotonic() - started < 1.0


def test_a_frame_may_come_in_pieces(pair: tuple[Link, Link]) -> None:
    left, right = pair
    frame = encode({"type": "log", "data": "x" * 100})
    for position in range(len(frame)):
        assert right.poll() == []
        left.socket.send(frame[position : position + 1])
    assert right.poll() == [{"type": "log", "data": "x" * 100}]


def test_what_arrived_before_the_end_is_still_given(pair: tuple[Link, Link]) -> None:
    left, right = pair
    left.send({"last": "words"})
    left.close()
    assert right.poll() == [{"last": "words"}]
    with pytest.raises(LinkClosed):
        right.poll()
    with pytest.raises(LinkClosed):
        right.receive(1.0)


def test_half_a_frame_and_then_the_end_is_the_end(pair: tuple[Link, Link]) -> None:
    left, right = pair
    left.socket.send(encode({"a": 1})[:-1])
    left.close()
    with pytest.raises(LinkClosed):
        right.poll()


def test_a_frame_that_is_too_long_is_refused_before_it_is_read(pair: tuple[Link, Link]) -> None:
    left, right = pair
    left.socket.send(struct.pack(">I", MAX_FRAME + 1))
    with pytest.raises(LinkClosed, match="at most"):
        right.poll()


def test_a_message_that_fits_no_frame_is_refused_here_and_not_there() -> None:
    with pytest.raises(ValueError, match="frame"):
        encode({"data": "x" * MAX_FRAME})


@pytest.mark.parametrize("body", [b"no json", b"\xff\xfe", b'{"half":', b"[1, 2]", b"3"])
def test_garbage_is_the_end_of_a_link_and_no_crash(pair: tuple[Link, Link], body: bytes) -> None:
    left, right = pair
    left.socket.send(struct.pack(">I", len(body)) + body)
    with pytest.raises(LinkClosed):
        right.poll()


def test_send_to_nobody_says_so(pair: tuple[Link, Link]) -> None:
    left, right = pair
    right.close()
    with pytest.raises(LinkClosed):
        left.send({"a": 1})


def test_send_to_somebody_who_does_not_read_gives_up(pair: tuple[Link, Link]) -> None:
    left, _ = pair
    for _ in range(10):
        left.offer({"data": "x" * 100_000})
    with pytest.raises(LinkClosed, match=r"0\.1 s"):
        left.send({"a": 1}, timeout_s=0.1)


def test_offers_to_a_slow_reader_cost_no_time_and_are_dropped_and_counted(
    pair: tuple[Link, Link], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MAX_BACKLOG", 4 << 20)
    left, right = pair
    started = time.monotonic()
    for number in range(1000):
        left.offer({"type": "log", "n": number, "data": "x" * 20_000})
    assert time.monotonic() - started < 5
    assert left.waiting()
    found = []
    while left.flush() or left.waiting():
        found += right.poll()
    left.offer({"type": "log", "n": 1000, "data": ""})
    found += right.poll()
    numbers = [message["n"] for message in found if message["type"] == "log"]
    dropped = [message["messages"] for message in found if message["type"] == "dropped"]
    assert numbers == sorted(numbers)
    assert numbers[-1] == 1000
    assert len(dropped) == 1
    assert len(numbers) + dropped[0] == 1001


def test_sure_messages_wait_for_what_was_offered_before(pair: tuple[Link, Link]) -> None:
    left, right = pair
    for number in range(100):
        left.offer({"n": number, "data": "x" * 10_000})
    found: list[int] = []

    def read() -> None:
        while len(found) < 101:
            message = right.receive(5.0)
            assert message is not None
            found.append(message["n"])

    reader = threading.Thread(target=read)
    reader.start()
    left.send({"n": 100})
    reader.join()
    assert found == list(range(101))


def test_a_proof_is_good_for_its_secret_and_its_nonce_only() -> None:
    assert proof(b"secret", b"nonce") == proof(b"secret", b"nonce")
    assert len({proof(b"secret", b"nonce"), proof(b"secret", b"other"), proof(b"other", b"nonce")}) == 3
    assert "secret" not in proof(b"secret", b"nonce")


def test_an_address_where_nobody_listens_is_no_exception() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
    assert dial(address, b"secret", {}, 1.0) is None


def test_a_listener_that_says_nothing_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        started = time.monotonic()
        assert dial(server.getsockname(), b"secret", {}, 0.1) is None
        assert time.monotonic() - started < 2


@pytest.mark.parametrize(
    "greeting", [b"SSH-2.0-OpenSSH\r\n", struct.pack(">I", 2) + b"{}", encode({"nonce": 3}), encode({"nonce": "xyz"})]
)
def test_a_listener_that_is_something_else_is_no_exception(greeting: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def greet() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(greeting)
                connection.settimeout(2)
                connection.recv(100)

        thread = threading.Thread(target=greet)
        thread.start()
        assert dial(server.getsockname(), b"secret", {}, 0.5) is None
        thread.join()


def test_the_secret_itself_is_never_sent() -> None:
    secret = b"0123456789abcdef" * 2
    seen = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def listen() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(encode({"nonce": "00" * 16}))
                seen.extend(connection.recv(4096))

        thread = threading.Thread(target=listen)
        thread.start()
        link = dial(server.getsockname(), secret, {"purpose": "task", "task": 0}, 2.0)
        thread.join()
    assert link is not None
    link.close()
    hello = json.loads(seen[4:])
    assert hello["proof"] == module.proof(secret, bytes(16))
    assert secret not in seen
    assert secret.hex().encode() not in seen
