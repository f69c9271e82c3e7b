"""``lagom.exchange.sockets.encryption``: what ranks of several hosts send each other where Spark encrypts."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import ssl
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from lagom.exchange.sockets.connect import accepted, reach
from lagom.exchange.sockets.encryption import NO_CREDENTIALS, Connection, Credentials, EncryptedSocket, encrypted
from lagom.exchange.sockets.handshake import End, Misdirected
from lagom.wire.tls import contexts_of_ranks, key_and_certificate
from tests.encryption import KEY, credentials, encrypted_pair, tcp_pair

LARGE = os.urandom(1 << 20) * 8
ENDS = [End(rank, "a test", ("here", "there", "there")) for rank in range(3)]


def test_both_ways_at_once_by_two_threads_arrives_whole() -> None:
    pair = encrypted_pair()
    received = [bytearray(len(LARGE)) for _ in pair]
    with ThreadPoolExecutor(4) as pool:
        works: list[Any] = [pool.submit(one.sendall, LARGE) for one in pair]
        works += [
            pool.submit(one.recv_into, memoryview(into), 0, socket.MSG_WAITALL)
            for one, into in zip(pair, received, strict=True)
        ]
        assert [work.result() for work in works] == [None, None, len(LARGE), len(LARGE)]
    assert all(bytes(one) == LARGE for one in received)
    for one in pair:
        one.close()


@pytest.mark.parametrize("sizes", [(1,), (16, 3), (16, 0, 40_000), (16_384,), (3, 100_000), (1,) * 300])
def test_messages_in_parts_arrive_in_order(sizes: tuple[int, ...]) -> None:
    near, far = encrypted_pair()
    parts: list[bytes | memoryview] = [os.urandom(size) for size in sizes]
    wanted = b"".join(parts)
    found = b""
    while len(found) < len(wanted):
        rest, sent = b"".join(parts), near.sendmsg(parts)
        assert 0 < sent <= len(rest)
        cut = sent
        while parts and cut >= len(parts[0]):
            cut -= len(parts.pop(0))
        if parts:
            parts[0] = parts[0][cut:]
        arrived = bytearray(sent)
        assert far.recv_into(memoryview(arrived), 0, socket.MSG_WAITALL) == sent
        found += arrived
    assert found == wanted
    near.close()
    assert far.recv(1) == b""
    far.close()


def sent_now(near: Connection, place: int) -> int:
    """The number of bytes that there is room for, of ``LARGE`` from ``place`` on."""
    try:
        return near.sendmsg([LARGE[place : place + 10_000], LARGE[place + 10_000 :]])
    except BlockingIOError:
        return 0


def test_a_full_or_an_empty_connection_does_not_wait_unless_asked() -> None:
    near, far = encrypted_pair()
    near.setblocking(False)
    with pytest.raises(BlockingIOError):
        near.recv_into(memoryview(bytearray(10)))
    sent, arrived = 0, bytearray(len(LARGE))
    while count := sent_now(near, sent):
        sent += count
    assert 0 < sent < len(LARGE)
    with ThreadPoolExecutor(1) as pool:
        later = pool.submit(far.recv_into, memoryview(arrived), 0, socket.MSG_WAITALL)
        while sent < len(LARGE):
            select.select([], [near], [], 30)
            sent += sent_now(near, sent)
        assert later.result() == len(LARGE)
    assert arrived == LARGE
    far.settimeout(0.05)
    with pytest.raises(BlockingIOError):
        far.recv(1)
    near.close()
    far.close()
    for one in (near, far):
        with pytest.raises(OSError, match="Bad file"):
            one.recv(1)


def test_what_a_forked_child_closes_stays_open_in_its_parent() -> None:
    near, far = encrypted_pair()
    child = os.fork()
    if child == 0:
        near.close()
        far.close()
        os._exit(0)
    os.waitpid(child, 0)
    near.sendall(b"still here")
    assert far.recv(100) == b"still here"
    near.close()
    far.close()


def test_connections_in_a_host_and_without_credentials_stay_as_they_are() -> None:
    for pair, known in ((socket.socketpair(), credentials()), (tcp_pair(), NO_CREDENTIALS)):
        for accepts, one in enumerate(pair):
            assert encrypted(one, known, accepts=bool(accepts)) is one
            one.close()


@contextlib.contextmanager
def waiting(known: Credentials) -> Any:
    """A listener of rank 0 that awaits rank 1, and what comes of it."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        yield listener.getsockname(), pool.submit(lambda: list(accepted([listener], {1}, ENDS[0], known, 2.0)))


def test_a_rank_that_knows_the_key_and_has_another_certificate_is_refused_on_either_end() -> None:
    others = Credentials(KEY, *contexts_of_ranks(key_and_certificate()))
    with waiting(credentials()) as (address, found):
        with pytest.raises(ssl.SSLError):
            reach(address, ENDS[1], 0, others, 10.0).recv(1)
        with pytest.raises(TimeoutError, match="another rank did not connect"):
            found.result()


def test_a_rank_that_does_not_encrypt_is_refused() -> None:
    with waiting(credentials()) as (address, found):
        with reach(address, ENDS[1], 0, Credentials(KEY), 10.0) as plain:  # type: ignore[union-attr]
            plain.sendall(b"a tensor in clear" * 1000)
            with contextlib.suppress(ConnectionResetError):
                assert b"tensor" not in plain.recv(1000)
        with pytest.raises(TimeoutError):
            found.result()


