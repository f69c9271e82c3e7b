"""``lagom.exchange.sockets.rank_store``: answers as torch's stores do, to the ranks of a run and to nobody else."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from lagom.exchange.run_store import reconnected
from lagom.exchange.sockets.connect import reach
from lagom.exchange.sockets.encryption import Credentials
from lagom.exchange.sockets.handshake import End, introduce
from lagom.exchange.sockets.rank_store import RankStore
from lagom.exchange.sockets.value_client import ValueClient
from lagom.exchange.sockets.value_server import REQUEST, Ask, ValueServer, store_purpose
from tests.encryption import KEY, credentials, encrypted_stores

Use = Callable[[Any], Any]


def through(store: Any) -> Any:
    """Return the store as torch's process groups see it."""
    return dist.PrefixStore("a/b", store)


USES: list[Use] = [
    lambda store: store.set("a", "text"),
    lambda store: store.get("a"),
    lambda store: store.set("a", b"\0\xff bytes"),
    lambda store: bytes(store.get("a")),
    lambda store: [store.add("n", 3), store.add("n", -5), bytes(store.get("n"))],
    lambda store: [store.check(["a", "n"]), store.check(["a", "b"])],
    lambda store: store.wait(["a", "n"]),
    lambda store: store.wait(["a"], timedelta(seconds=1)),
    lambda store: store.wait(["b"], timedelta(seconds=0.05)),
    lambda store: store.compare_set("c", "wrong", "new"),
    lambda store: store.check(["c"]),
    lambda store: store.compare_set("c", "", "new"),
    lambda store: store.compare_set("c", "wrong", "newer"),
    lambda store: store.compare_set("c", "new", "newer"),
    lambda store: store.num_keys(),
    lambda store: [store.delete_key("c"), store.delete_key("c"), store.check(["c"])],
    lambda store: store.set("large", "x" * 3_000_000),
    lambda store: len(store.get("large")),
    lambda store: through(store).num_keys() - store.num_keys(),
    lambda store: [through(store).delete_key("c"), through(store).clone().add("n", 1)],
]


def outcome(use: Use, store: Any) -> Any:
    try:
        return use(store)
    except RuntimeError as error:
        return type(error)


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.soak), 1])
def test_each_use_gives_what_torchs_store_gives(rank: int) -> None:
    judge = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    with encrypted_stores() as stores:
        for number, use in enumerate(USES):
            assert outcome(use, stores[rank]) == outcome(use, judge), number


def test_what_one_rank_sets_others_get_also_through_torch() -> None:
    with encrypted_stores() as (one, other):
        prefixed = dist.PrefixStore("group", one)
        prefixed.set("name", "value")
        assert other.get("group/name") == b"value"
        assert dist.PrefixStore("group", other).add("n", 2) == 2
        with ThreadPoolExecutor(1) as pool:
            later = pool.submit(other.get, "late")
            one.set("late", "come")
            assert later.result() == b"come"


def test_a_group_of_torchs_is_made_with_it() -> None:
    with encrypted_stores() as stores, ThreadPoolExecutor(2) as pool:
        works = [
            pool.submit(dist.ProcessGroupGloo, dist.PrefixStore("g", store), rank, 2, timedelta(seconds=30))
            for rank, store in enumerate(stores)
        ]
        assert [work.result().size() for work in works] == [2, 2]


def test_a_long_wait_of_one_user_does_not_block_another() -> None:
    with encrypted_stores() as (one, other):
        again = reconnected(other, timedelta(seconds=20))
        assert isinstance(again, RankStore)
        assert again.timeout == timedelta(seconds=20)
        with ThreadPoolExecutor(1) as pool:
            later = pool.submit(again.get, "late")
            assert [other.add("n", 1) for _ in range(100)] == list(range(1, 101))
            one.set("late", "")
            assert later.result() == b""


