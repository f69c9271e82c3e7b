"""``lagom.exchange.host_messages``: messages over many hosts, which here are threads joined by pairs of sockets."""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from lagom.exchange.agreement_exchange import memory
from lagom.exchange.host_messages import HostMessages, partners
from lagom.exchange.sockets.mesh import Mesh
from lagom.exchange.sockets.rounds import rounds
from lagom.exchange.transport import Merging


class Counted(socket.socket):
    """A socket that tells ``count`` how many bytes it is given to send."""

    def __init__(self, taken: socket.socket, count: Callable[[int], None] | None) -> None:
        super().__init__(fileno=taken.detach())
        self._count = count

    def sendmsg(self, *args: Any) -> int:
        if self._count is not None:
            self._count(sum(map(len, args[0])))
        return super().sendmsg(*args)


@contextmanager
def joined(num: int, count: Callable[[int], None] | None = None) -> Iterator[list[HostMessages]]:
    """The exchanges of ranks that are each on a host of their own; ``count`` gets the size of each message sent."""
    homes = [[rank] for rank in range(num)]
    ends: list[list[socket.socket | None]] = [[None] * num for _ in range(num)]
    for rank in range(num):
        for other in partners(homes, rank):
            assert rank in partners(homes, other)
            if rank < other:
                ends[rank][other], ends[other][rank] = (Counted(one, count) for one in socket.socketpair())
    made = [HostMessages(None, Mesh(peers, 20.0), homes, rank) for rank, peers in enumerate(ends)]
    try:
        yield made
    finally:
        for one in made:
            one.close()


