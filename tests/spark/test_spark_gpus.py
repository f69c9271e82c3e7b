"""GPUs of Spark's tasks: how many a task has, and by what name CUDA knows each; tests/integration has them on Spark."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from lagom.cluster import OtherDevice
from lagom.errors import PlanError
from lagom.spark import spark_worker
from lagom.spark.spark_session import SparkFacts
from lagom.spark.spark_worker import gpus_of_task


@pytest.mark.parametrize(("amount", "gpus"), [(None, 0), ("0", 0), ("0.25", 1), ("1", 1), ("2", 2)])
def test_gpus_of_a_task_are_counted(amount: str | None, gpus: int) -> None:
    settings = {"spark.task.resource.gpu.amount": amount} if amount is not None else {}
    facts = SparkFacts(types.SimpleNamespace(conf=settings))
    facts.slots = lambda: 3  # type: ignore[method-assign]
    found = facts.cluster()
    assert (found.slots, found.gpus_per_slot, found.device_kind) == (3, gpus, "cuda")


@pytest.mark.parametrize("dynamic", ["false", "true"])
def test_the_kind_of_a_tasks_devices_is_that_of_torch(dynamic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that names the kind places its tensors itself, and an error names the backend."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    settings = {"spark.task.resource.gpu.amount": "1", "spark.dynamicAllocation.enabled": dynamic}
    facts = SparkFacts(types.SimpleNamespace(conf=settings))
    facts.slots = lambda: 3  # type: ignore[method-assign]
    assert facts.cluster().device_kind == "xpu"


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


def test_devices_of_other_makers_are_named_by_the_kind_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also beside GPUs of NVIDIA's, which torch does not use then."""
    monkeypatch.setattr(spark_worker, "other_devices", lambda: (OtherDevice("xpu:0", 1), OtherDevice("xpu:1", 1)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b")
    assert list(gpus_of_task(spec(2), context(["1", "0"]))) == ["xpu:1", "xpu:0"]
    for addresses in (["GPU-a"], ["2"]):
        with pytest.raises(PlanError) as caught:
            gpus_of_task(spec(1), context(addresses))
        assert str(caught.value) == (
            f"Spark gave this task {addresses}, and torch's accelerator there is 'xpu', with xpu:0, xpu:1, so "
            f"'xpu:{addresses[0]}' is no device; have the discovery script of the resource 'gpu' print the numbers of "
            "these devices, or, if it prints NVIDIA's GPUs, set TORCH_DEVICE_BACKEND_AUTOLOAD=0 on the executors, with "
            "which torch does not load the other kind"
        )


def test_a_task_with_fewer_gpus_than_ranks_is_an_error() -> None:
    with pytest.raises(PlanError, match=r"this task was to have 2 GPUs, and Spark gave it \['0'\]"):
        gpus_of_task(spec(2), context(["0"]))


def spec(ranks: int) -> Any:
    return types.SimpleNamespace(plan=types.SimpleNamespace(gpu=True, ranks_per_slot=ranks))


def context(addresses: list[str]) -> Any:
    return types.SimpleNamespace(resources=lambda: {"gpu": types.SimpleNamespace(addresses=addresses)})