def test_who_hands_on_the_proofs_of_two_ranks_reads_nothing() -> None:
    seen = bytearray()

    def carry(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                seen.extend(data)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    with waiting(credentials()) as (address, found), socket.create_server(("127.0.0.1", 0)) as between:

        def hand_on() -> None:
            near, _ = between.accept()
            with near, socket.create_connection(address) as far:
                back = threading.Thread(target=carry, args=(far, near))
                back.start()
                carry(near, far)
                back.join()

        thread = threading.Thread(target=hand_on)
        thread.start()
        one = reach(between.getsockname(), ENDS[1], 0, credentials(), 10.0)
        ((number, other),) = found.result()
        assert number == 1
        other.sendall(b"GRADIENT" * 10_000)
        into = bytearray(80_000)
        assert one.recv_into(memoryview(into), 0, socket.MSG_WAITALL) == len(into)
        one.close()
        other.close()
        thread.join()
    assert bytes(into) == b"GRADIENT" * 10_000
    assert len(seen) > 80_000
    assert b"GRADIENT" not in seen


def relay(source: socket.socket, target: socket.socket) -> None:
    """Pass bytes on until the source ends."""
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


@pytest.mark.parametrize(
    ("known", "passes_proofs_on"),
    [(Credentials(KEY), False), (credentials(), False), (credentials(), True)],
    ids=["in clear", "by TLS", "by TLS after the proofs"],
)
def test_forwarders_that_exchange_the_connections_of_a_rank_are_noticed(
    known: Credentials, passes_proofs_on: bool
) -> None:
    """Rank 2 connects with ranks 0 and 1, and two forwarders on the way give each the other's connection."""
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(8) as pool:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        fronts = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        found = [
            pool.submit(lambda rank=rank: list(accepted([listeners[rank]], {2}, ENDS[rank], known, 3.0)))  # type: ignore[misc]
            for rank in range(2)
        ]
        places = [one.getsockname() for one in fronts]
        reached = [pool.submit(reach, places[rank], ENDS[2], rank, known, 10.0) for rank in range(2)]
        near = [stack.enter_context(one.accept()[0]) for one in fronts]
        far = [stack.enter_context(socket.create_connection(one.getsockname())) for one in listeners]
        if passes_proofs_on:
            for one, other in zip(near, far, strict=True):
                one.sendall(other.recv(16, socket.MSG_WAITALL))
                other.sendall(one.recv(72, socket.MSG_WAITALL))
                one.sendall(other.recv(56, socket.MSG_WAITALL))
        for one, other in zip(near, reversed(far), strict=True):
            pool.submit(relay, one, other)
            pool.submit(relay, other, one)
        for rank, work in enumerate(reached):
            with pytest.raises(
                Misdirected, match=rf"rank 2 connected with rank {rank} \(a test\), and rank {1 - rank} answered: some"
            ):
                work.result()
        for each in found:
            with pytest.raises(TimeoutError):
                each.result()


def test_a_rank_that_is_hung_up_on_before_its_proof_tries_again() -> None:
    """The other rank hangs up, as it does when more strangers connect than a rank keeps."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        later = pool.submit(reach, listener.getsockname(), ENDS[1], 0, credentials(), 30.0)
        for _ in range(3):
            listener.accept()[0].close()
        ((number, other),) = accepted([listener], {1}, ENDS[0], credentials(), 30.0)
        one = later.result()
        other.sendall(b"!")
        assert (number, one.recv(1)) == (1, b"!")
        one.close()
        other.close()


def test_where_nothing_listens_a_rank_waits_only_if_asked() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        address = gone.getsockname()
    with pytest.raises(ConnectionRefusedError):
        reach(address, ENDS[1], 0, credentials(), 10.0)
    start = time.monotonic()
    with pytest.raises(ConnectionRefusedError):
        reach(address, ENDS[1], 0, credentials(), 0.3, waits=True)
    assert time.monotonic() - start > 0.3


def test_credentials_do_not_show_the_key() -> None:
    assert repr(Credentials(b"a secret key")) == "Credentials(encrypt=False)"


def test_the_class_is_what_exchanges_get() -> None:
    one, other = encrypted_pair()
    assert isinstance(one, EncryptedSocket)
    assert one.family == socket.AF_INET
    one.close()
    other.close()
    assert one.fileno() == -1


def test_bytes_that_somebody_puts_in_between_end_the_connection() -> None:
    near, far = tcp_pair()
    with ThreadPoolExecutor(1) as pool:
        again = os.dup(near.fileno())  # the same connection, as somebody on the way has it
        later = pool.submit(encrypted, far, credentials(), accepts=True)
        one, other = encrypted(near, credentials(), accepts=False), later.result()
    one.sendall(b"first")
    assert other.recv(100) == b"first"
    os.write(again, b"\x17\x03\x03\x00\x20" + bytes(32))  # a record of TLS
    os.close(again)
    with pytest.raises(ConnectionError, match="an encrypted connection has failed"):
        other.recv(100)
    one.close()
    other.close()
