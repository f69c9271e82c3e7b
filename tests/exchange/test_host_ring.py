"""``lagom.exchange.host_ring``: tensors of hosts that form a ring, which here are threads."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from lagom.exchange.host_ring import HostRing
from lagom.exchange.native import TYPES as TYPES_OF_RINGS
from lagom.exchange.sockets.ring_stream import HEAD
from tests.encryption import encrypted_pair, tcp_pair

SIZES = (0, 1, 2, 77, 100_003, 1_000_001)
TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8)
BY_DEFAULT = {torch.float64: True, torch.float32: False, torch.bfloat16: False}
"""Types that are exchanged by default, and whether encrypted."""


@contextmanager
def joined(num: int, timeout_s: float = 20.0, *, encrypts: bool = False) -> Iterator[list[HostRing]]:
    connect = encrypted_pair if encrypts else tcp_pair
    pairs: list[Any] = [connect() for _ in range(num if num > 2 else 1)]
    if num == 2:  # one connection for both ways
        made = [HostRing(one, one, home, 2, timeout_s) for home, one in enumerate(pairs[0])]
    else:
        made = [HostRing(pairs[home][0], pairs[home - 1][1], home, num, timeout_s) for home in range(num)]
    try:
        yield made
    finally:
        for one in made:
            one.close()


def on_all(rings: list[HostRing], begin: Callable[[HostRing, int], Any]) -> None:
    works = [begin(ring, home) for home, ring in enumerate(rings)]
    for work in works:
        work.wait()


def values(home: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(home)
    return torch.randint(0, 9, (count,), generator=generator).to(dtype)  # whose sums are exact


@pytest.mark.parametrize(
    ("dtype", "num", "encrypts"),
    [
        pytest.param(
            dtype, num, encrypts, marks=() if num == 3 and encrypts == BY_DEFAULT.get(dtype) else pytest.mark.soak
        )
        for num, encrypts in ((2, False), (3, False), (5, False), (2, True), (3, True))
        for dtype in TYPES
    ],
)
def test_sums_gathers_and_broadcasts_are_those_of_one_place(num: int, encrypts: bool, dtype: torch.dtype) -> None:
    with joined(num, encrypts=encrypts) as rings:
        for count in SIZES:
            given = [values(home, count, dtype) for home in range(num)]
            total = torch.stack(given).sum(0, dtype=dtype)
            for found in exchanged(rings, given):
                assert torch.equal(found, total), count
            for root in range(num):
                copies = [one.clone() for one in given]
                on_all(rings, lambda ring, home: ring.broadcast(copies[home], root))  # noqa: B023  # runs now
                assert all(torch.equal(one, given[root]) for one in copies)


def exchanged(rings: list[HostRing], given: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The sum of ``given`` as each host has it, by an all-reduce and by parts of different sizes."""
    num, count = len(rings), len(given[0])
    sums = [one.clone() for one in given]
    on_all(rings, lambda ring, home: ring.all_reduce(sums[home]))
    yield from sums
    sizes = [count // 4] * (num - 1)
    parts = [list(one.clone().split([*sizes, count - sum(sizes)])) for one in given]
    on_all(rings, lambda ring, home: ring.reduce_scatter(parts[home]))
    for home, own in enumerate(parts):
        for other in set(range(num)) - {home}:
            own[other].zero_()
    on_all(rings, lambda ring, home: ring.all_gather(parts[home]))
    yield from map(torch.cat, parts)


def test_all_hosts_have_the_same_bits() -> None:
    with joined(5) as rings:
        tensors = [torch.randn(10_001, generator=torch.Generator().manual_seed(home)) for home in range(5)]
        wanted = torch.stack(tensors).double().sum(0)
        on_all(rings, lambda ring, home: ring.all_reduce(tensors[home]))
        assert all(torch.equal(one, tensors[0]) for one in tensors)
        torch.testing.assert_close(tensors[0].double(), wanted, rtol=1e-5, atol=1e-5)


def test_parameters_and_tensors_of_the_inference_mode_are_summed_too() -> None:
    with torch.inference_mode():
        inferred = torch.ones(7)
    tensors = [torch.nn.Parameter(torch.ones(7)), inferred]
    with joined(2) as rings:
        on_all(rings, lambda ring, home: ring.all_reduce(tensors[home]))
    assert [one.tolist() for one in tensors] == [[2.0] * 7] * 2


@pytest.mark.parametrize(
    ("call", "other", "difference"),
    [
        (
            lambda ring: ring.all_reduce(torch.ones(4)),
            lambda ring: ring.all_reduce(torch.ones(8)),
            "sends 16 bytes of float32 as number 1, all_reduce, and this one expects 8 bytes of float32 as number 1",
        ),
        (
            lambda ring: ring.all_reduce(torch.ones(4)),
            lambda ring: ring.all_reduce(torch.ones(4, dtype=torch.int32)),
            "sends 8 bytes of int32 as number 1, all_reduce, and this one expects 8 bytes of float32 as number 1",
        ),
        (
            lambda ring: ring.all_gather([torch.ones(4), torch.ones(4)], 2),
            lambda ring: ring.all_gather([torch.ones(4), torch.ones(4)], 3),
            "sends 16 bytes of float32 as number 1, all_gather, one of 3 pieces, and this one expects",
        ),
        (
            lambda ring: ring.all_gather([torch.ones(4), torch.ones(4)]),
            lambda ring: ring.reduce_scatter([torch.ones(4), torch.ones(4)]),
            "sends 16 bytes of float32 as number 1, reduce_scatter, and this one expects 16 bytes of float32",
        ),
    ],
    ids=["size", "type", "number of pieces", "operation"],
)
def test_hosts_that_call_different_exchanges_get_an_error(call: Any, other: Any, difference: str) -> None:
    with joined(2) as rings:
        works = [call(rings[0]), other(rings[1])]
        with pytest.raises(RuntimeError, match="hosts differ in their exchanges: another one " + difference):
            works[0].wait()
        with pytest.raises((RuntimeError, OSError)):
            works[1].wait()


def test_hosts_that_expect_a_broadcast_from_different_ones_get_an_error() -> None:
    with joined(3) as rings:
        works = [ring.broadcast(torch.ones(2), 1 if home == 2 else 0) for home, ring in enumerate(rings)]
        with pytest.raises(RuntimeError, match=r"broadcast from host 0, and this one expects .* from host 1"):
            works[2].wait()


def test_hosts_whose_exchanges_differ_in_number_get_an_error() -> None:
    with joined(3) as rings:
        rings[0].broadcast(torch.ones(2), 0).wait()  # the others call it later
        works = [ring.all_reduce(torch.ones(6)) for ring in rings]
        with pytest.raises(RuntimeError, match="hosts differ in their exchanges"):
            works[1].wait()


def test_a_host_that_waits_for_more_than_another_one_sends_gets_an_error_at_once() -> None:
    with joined(2, timeout_s=600.0) as rings:
        work = rings[0].broadcast(torch.ones(1 << 20), 1)
        time.sleep(0.2)  # it waits for 128 KB
        other = rings[1].broadcast(torch.ones(1), 1)
        with pytest.raises(RuntimeError, match="hosts differ in their exchanges"):
            work.wait()
        other.wait()


def test_a_neighbour_that_sends_slowly_is_not_taken_for_gone() -> None:
    near, far = tcp_pair()
    ring = HostRing(near, near, 0, 2, 1.0)
    whole = torch.ones(10_000)
    work = ring.broadcast(whole, 1)
    given = HEAD.pack(1, 40_000, 3, TYPES_OF_RINGS[torch.float32], 1, 1) + bytes(40_000)
    for start in range(0, len(given), 10_006):
        time.sleep(0.4)
        far.sendall(given[start : start + 10_006])
    work.wait()
    assert not whole.any()
    ring.close()
    far.close()


@pytest.mark.parametrize("encrypts", [False, True])
def test_a_ring_that_is_closed_under_an_exchange_ends_it_with_an_error(encrypts: bool) -> None:
    with joined(2, timeout_s=600.0, encrypts=encrypts) as rings:
        works = [ring.broadcast(torch.ones(10), 1 - home) for home, ring in enumerate(rings)]
        time.sleep(0.2)
        rings[0].close()
        works.append(rings[0].all_reduce(torch.ones(10)))
        for work in (works[0], works[2]):
            with pytest.raises(ConnectionError, match="closed"):
                work.wait()
        with pytest.raises(OSError, match=r"hung up|reset"):
            works[1].wait()


def test_a_forked_process_has_no_part_in_a_ring() -> None:
    with joined(2) as rings:
        pid = os.fork()
        if pid == 0:
            try:
                with pytest.raises(ConnectionError, match="closed"):
                    rings[0].all_reduce(torch.ones(3)).wait()
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(pid, 0)[1] == 0
        tensors = [torch.ones(3), torch.ones(3)]
        on_all(rings, lambda ring, home: ring.all_reduce(tensors[home]))
    assert [one.tolist() for one in tensors] == [[2.0] * 3] * 2


@pytest.mark.parametrize("encrypts", [False, True])
def test_a_neighbour_that_goes_or_does_not_come_is_an_error(encrypts: bool) -> None:
    with joined(3, encrypts=encrypts) as rings:
        works = [rings[home].all_reduce(torch.ones(3_000_000)) for home in (0, 1)]
        rings[2].close()
        for work in works:
            with pytest.raises(OSError, match=r"hung up|reset|Broken pipe"):
                work.wait()
            rings[0].close()  # as its rank does when an exchange has failed
    with (
        joined(2, timeout_s=0.2, encrypts=encrypts) as rings,
        pytest.raises(TimeoutError, match="did not answer in time"),
    ):
        rings[0].all_reduce(torch.ones(3)).wait()