@pytest.mark.parametrize("rank", [0, 1])
def test_a_question_that_waits_is_asked_once_and_ends_in_time(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Ask] = []
    ask = ValueServer.ask

    def counted(self: ValueServer, what: Ask, name: str, data: bytes = b"") -> bytes | None:
        asked.append(what)
        return ask(self, what, name, data)

    monkeypatch.setattr(ValueServer, "ask", counted)
    with encrypted_stores() as stores, ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(stores[rank].get, f"late {i}") for i in range(3)]
        assert stores[rank].awaited("never", 0.05) is None
        assert not any(one.done() for one in waiting)
        for i in (2, 0):
            stores[1 - rank].set(f"late {i}", str(i))
        assert [waiting[i].result() for i in (0, 2)] == [b"0", b"2"]
        assert not waiting[1].done()
        assert stores[rank].add("late 1", 7) == 7
        assert waiting[1].result() == b"7"
        assert asked.count(Ask.AWAIT) == (4 if rank == 0 else 0)  # those of other ranks are held by the thread
        assert len(asked) - asked.count(Ask.AWAIT) == 3


def test_a_rank_that_hangs_up_while_it_waits_disturbs_nobody() -> None:
    with server_of([1, 2]) as (server, address):
        gone = reach(address, End(1, store_purpose(address)), 0, credentials(), 30.0)
        client = ValueClient(address, 2, credentials(), 30.0)
        gone.sendall(REQUEST.pack(1, Ask.AWAIT, 4, 2) + b"late" + b"30")
        gone.sendall(REQUEST.pack(2, Ask.SET, 1, 1) + b"a" + b"b")
        assert client.ask(Ask.AWAIT, "a", b"30") == b"b"  # so the question before has been heard
        gone.close()
        server.ask(Ask.SET, "late", b"come")
        assert client.ask(Ask.AWAIT, "late", b"30") == b"come"
        client.close()


@contextlib.contextmanager
def server_of(others: list[int]) -> Iterator[tuple[ValueServer, tuple[str, int]]]:
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    held = os.dup(listener.fileno())  # as the process has it that opened the listener
    server = ValueServer(listener, others, credentials(), 30.0)
    try:
        yield server, address
    finally:
        server.close()
        os.close(held)


def test_strangers_get_nothing_and_later_ones_find_no_open_port() -> None:
    with server_of([1, 2]) as (server, address):
        server.ask(Ask.SET, "name", b"a value")
        first = ValueClient(address, 1, credentials(), 30.0)
        for says in (b"", b"GET name\r\n", os.urandom(72), b"\2\4\0\0\0" + bytes(8) + b"name"):
            with socket.create_connection(address, timeout=30) as stranger:
                stranger.sendall(says)
                stranger.shutdown(socket.SHUT_WR)
                assert len(b"".join(iter(lambda one=stranger: one.recv(100), b""))) == 16  # type: ignore[misc]
        plain = ValueClient(address, 2, Credentials(KEY), 30.0)
        with pytest.raises(ConnectionError):
            plain.ask(Ask.GET, "name")
        plain.close()
        second = ValueClient(address, 2, credentials(), 30.0)
        assert {one.ask(Ask.GET, "name") for one in (first, second)} == {b"a value"}
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address, timeout=30)
        first.close()
        second.close()


def test_a_store_that_is_gone_is_an_error_of_torchs() -> None:
    with server_of([1]) as (server, address):
        client = ValueClient(address, 1, credentials(), 30.0)
        store = RankStore(client.ask, timedelta(seconds=30))
        store.set("a", "b")
        server.close()
        with pytest.raises(dist.DistNetworkError, match="the run's store on rank 0 is out of reach"):
            store.get("a")
        client.close()


def test_a_rank_that_ends_does_not_disturb_the_others() -> None:
    with server_of([1, 2]) as (_, address):
        clients = [ValueClient(address, rank, credentials(), 30.0) for rank in (1, 2)]
        stores = [RankStore(one.ask, timedelta(seconds=30)) for one in clients]
        stores[0].set("a", "b")
        clients[0].close()
        assert stores[1].get("a") == b"b"
        assert [stores[1].add("n", 1) for _ in range(10)][-1] == 10
        clients[1].close()


