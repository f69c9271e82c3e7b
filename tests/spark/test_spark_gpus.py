"""GPUs of Spark's tasks: how many a task has, and by what name CUDA knows each; tests/integration has them on Spark."""

from __future__ import annotations

import types
from typing import Any

import pytest

from lagom.errors import PlanError
from lagom.spark.spark_session import SparkFacts
from lagom.spark.spark_worker import gpus_of_task


@pytest.mark.parametrize(("amount", "gpus"), [(None, 0), ("0", 0), ("0.25", 1), ("1", 1), ("2", 2)])
def test_gpus_of_a_task_are_counted(amount: str | None, gpus: int) -> None:
    settings = {"spark.task.resource.gpu.amount": amount} if amount is not None else {}
    facts = SparkFacts(types.SimpleNamespace(conf=settings))
    facts.slots = lambda: 3  # type: ignore[method-assign]
    found = facts.cluster()
    assert (found.slots, found.gpus_per_slot) == (3, gpus)


@pytest.mark.parametrize(
    ("addresses", "mask", "wanted"),
    [
        (["0", "2"], "", ["0", "2"]),
        (["0", "1"], "GPU-a, GPU-b,GPU-c", ["GPU-a", "GPU-b"]),
        (["1", "0"], "4,5", ["5", "4"]),
        (["GPU-3c2b", "MIG-77aa"], "GPU-a,GPU-b", ["GPU-3c2b", "MIG-77aa"]),
    ],
)
def test_gpus_of_a_task_have_the_names_that_cuda_wants(
    addresses: list[str], mask: str, wanted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
    assert list(gpus_of_task(spec(2), context(addresses))) == wanted


def test_a_task_with_fewer_gpus_than_ranks_is_an_error() -> None:
    with pytest.raises(PlanError, match=r"this task was to have 2 GPUs, and Spark gave it \['0'\]"):
        gpus_of_task(spec(2), context(["0"]))


def spec(ranks: int) -> Any:
    return types.SimpleNamespace(plan=types.SimpleNamespace(gpu=True, ranks_per_slot=ranks))


def context(addresses: list[str]) -> Any:
    return types.SimpleNamespace(resources=lambda: {"gpu": types.SimpleNamespace(addresses=addresses)})
