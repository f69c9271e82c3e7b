"""Ranks on two hosts with Spark's encryption on: they train, and whoever reads the wire between them sees no tensor."""

from __future__ import annotations

import os
import struct
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lagom.errors import CollectiveError, PlanError
from tests.doors import listening
from tests.integration import hosts, programs

_LARGE, _SMALL = b"GRADNT", b"SMALLG"
"""In each number of a rank's gradients: the lower bits of the mantissa, which scaling by powers of 2 leaves alone."""
_STORE = b"lagom/ways"
"""Part of a name in the run's store."""


def marked(mark: bytes) -> float:
    """A number about 0.001 whose bytes in memory begin with ``mark``."""
    (value,) = struct.unpack("<d", mark + b"\x55\x3f")
    return float(value)


class Net(torch.nn.Module):
    """Weights whose gradients are marked; the small ones travel with signatures."""

    def __init__(self) -> None:
        super().__init__()
        self.large = torch.nn.Parameter(torch.ones(200_000, dtype=torch.float64))
        self.small = torch.nn.Parameter(torch.ones(5, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = marked(_LARGE) * self.large.sum() + marked(_SMALL) * self.small.sum()
        return x * total


def train() -> tuple[dict[str, torch.Tensor], list[str]]:
    """Weights, and what listens of this rank and of the process that holds it."""
    model = Net()
    optimizers = [torch.optim.SGD([one], lr=0.1) for one in model.parameters()]
    scales = torch.tensor([1.0, 2.0, 4.0] * 4, dtype=torch.float64)  # another one on each rank
    for (x,) in torch.utils.data.DataLoader(torch.utils.data.TensorDataset(scales), batch_size=3):
        for one in optimizers:
            one.zero_grad()
        model(x).mean().backward()
        for one in optimizers:
            one.step()
    return model.state_dict(), listening([os.getpid(), os.getppid()])


def subnet(spark: Any) -> str:
    """The hosts' own."""
    return str(spark.sparkContext.getConf().get("spark.driver.host")).rpartition(".")[0]


@pytest.mark.parametrize("spark", ["foreign", "foreign-encrypted"], indirect=True)
def test_no_tensor_is_in_clear_on_the_wire_where_spark_encrypts(spark: Any) -> None:
    encrypts = spark.sparkContext.getConf().get("spark.network.crypto.enabled") == "true"
    with hosts.capture(subnet(spark)) as seen:
        result = programs.run(train, 3, batches="split")
    sent = b"".join(map(hosts.payload, seen))
    wanted, _ = train()
    assert all(programs.same_weights(found, wanted) for found, _ in result.per_rank)
    assert len(sent) > 4 * 200_000 * 8  # the gradients of four steps
    marks = {mark: mark in sent for mark in (_LARGE, _SMALL, _STORE)}
    assert marks == dict.fromkeys(marks, not encrypts)
    if encrypts:  # whoever comes later finds no open port
        assert [found for _, found in result.per_rank] == [[]] * 3


def train_by_hand(backend: str | None) -> tuple[float, str]:
    """A program that is distributed already: the sum over the ranks, and what an exchange over gloo says."""
    dist.init_process_group(backend)
    total = torch.full((100_000,), marked(_LARGE) * 2.0 ** dist.get_rank(), dtype=torch.float64)
    dist.all_reduce(total)
    try:
        dist.all_to_all_single(torch.empty(3), torch.ones(3))
    except CollectiveError as error:
        return total[0].item(), str(error)
    return total[0].item(), ""


@pytest.mark.parametrize("spark", ["foreign-encrypted"], indirect=True)
def test_a_distributed_program_encrypts_too_and_is_refused_gloo(spark: Any) -> None:
    with hosts.capture(subnet(spark)) as seen:
        found = programs.run(train_by_hand, 3, hparams={"backend": None}).per_rank
    sent = b"".join(map(hosts.payload, seen))
    assert len(sent) > 2 * 100_000 * 8
    assert _LARGE not in sent
    for total, said in found:
        assert total == pytest.approx(7 * marked(_LARGE), rel=1e-15)
        assert "gloo sends in clear" in said
        assert "allow_unencrypted_collectives=True" in said


@pytest.mark.parametrize("spark", ["foreign-encrypted"], indirect=True)
def test_gloo_is_refused_where_it_is_asked_for_by_name(spark: Any) -> None:
    with pytest.raises(CollectiveError, match="the program asks for gloo by name"):
        programs.run(train_by_hand, 3, hparams={"backend": "gloo"})
    with pytest.raises(PlanError, match=r"2 hosts .* gloo \(collectives='gloo'\) would send .* in clear"):
        programs.run(programs.nothing, 3, collectives="gloo")


@pytest.mark.parametrize("spark", ["foreign-encrypted"], indirect=True)
def test_what_is_allowed_to_be_in_clear_is(spark: Any) -> None:
    with hosts.capture(subnet(spark)) as seen:
        result = programs.run(train, 3, batches="split", allow_unencrypted_collectives=True)
    wanted, _ = train()
    assert all(programs.same_weights(found, wanted) for found, _ in result.per_rank)
    assert _LARGE in b"".join(map(hosts.payload, seen))