class Recorded(socket.socket):
    """Keeps what it sends."""

    said = b""

    def sendall(self, data: Any, flags: int = 0) -> None:
        Recorded.said += bytes(data)
        super().sendall(data, flags)


def recorded_proof(address: tuple[str, int]) -> bytes:
    """Join as rank 1, hang up, and return what it took to be let in."""
    Recorded.said = b""
    with Recorded() as connection:
        connection.connect(address)
        introduce(connection, KEY, End(1, store_purpose(address)), 0, 30.0)
    return Recorded.said


@pytest.mark.soak  # tests/exchange/test_handshake.py has more strangers than are kept by default
def test_2000_strangers_who_are_silent_say_garbage_or_repeat_a_rank_keep_no_rank_out() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    over = threading.Event()
    with server_of([1, 2]) as (server, address), contextlib.ExitStack() as stack:
        server.ask(Ask.SET, "name", b"a value")
        proof = recorded_proof(address)
        assert len(proof) == 72
        strangers: list[socket.socket] = []

        def flood(says: bytes) -> None:
            while not over.is_set() and len(strangers) < 2500:
                with contextlib.suppress(OSError):  # refused: all ranks are in
                    one = socket.create_connection(address, timeout=1.0)
                    strangers.append(one)
                    one.sendall(says)

        threads = [threading.Thread(target=flood, args=(says,)) for says in (b"", os.urandom(72), proof)]
        for thread in threads:
            stack.callback(thread.join)
            thread.start()
        stack.callback(over.set)
        while len(strangers) < 2000:
            time.sleep(0.01)
        clients = [ValueClient(address, rank, credentials(), 60.0) for rank in (1, 2)]
        assert [one.ask(Ask.GET, "name") for one in clients] == [b"a value"] * 2
        over.set()
        told = []
        for one in strangers:
            one.setblocking(False)
            with one, contextlib.suppress(OSError):
                told.append(len(one.recv(1000)))
        assert set(told) <= {0, 16}  # a nonce
        for client in clients:
            client.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.soak), 1])
def test_a_number_added_to_a_text_is_refused_and_the_store_goes_on(rank: int) -> None:
    with encrypted_stores() as stores:
        stores[rank].set("a", "text")
        with pytest.raises(dist.DistStoreError, match="the value of 'a' is no number"):
            stores[rank].add("a", 1)
        assert [bytes(one.get("a")) for one in stores] == [b"text", b"text"]


def test_what_is_no_request_ends_only_its_own_connection() -> None:
    with server_of([1, 2]) as (server, address):
        wrong = reach(address, End(1, store_purpose(address)), 0, credentials(), 30.0)
        wrong.settimeout(30.0)
        client = ValueClient(address, 2, credentials(), 30.0)
        wrong.sendall(b"\0\0\0\0\xff" + bytes(12))
        assert wrong.recv(1) == b""
        server.ask(Ask.SET, "a", b"b")
        assert client.ask(Ask.GET, "a") == b"b"
        wrong.close()
        client.close()


def test_a_question_that_a_signal_ends_leaves_no_answer_to_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ended(BaseException):
        pass

    def end(*_: object) -> None:
        raise Ended

    with server_of([1]) as (server, address):
        client = ValueClient(address, 1, credentials(), 60.0)
        for name in "ab":
            server.ask(Ask.SET, name, name.encode())
        assert client.ask(Ask.GET, "a") == b"a"
        ended, answer = threading.Event(), server.ask

        def answer_late(what: Ask, name: str, data: bytes = b"") -> bytes | None:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)
            ended.wait(60)
            return answer(what, name, data)

        monkeypatch.setattr(server, "ask", answer_late)
        before = signal.signal(signal.SIGALRM, end)
        try:
            with pytest.raises(Ended):
                client.ask(Ask.GET, "a")
        finally:
            signal.signal(signal.SIGALRM, before)
            ended.set()
        with pytest.raises(ConnectionError, match="an earlier question to it has failed: Ended"):
            client.ask(Ask.GET, "b")
        client.close()
