"""Ranks on hosts whose network is slow, loses packets, or is cut: right weights, or an error in time."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from lagom.errors import RankError
from tests.integration import hosts
from tests.integration.hosts import Host
from tests.integration.namespaces import launcher
from tests.integration.slow_network import Link, slow_network

pytestmark = pytest.mark.skipif(not hosts.allowed(), reason="this user may not make network namespaces here")


def train(num_batches: int, width: int) -> torch.Tensor:
    """Train a small network with BatchNorm; with a large ``width`` its gradients go around the ring of hosts."""
    torch.manual_seed(0)
    layers = torch.nn.Linear(8, width), torch.nn.BatchNorm1d(width), torch.nn.Tanh(), torch.nn.Linear(width, 1)
    model = torch.nn.Sequential(*layers).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)  # larger ones diverge where the network is wide
    inputs, targets = (torch.randn(8 * num_batches, width).double() for width in (8, 1))
    data = torch.utils.data.TensorDataset(inputs, targets)
    for x, y in torch.utils.data.DataLoader(data, batch_size=8):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return torch.cat([tensor.flatten() for tensor in model.state_dict().values()])


@contextmanager
def running(num_hosts: int, num_ranks: int, link: Link) -> Iterator[tuple[Any, list[Host]]]:
    with (
        pytest.MonkeyPatch.context() as patch,
        slow_network(num_hosts, link) as (address, found),
        launcher(address, found, num_ranks) as runs,
    ):
        patch.setenv("OMP_NUM_THREADS", "1")  # OpenMP's threads, which this process may have, are not forked
        yield runs, found


@pytest.mark.soak  # the network is a process, which a busy machine lets wait for longer than hosts are patient
@pytest.mark.parametrize(
    ("num_hosts", "num_ranks", "link"),
    [
        (2, 1, Link(delay_ms=5, loss=0.01)),
        (2, 2, Link(delay_ms=100)),
        (4, 2, Link(delay_ms=1, loss=0.01)),
        (4, 1, Link(mbit=100, delay_ms=1)),
        *((num_hosts, num_ranks, Link()) for num_hosts in (2, 4) for num_ranks in (3, 4)),
    ],
)
def test_weights_are_those_of_one_process(num_hosts: int, num_ranks: int, link: Link) -> None:
    settings = {"num_batches": 4, "width": 20_000}
    wanted = train(**settings)
    with running(num_hosts, num_ranks, link) as (runs, _):
        for found in runs.call(train, batches="split", hparams=settings):
            torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.soak
@pytest.mark.parametrize("encrypted", [False, True])
def test_a_way_that_is_cut_between_two_hosts_which_both_reach_the_driver_ends_the_run(encrypted: bool) -> None:
    with (
        pytest.MonkeyPatch.context() as patch,
        hosts.network(3) as (address, found),
        launcher(address, found, 1, encrypted=encrypted) as runs,
    ):
        patch.setenv("OMP_NUM_THREADS", "1")
        at: list[float] = []

        def cut() -> None:
            time.sleep(5)
            at.append(time.monotonic())
            # What host 1 sends to host 2 goes to nobody; the other way stays open.
            nobody = "lladdr 02:00:00:00:00:01 dev eth0 nud permanent"
            hosts.ip(f"-n {found[1].name} neigh replace {found[2].address} {nobody}")

        cutting = threading.Thread(target=cut)
        cutting.start()
        with pytest.raises(RankError, match=r"no sign of life came for 20 s from rank [12] .* to rank [12] "):
            runs.call(train, batches="split", hparams={"num_batches": 100_000, "width": 10})
        cutting.join()
        assert time.monotonic() - at[0] < 60


@pytest.mark.soak
def test_a_host_that_is_cut_off_is_named_in_time_and_the_run_ends() -> None:
    with running(2, 1, Link(delay_ms=1)) as (runs, found):
        at: list[float] = []

        def cut() -> None:
            time.sleep(5)
            at.append(time.monotonic())
            found[1].cut_off()

        cutting = threading.Thread(target=cut)
        cutting.start()
        with pytest.raises(RankError, match=r"no sign of life came for 20 s from the machine that held rank 1"):
            runs.call(train, batches="split", hparams={"num_batches": 100_000, "width": 10})
        cutting.join()
        assert time.monotonic() - at[0] < 60