def on_all(num: int, call: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(num) as pool:
        return list(pool.map(call, range(num)))


@pytest.mark.parametrize("num", [2, 3, 8, 9, 17, pytest.param(70, marks=pytest.mark.soak)])
def test_all_get_the_messages_of_all(num: int) -> None:
    def message(rank: int, turn: int) -> tuple[bytes, memoryview | None]:
        if turn == 0:  # different lengths, some empty
            return bytes([rank]) * (rank % 4), None
        if turn == 1:  # equal in groups
            return b"signature %d" % (rank // 5), None
        if turn == 2:  # more than a socket holds
            return b"head", memoryview(bytes([rank]) * (300_000 if rank % 16 == 1 else 2))
        return b"equal", None

    with joined(num) as ranks:

        def run(rank: int) -> list[list[bytes]]:
            return [[bytes(row) for row in ranks[rank].exchange(*message(rank, turn))] for turn in range(4)]

        found = on_all(num, run)
    for rank, rows in enumerate(found):
        for turn in range(4):
            wanted = [head + bytes(body or b"") for head, body in (message(one, turn) for one in range(num))]
            wanted[rank] = message(rank, turn)[0]
            assert rows[turn] == wanted


def add(rows: Sequence[memoryview]) -> memoryview:
    """Sum rows of float32."""
    parts = torch.stack([torch.frombuffer(row, dtype=torch.float32) for row in rows])
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return memory(total)


@pytest.mark.parametrize("num", [2, 3, 8, 9, 17, 70])
def test_what_is_merged_is_the_same_for_all(num: int) -> None:
    given = torch.rand(num, 20, generator=torch.Generator().manual_seed(num))
    sent: list[int] = []
    with joined(num, sent.append) as ranks:

        def run(rank: int) -> tuple[bytes | None, list[bytes], bytes]:
            merged = ranks[rank].merge(b"s" * 32, memory(given[rank]), Merging(add, add))
            sums = bytes(merged) if isinstance(merged, memoryview) else None
            other = b"o" * 32 if rank == num - 2 else b"s" * 32
            rows = [bytes(row) for row in ranks[rank].merge(other, memory(given[rank]), Merging(add, add))]
            once_more = ranks[rank].merge(b"t" * 32, memory(given[rank]), Merging(add, add))
            assert isinstance(once_more, memoryview)
            return sums, [row[:32] for row in rows], bytes(once_more)

        found = on_all(num, run)
    sums, rows, once_more = found[0]
    assert sums is not None
    torch.testing.assert_close(torch.frombuffer(bytearray(sums), dtype=torch.float32), given.sum(0))
    assert rows == [(b"o" if rank == num - 2 else b"s") * 32 for rank in range(num)]
    assert once_more == sums
    assert all(one == found[0] for one in found)
    if num > 9:  # the size of a message does not depend on the number of ranks
        assert max(sent[: len(sent) // 3]) <= 32 + 80 + 40


@pytest.mark.parametrize("num", [*range(1, 40), 63, 64, 65, 100, 313, 512, 513])
def test_in_the_rounds_of_a_host_it_hears_of_every_other_host_once(num: int) -> None:
    all_rounds = [rounds(num, host) for host in range(num)]
    heard = {host: [host] for host in range(num)}
    for level in range(max(map(len, all_rounds))):
        before = {host: list(known) for host, known in heard.items()}
        for host, found in enumerate(all_rounds):
            if level < len(found):
                one = found[level]
                told = [before[sender] for sender in one.senders]
                told.insert(one.own, before[host])
                heard[host] = [known for part in told for known in part]
                assert all(host in all_rounds[sender][level].receivers for sender in one.senders)
    assert all(known == list(range(num)) for known in heard.values())
    most = max(len(one.receivers) for found in all_rounds for one in found) if num > 1 else 0
    assert most <= 14


@pytest.mark.parametrize("num", [2, 8, 32, 1000, 10_000])
def test_the_number_of_sockets_grows_with_the_logarithm_of_the_hosts(num: int) -> None:
    homes = [[2 * host, 2 * host + 1] for host in range(num)]
    rounds = math.ceil(math.log(num, 8) - 1e-9)
    assert len(partners(homes, 0)) <= min(num - 1, 2 * 7 * rounds)
    assert partners(homes, 1) == set()


def test_ranks_that_agree_send_one_signature_in_each_message() -> None:
    sent: list[int] = []
    with joined(64, sent.append) as ranks:
        on_all(64, lambda rank: ranks[rank].exchange(b"s" * 32))
    assert len(sent) == 64 * 14  # two rounds of 8 blocks
    assert max(sent) <= 32 + 40  # a signature, and what stands before it


def test_a_rank_that_goes_is_noticed_by_all() -> None:
    with joined(20) as ranks:

        def run(rank: int) -> str:
            ranks[rank].exchange(b"x")
            if rank == 7:
                ranks[rank].close()
                return "gone"
            for _ in range(2):  # now, and from now on
                with pytest.raises(OSError, match=r"hung up|Broken pipe|reset"):
                    ranks[rank].exchange(b"x")
            return "noticed"

        found = on_all(20, run)
    assert found == ["noticed"] * 7 + ["gone"] + ["noticed"] * 12


def test_who_is_late_is_named_by_all() -> None:
    with joined(20) as ranks:

        def run(rank: int) -> Sequence[int]:
            for _ in range(4):
                if rank == 5:
                    time.sleep(0.2)
                ranks[rank].exchange(b"x")
            return ranks[rank].waited()

        found = on_all(20, run)
    for rank, waited in enumerate(found):
        if rank != 5:
            assert max(range(20), key=waited.__getitem__) == 5, (rank, waited)


def test_who_has_not_come_is_known() -> None:
    with joined(20) as ranks:
        go_on = threading.Event()

        def run(rank: int) -> None:
            if rank == 5:
                go_on.wait()
            ranks[rank].exchange(b"12345")

        def missing() -> set[int]:
            return {other for rank in range(20) if rank != 5 for other in ranks[rank].standing()[2]}

        with ThreadPoolExecutor(20) as pool:
            running = [pool.submit(run, rank) for rank in range(20)]
            while sum(ranks[rank].standing()[0] == "exchange of 5 bytes" for rank in range(20)) < 19:
                time.sleep(0.01)
            waiting = {rank for rank in range(20) if ranks[rank].standing()[0]}
            assert missing() - waiting == {5}
            go_on.set()
            for one in running:
                one.result()
        assert ranks[0].standing() == ("", 0, [])
