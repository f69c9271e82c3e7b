"""``lagom.exchange.shared_memory`` and ``lagom._native``: exchanges through memory that ranks share."""

from __future__ import annotations

import _thread
import json
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Collection
from functools import cache, lru_cache, partial, reduce
from pathlib import Path
from typing import Any

import pytest
import torch

from lagom.errors import CollectiveError
from lagom.exchange import shared_memory as handing
from lagom.exchange.native import OPERATIONS, TYPES, native
from lagom.exchange.shared_memory import shared
from lagom.exchange.sockets.handshake import End, Stranger, introduce
from lagom.session.session import Session
from tests.leaks import shared_memory_files
from tests.ranks import RankFailedError, communicator, gloo_of, lagom_log, run_ranks

if native() is None:
    pytest.skip("lagom was installed without its compiled part: no compiler, or no Linux", allow_module_level=True)


def error_of(call: Callable[[], object]) -> str:
    """Return the text of the error that ``call`` must raise."""
    with pytest.raises(RuntimeError) as caught:
        call()
    return str(caught.value)


SIZES = (0, 1, 7, 1000, 20_000, 300_001)
"""Elements: none, few, up to those that go in several pieces."""


@lru_cache(maxsize=64)
def given(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Input of ``rank``, not to be changed: any bits for whole numbers, else both signs, small and large."""
    generator = torch.Generator().manual_seed(17 * rank + count)
    if dtype == torch.bool:
        return torch.randint(0, 2, (count,), generator=generator).bool()
    if not dtype.is_floating_point:
        least, most = torch.iinfo(dtype).min, torch.iinfo(dtype).max
        return torch.randint(max(least, -(2**62)), min(most, 2**62), (count,), generator=generator).to(dtype)
    return (torch.randn(count, generator=generator) * 8).to(dtype)


def given_bytes(number: int, count: int) -> torch.Tensor:
    """Bytes that differ by ``number``, to be left as they are: parts of one tensor, as many need many."""
    return _bytes()[number * 101 :][:count]


@cache
def _bytes() -> torch.Tensor:
    generator = torch.Generator().manual_seed(17)
    return torch.randint(0, 256, (5_000_000,), dtype=torch.uint8, generator=generator)


_FOLDS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
    "product": torch.mul,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}


def folded(name: str, parts: list[torch.Tensor]) -> torch.Tensor:
    """The reduction as torch has it, in rank order; halves as float32 and rounded once."""
    dtype = parts[0].dtype
    if dtype == torch.bool and name in ("sum", "product"):
        name = {"sum": "bor", "product": "band"}[name]
    wide = [part.float() if dtype.itemsize == 2 and dtype.is_floating_point else part for part in parts]
    total = reduce(_FOLDS[name], wide)
    return (total / len(parts) if name == "avg" else total).to(dtype)


def reductions() -> list[tuple[str, torch.dtype]]:
    return [(name, t) for t, code in TYPES.items() for name, o in OPERATIONS.items() if native().has(code, o)]


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.soak), 3])  # three show it, and rounding
def test_every_reduction_has_torchs_bits_on_all_ranks(world_size: int) -> None:
    def run(session: Session) -> Any:
        near = communicator(session)
        world = range(session.world_size)
        wrong = []
        for name, dtype in reductions():
            for count in SIZES:
                wanted = folded(name, [given(rank, count, dtype) for rank in world])
                found = given(session.rank, count, dtype).clone()
                near.all_reduce(found.data_ptr(), count, TYPES[dtype], OPERATIONS[name])
                if not torch.equal(found, wanted):
                    wrong.append(("all_reduce", name, dtype, count))
            count = 5003
            parts = [given(rank, count * session.world_size, dtype) for rank in world]
            out = torch.empty(count, dtype=dtype)
            near.reduce_scatter(parts[session.rank].data_ptr(), out.data_ptr(), count, TYPES[dtype], OPERATIONS[name])
            if not torch.equal(out, folded(name, parts)[session.rank * count :][:count]):
                wrong.append(("reduce_scatter", name, dtype, count))
            counts = [0, 300_001, 7][: session.world_size]
            parts = [given(rank, sum(counts), dtype) for rank in world]
            first, own = sum(counts[: session.rank]), counts[session.rank]
            out = torch.empty(own, dtype=dtype)
            address = parts[session.rank].data_ptr()
            near.reduce_parts(address, counts, out.data_ptr(), TYPES[dtype], OPERATIONS[name])
            if not torch.equal(out, folded(name, parts)[first : first + own]):
                wrong.append(("reduce_parts", name, dtype, counts[1]))
        near.barrier()
        return wrong

    assert len(reductions()) == 4 * 5 + 5 * 7 + 7
    assert run_ranks(world_size, run, patches=False) == [[]] * world_size


def test_not_a_number_stays_in_minimum_and_maximum() -> None:
    def run(session: Session) -> Any:
        near = communicator(session)
        found = []
        for dtype in (torch.float64, torch.float16, torch.bfloat16):
            for name in ("min", "max", "sum"):
                one = torch.tensor([1.0, float("inf"), float("nan") if session.rank else 2.0], dtype=dtype)
                near.all_reduce(one.data_ptr(), 3, TYPES[dtype], OPERATIONS[name])
                found.append((one[1].isinf().item(), one[2].isnan().item()))
        return found

    assert run_ranks(2, run, patches=False) == [[(True, True)] * 9] * 2


def moved(session: Session) -> Any:
    """Return the exchanges that only move data and give wrong results."""
    near = communicator(session)
    rank, size = session.rank, session.world_size
    wrong = []
    for count in (0, 1, 77, 70_001, 1_200_003 if size < 8 else 530_001):
        every = [given_bytes(other, count) for other in range(size)]
        out = torch.zeros(size * count, dtype=torch.uint8)
        near.all_gather(every[rank].data_ptr(), out.data_ptr(), count)
        wrong += [] if torch.equal(out, torch.cat(every)) else ["all_gather"]
        for root in range(size):
            one = every[rank].clone()
            near.broadcast(one.data_ptr(), count, root)
            wrong += [] if torch.equal(one, every[root]) else ["broadcast"]
            out.zero_()
            near.gather(every[rank].data_ptr(), out.data_ptr() if rank == root else 0, count, root)
            wrong += [] if torch.equal(out, torch.cat(every) if rank == root else torch.zeros_like(out)) else ["gather"]
            whole = given_bytes(root + 50, count * size)
            near.scatter(whole.data_ptr() if rank == root else 0, one.data_ptr(), count, root)
            wrong += [] if torch.equal(one, whole[rank * count :][:count]) else ["scatter"]
        lengths = [[count * ((i + 2 * j) % 3) // 2 for j in range(size)] for i in range(size)]
        sent = [given_bytes(i + 90, sum(lengths[i])) for i in range(size)]
        back = [lengths[i][rank] for i in range(size)]
        out = torch.zeros(sum(back), dtype=torch.uint8)
        near.all_to_all(sent[rank].data_ptr(), lengths[rank], out.data_ptr(), back)
        wrong += (
            [] if torch.equal(out, torch.cat([sent[i].split(lengths[i])[rank] for i in range(size)])) else ["to all"]
        )
        rows = [bytes(row) for row in near.exchange(b"head", memoryview(bytes([rank]) * (count * rank)))]
        wanted = [b"head" + bytes([other]) * (count * other if other != rank else 0) for other in range(size)]
        wrong += [] if rows == wanted else ["exchange"]
    near.barrier()
    return wrong


@pytest.mark.parametrize("world_size", [3, *(pytest.param(other, marks=pytest.mark.soak) for other in (2, 8))])
def test_exchanges_move_what_they_should_also_with_many_ranks_on_few_cores(world_size: int) -> None:
    assert run_ranks(world_size, moved, patches=False) == [[]] * world_size


def test_messages_arrive_in_order_from_whom_they_were_sent() -> None:
    def run(session: Session) -> Any:
        near = communicator(session)
        rank, size = session.rank, session.world_size
        texts = [bytes([rank, i]) * n for i, n in enumerate((0, 1, 60_000, 400_000))]

        def send() -> None:
            for text in texts:
                held = torch.frombuffer(bytearray(text or b"x"), dtype=torch.uint8)
                near.send(held.data_ptr(), len(text), 8, (rank + 1) % size, 3)

        sending = threading.Thread(target=send)
        sending.start()
        before = (rank - 1) % size
        assert near.sender() == before
        for i, text in enumerate(texts):
            found = torch.zeros(len(text), dtype=torch.uint8)
            near.receive(found.data_ptr(), len(text), 8, before, 3)
            assert bytes(found.tolist()) == bytes([before, i]) * (len(text) // 2)
        sending.join()
        near.barrier()

    def odd(session: Session) -> Any:
        near = communicator(session)
        one = torch.zeros(4, dtype=torch.uint8)
        if session.rank == 0:
            near.send(one.data_ptr(), 4, 8, 1, 3)
            return error_of(near.barrier)
        return error_of(lambda: near.receive(one.data_ptr(), 3, 8, 0, 3))

    run_ranks(3, run, patches=False)
    wanted = "rank 0 sends 4 bytes of uint8 with tag 3, rank 1 receives 3 bytes of uint8 with tag 3"
    assert run_ranks(2, odd, patches=False) == [wanted] * 2


def test_ranks_that_call_different_things_all_get_an_error_that_names_both() -> None:
    def run(session: Session) -> Any:
        found = []
        one = torch.zeros(4)
        for differing in range(4):
            near = communicator(session)
            at = one.data_ptr()
            calls = [
                partial(near.all_reduce, at, 3, 1, 0),
                partial(near.all_reduce, at, 4, 5, 0),
                partial(near.all_reduce, at, 4, 1, 2),
                partial(near.broadcast, at, 16, 1),
            ]
            found.append(error_of(calls[differing] if session.rank == 1 else partial(near.all_reduce, at, 4, 1, 0)))
            with pytest.raises(RuntimeError, match="different things"):
                near.barrier()
        return found

    first = "the ranks call different things: rank 0 all_reduce (sum) of 4 float32, rank 1 "
    wanted = [
        first + "all_reduce (sum) of 3 float32",
        first + "all_reduce (sum) of 4 int32",
        first + "all_reduce (min) of 4 float32",
        first + "broadcast of 16 bytes with root 1",
    ]
    assert run_ranks(3, run, patches=False) == [wanted] * 3


@pytest.mark.soak  # tests/exchange/test_against_gloo.py has a killed rank
def test_a_killed_rank_is_an_error_that_names_it_in_whatever_the_others_are() -> None:
    def run(session: Session) -> None:
        near = communicator(session)
        one = torch.zeros(3_000_000)
        near.all_reduce(one.data_ptr(), len(one), 1, 0)
        if session.rank == 1:
            # In the middle of an exchange, or between two.
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGKILL)).start()

        def forever() -> None:
            while True:
                near.all_reduce(one.data_ptr(), len(one), 1, 0)

        assert error_of(forever).startswith("the process of rank 1 is gone, and rank")

    for _ in range(3):
        with pytest.raises(RankFailedError, match="rank 1 failed:\nit died"):
            run_ranks(3, run, patches=False)


def test_a_rank_that_does_not_come_or_has_ended_is_named() -> None:
    def run(session: Session) -> Any:
        near = communicator(session, 0.3)
        late = communicator(session)
        one = torch.zeros(3)
        said = ""
        if session.rank == 0:
            with pytest.raises(RuntimeError) as caught:
                near.all_reduce(one.data_ptr(), 3, 1, 0)
            said = str(caught.value)
        late.barrier()
        if session.rank == 1:
            with pytest.raises(RuntimeError, match="rank 1 did not come to all_reduce of rank 0"):
                near.all_reduce(one.data_ptr(), 3, 1, 0)
            late.close()
        else:
            with pytest.raises(RuntimeError, match="rank 1 has ended, and rank 0 waits for it in barrier"):
                late.barrier()
        return said

    said = run_ranks(2, run, patches=False)[0]
    assert said == "rank 1 did not come to all_reduce of rank 0 within 0.3 s"


def test_an_interrupt_ends_an_exchange_on_all_ranks() -> None:
    def run(session: Session) -> str:
        near = communicator(session)
        one = torch.zeros(3)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores it
        near.barrier()
        if session.rank == 0:
            threading.Timer(0.2, _thread.interrupt_main).start()
            with pytest.raises(KeyboardInterrupt):
                near.all_reduce(one.data_ptr(), 3, 1, 0)
        gloo_of(session).barrier().wait()
        with pytest.raises(RuntimeError) as caught:
            near.barrier()
        return str(caught.value)

    assert run_ranks(2, run, patches=False) == ["rank 0 was interrupted in all_reduce"] * 2


def test_a_process_forked_from_a_rank_neither_holds_the_memory_nor_speaks_for_it() -> None:
    def run(session: Session) -> tuple[int, float]:
        near = communicator(session)
        child = os.fork()
        if child == 0:
            mapped = "memfd:lagom" in Path("/proc/self/maps").read_text()
            try:
                near.barrier()
            except RuntimeError:
                del near
                os._exit(10 + mapped)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        one = torch.ones(3)
        near.all_reduce(one.data_ptr(), 3, 1, 0)
        near.barrier()
        return os.waitstatus_to_exitcode(status), one.sum().item()

    assert run_ranks(2, run, patches=False) == [(10, 6.0)] * 2


def test_nothing_is_left_and_nobody_else_finds_the_memory() -> None:
    def run(session: Session) -> Any:
        before = shared_memory_files()
        open_before = len(os.listdir("/proc/self/fd"))
        near = communicator(session)
        near.barrier()
        lines = Path("/proc/self/maps").read_text().splitlines()
        mapped = [line.split()[5:] for line in lines if "memfd:" in line]
        named = shared_memory_files() - before
        near.barrier()
        del near
        return mapped, named, len(os.listdir("/proc/self/fd")) - open_before

    for mapped, named, left in run_ranks(2, run, patches=False):
        assert mapped == [["/memfd:lagom", "(deleted)"]]
        assert named == set()
        assert left == 0


def test_nothing_is_left_where_a_rank_does_not_come_for_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait_in_vain(*_: object) -> None:
        raise TimeoutError("no rank has come")

    monkeypatch.setattr(handing, "admit", wait_in_vain)
    open_before = os.listdir("/proc/self/fd")
    assert shared(0, lambda data, wanted=None: [data, data], 1.0, number=2) == "no rank has come (rank 0)"
    assert os.listdir("/proc/self/fd") == open_before


def test_a_stranger_gets_no_memory() -> None:
    gathered: list[bytes] = []
    strangers: list[bytes] = []

    def all_gather(data: bytes, wanted: Collection[int] | None = None) -> list[bytes]:
        gathered.append(data)
        if len(gathered) == 1:
            return [data, data]
        if len(gathered) == 2:
            threading.Thread(target=visit, args=(data,)).start()
        return [data, b""]

    def visit(data: bytes) -> None:
        name, nonce = json.loads(data)
        for key in (b"x", b"", b"known"):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as visitor:
                visitor.connect(bytes.fromhex(name))
                try:
                    introduce(visitor, key + bytes.fromhex(nonce), End(1, "shared memory"), 0, 30.0)
                except Stranger:
                    strangers.append(b"")
                    continue
                text, fds, _, _ = socket.recv_fds(visitor, 1, 1)
                while visitor.recv(1000):  # what else the first rank says
                    pass
                strangers.append(text * len(fds))
                for fd in fds:
                    os.close(fd)

    found = shared(0, all_gather, 1.0, key=b"known")
    assert not isinstance(found, str)
    while len(strangers) < 3:
        pass
    assert list(map(len, strangers)) == [0, 0, 1]


def test_ranks_without_the_compiled_part_or_memory_fall_back_together(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def without(session: Session) -> Any:
        if session.rank == 1:
            monkeypatch.setattr(handing, "native", lambda: None)
        return fallen_back(session)

    def no_memory(session: Session) -> Any:
        if session.rank == 0:
            monkeypatch.setattr(handing, "SLOT_BYTES", 100)
        return fallen_back(session)

    def fallen_back(session: Session) -> Any:
        group = session.group
        assert group is not None
        said = lagom_log(logging.INFO)
        one = torch.ones(5)
        group.all_reduce(one)
        rows = [bytes(row) for row in group.exchange(b"x")]
        return one.sum().item(), rows, said, group.shares_memory

    for run, reason in (
        (without, "lagom was installed without its compiled part (rank 1)"),
        (no_memory, "a segment needs"),
    ):
        first, second = run_ranks(2, run, collectives="auto")
        assert first[:2] == second[:2] == (10.0, [b"x", b"x"])
        assert not first[3]
        assert not second[3]
        assert len(first[2]) == 1
        assert first[2][0].startswith(f"CPU tensors are not exchanged through shared memory: {reason}")
        assert second[2] == []


@pytest.mark.parametrize("collectives", ["auto", pytest.param("gloo", marks=pytest.mark.soak)])  # test_mesh.py has it
def test_both_ways_of_exchanging_are_taken_as_configured(collectives: Any) -> None:
    def run(session: Session) -> Any:
        group = session.group
        assert group is not None
        one = torch.full((3,), 1.0 + session.rank)
        group.all_reduce(one)
        group.open_aside()
        moving = [torch.full((n,), 1.0 + session.rank) for n in (1_000_000, 1)]
        works = [group.all_reduce_aside(part) for part in moving]
        group.broadcast(one, 1)
        for work in works:
            group.wait(work)
        return group.shares_memory, one.tolist(), [part.sum().item() for part in moving]

    wanted = (collectives == "auto", [3.0] * 3, [3e6, 3.0])
    assert run_ranks(2, run, collectives=collectives) == [wanted] * 2


def test_an_exchange_aside_that_fails_raises_where_it_is_waited_for() -> None:
    def run(session: Session) -> None:
        group = session.group
        assert group is not None
        group.open_aside()
        work = group.all_reduce_aside(torch.zeros(3 + session.rank))
        with pytest.raises(CollectiveError, match="the ranks call different things"):
            group.wait(work)

    run_ranks(2, run, collectives="auto")
