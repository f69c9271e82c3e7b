"""``lagom.exchange.sockets.handshake``: ranks prove themselves to each other, whatever strangers do meanwhile."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from lagom.exchange.sockets import handshake
from lagom.exchange.sockets.handshake import End, Misdirected, Stranger, admit, introduce

KEY = b"known to ranks"
NONCE, CLAIM, PROOF = 16, 24, 32
HELLO = CLAIM + NONCE + PROOF
"""Bytes of what a rank that connects says."""
HOSTS = ("here", *["there"] * 7)


@pytest.fixture(params=[socket.AF_INET, pytest.param(socket.AF_UNIX, marks=pytest.mark.soak)])
def listener(request: pytest.FixtureRequest) -> Iterator[socket.socket]:
    with socket.socket(request.param, socket.SOCK_STREAM) as found:
        found.bind(("127.0.0.1", 0) if request.param == socket.AF_INET else "")
        found.listen(1024)
        yield found


def dial(listener: socket.socket) -> socket.socket:
    """Return a connection to ``listener`` that has said nothing."""
    found = socket.socket(listener.family, socket.SOCK_STREAM)
    found.settimeout(30)
    found.connect(listener.getsockname())
    return found


def first(listener: socket.socket, timeout_s: float = 30.0) -> tuple[int, socket.socket]:
    """Return the first rank that is let in, and its socket."""
    ranks = admit([listener], KEY, End(0, "a test", HOSTS), timeout_s)
    try:
        return next(ranks)
    finally:
        ranks.close()  # type: ignore[attr-defined]


class Dialler:
    """A rank that connects, in a thread."""

    def __init__(self, listener: socket.socket, rank: int, key: bytes = KEY) -> None:
        self.connection = dial(listener)
        self.error: Exception | None = None
        self.thread = threading.Thread(target=self._run, args=(rank, key))
        self.thread.start()

    def _run(self, rank: int, key: bytes) -> None:
        try:
            introduce(self.connection, key, End(rank, "a test", HOSTS), 0, 30.0)
        except OSError as error:
            self.error = error

    def end(self) -> None:
        self.thread.join()
        self.connection.close()


def test_a_rank_is_let_in_past_strangers_who_say_nothing_little_or_garbage(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "HELLO_S", 1000.0)  # who waits for one of them waits for ever
    with ExitStack() as stack:
        silent = [stack.enter_context(dial(listener)) for _ in range(20)]
        for one in silent[:5]:
            one.sendall(b"GET / HTTP/1.1\r\n")
        for one in silent[5:10]:
            one.sendall(os.urandom(HELLO))
        silent[10].shutdown(socket.SHUT_WR)
        rank = Dialler(listener, 7)
        number, connection = first(listener)
        with connection:
            assert number == 7
            rank.thread.join()
            assert rank.error is None
            connection.sendall(b"!")
            assert rank.connection.recv(1) == b"!"
        rank.end()


def test_more_silent_strangers_than_it_keeps_do_not_keep_a_rank_out(listener: socket.socket) -> None:
    with ExitStack() as stack:
        for _ in range(handshake.MAX_STRANGERS + 100):
            stack.enter_context(dial(listener))
        rank = Dialler(listener, 1)
        number, connection = first(listener)
        connection.close()
        rank.end()
        assert (number, rank.error) == (1, None)


@pytest.mark.parametrize(
    ("end", "peer", "answer"),
    [
        (End(7, "a test", HOSTS), 1, "rank 7 connected with rank 1 .a test., and rank 0 answered: something"),
        (End(7, "another test", HOSTS), 0, "rank 0 answered for another purpose, or from another host"),
        (End(7, "a test", ("here",) * 8), 0, "rank 0 answered for another purpose, or from another host"),
    ],
    ids=["rank", "purpose", "host"],
)
def test_a_rank_that_means_another_end_is_told_who_has_answered(
    end: End, peer: int, answer: str, listener: socket.socket
) -> None:
    with ThreadPoolExecutor(1) as pool, dial(listener) as connection:
        admitted = pool.submit(first, listener, 0.5)
        with pytest.raises(Misdirected, match=answer):
            introduce(connection, KEY, end, peer, 30.0)
        with pytest.raises(TimeoutError):
            admitted.result()


def test_a_hello_in_pieces_is_a_hello(listener: socket.socket) -> None:
    with dial(listener) as connection:

        class Slow:
            """Sends byte by byte."""

            family = connection.family
            settimeout, recv, getsockopt = connection.settimeout, connection.recv, connection.getsockopt

            def sendall(self, data: bytes) -> None:
                for i in range(len(data)):
                    connection.sendall(data[i : i + 1])
                    time.sleep(0.001)

        thread = threading.Thread(target=introduce, args=(Slow(), KEY, End(3, "a test", HOSTS), 0, 30.0))
        thread.start()
        number, found = first(listener)
        thread.join()
        found.close()
        assert number == 3


def test_a_silent_stranger_is_hung_up_on_in_time(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "HELLO_S", 0.2)
    with dial(listener) as silent:
        with pytest.raises(TimeoutError, match="another rank did not connect"):
            first(listener, 1.0)
        assert len(silent.recv(100)) == NONCE
        assert silent.recv(1) == b""


def test_who_does_not_know_the_key_is_refused_on_either_end(listener: socket.socket) -> None:
    stranger = Dialler(listener, 1, b"guessed")
    with pytest.raises(TimeoutError):
        first(listener, 0.5)
    stranger.end()
    assert isinstance(stranger.error, Stranger)
    rank = Dialler(listener, 1)
    connection, _ = listener.accept()  # what sits at the port of a rank that is gone
    with connection:
        connection.setblocking(True)
        connection.sendall(b"n" * NONCE)
        connection.recv(HELLO, socket.MSG_WAITALL)
        connection.sendall(b"p" * (CLAIM + PROOF))
        rank.end()
    assert isinstance(rank.error, Stranger)


def test_what_was_recorded_of_one_connection_opens_no_other(listener: socket.socket) -> None:
    recorded = bytearray()

    class Recorded(socket.socket):
        def sendall(self, data: bytes) -> None:  # type: ignore[override]
            recorded.extend(data)
            super().sendall(data)

    with Recorded(listener.family, socket.SOCK_STREAM) as connection:
        connection.connect(listener.getsockname())
        thread = threading.Thread(target=introduce, args=(connection, KEY, End(3, "a test", HOSTS), 0, 30.0))
        thread.start()
        first(listener)[1].close()
        thread.join()
    with dial(listener) as again:
        again.sendall(recorded)
        with pytest.raises(TimeoutError):
            first(listener, 0.5)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_users_process_is_hung_up_on_at_once_even_with_the_key() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind("")
        listener.listen(8)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.setresuid(65534, 65534, 65534)
                with dial(listener) as connection:
                    code = 0 if connection.recv(1) == b"" else 2
            finally:
                os._exit(code)
        with pytest.raises(TimeoutError):
            first(listener, 1.0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_what_says_a_byte_now_and_then_in_a_listeners_place_is_given_up_in_time(listener: socket.socket) -> None:
    over = threading.Event()

    def drip() -> None:
        connection, _ = listener.accept()
        with connection:
            while not over.wait(0.05):
                connection.sendall(b"x")

    thread = threading.Thread(target=drip)
    thread.start()
    try:
        with dial(listener) as connection, pytest.raises(TimeoutError):
            introduce(connection, KEY, End(1, "a test", HOSTS), 0, 0.3)
    finally:
        over.set()
        thread.join()
