"""Functions that are distributed already. Scripts, with torchrun as the judge, are in tests/integration."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from lagom import experiment
from lagom.config import TorchDistributedConfig
from tests import distributed_programs as programs

FORMS = {"torchrun": programs.by_variables, "fallback": programs.or_alone}


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.soak), 2])
@pytest.mark.parametrize("form", [pytest.param("torchrun", marks=pytest.mark.soak), "fallback"])
def test_a_function_does_as_well(tmp_path: Path, form: str, world_size: int) -> None:
    hparams = {"folder": str(tmp_path)}
    config = TorchDistributedConfig(
        launcher="inline" if world_size == 1 else "local", world_size=world_size, hparams=hparams
    )
    function: Any = FORMS[form]
    result = experiment.lagom(function, config)
    assert len(result.per_rank) == world_size
    assert all(value == result["test result"] for value in result.per_rank)
    assert not torch.distributed.is_initialized()


def test_ranks_find_the_variables_of_torchrun_and_horovodrun() -> None:
    def program() -> dict[str, str]:
        torch.distributed.init_process_group()
        return {name: os.environ[name] for name in programs.VARIABLES}

    found = experiment.lagom(program, TorchDistributedConfig(launcher="local", world_size=2)).per_rank
    for rank, variables in enumerate(found):
        assert variables["RANK"] == variables["LOCAL_RANK"] == str(rank)
        assert variables["WORLD_SIZE"] == variables["LOCAL_WORLD_SIZE"] == "2"
        assert variables["MASTER_ADDR"] == "127.0.0.1"
        assert variables["MASTER_PORT"] == found[0]["MASTER_PORT"]
        assert variables["HOROVOD_RANK"] == variables["HOROVOD_LOCAL_RANK"] == str(rank)
        assert variables["HOROVOD_SIZE"] == variables["HOROVOD_LOCAL_SIZE"] == "2"
        assert (variables["HOROVOD_CROSS_RANK"], variables["HOROVOD_CROSS_SIZE"]) == ("0", "1")


def test_an_ordinary_program_finds_none() -> None:
    def program() -> list[str]:
        assert not torch.distributed.is_initialized()
        return [name for name in programs.VARIABLES if name in os.environ]

    assert experiment.lagom(program, TorchDistributedConfig(launcher="local", world_size=2)).per_rank == ([], [])


def test_inline_leaves_the_variables_of_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def program() -> str | None:
        return os.environ.get("LOCAL_RANK") if torch.distributed.init_process_group.__name__ else None

    config = TorchDistributedConfig(launcher="inline")
    assert experiment.lagom(program, config)["test result"] == "0"
    assert "RANK" not in os.environ
    monkeypatch.setenv("RANK", "0")
    assert experiment.lagom(program, config)["test result"] is None


@pytest.mark.parametrize("slow", [pytest.param(0, marks=pytest.mark.soak), 2])
def test_rank_0_may_end_first_and_last(tmp_path: Path, slow: int) -> None:
    def program(slow: int, folder: str) -> int:
        import time

        dist = torch.distributed
        dist.init_process_group("gloo")
        store = dist.distributed_c10d._get_default_store()
        if dist.get_rank() == slow:
            # The others have returned by then, or would have.
            while len(list(Path(folder).iterdir())) < 2:
                time.sleep(0.01)
            time.sleep(0.3)
            store.set("late", "")
            assert store.get("late") == b""
        else:
            Path(folder, f"{slow}-{dist.get_rank()}").touch()
        return dist.get_rank()

    folder = tmp_path / "ended"
    folder.mkdir()
    hparams = {"slow": slow, "folder": str(folder)}
    config = TorchDistributedConfig(launcher="local", world_size=3, hparams=hparams)
    assert experiment.lagom(program, config).per_rank == (0, 1, 2)


def adam_steps(fused: bool | None = None) -> list[float]:
    """Return a parameter after five steps of Adam."""
    parameter = torch.nn.Parameter(torch.linspace(-1.0, 1.0, 300))
    optimizer = torch.optim.Adam([parameter], lr=0.01, fused=fused)
    for number in range(1, 6):
        parameter.grad = (number * parameter.detach()).sin()
        optimizer.step()
    return parameter.tolist()


def test_adam_has_torchs_bits_whatever_batches_says() -> None:
    def program() -> list[float]:
        torch.distributed.init_process_group("gloo")
        return adam_steps()

    config = TorchDistributedConfig(launcher="local", world_size=2, batches="split")
    assert adam_steps() != adam_steps(fused=True)
    assert experiment.lagom(program, config).per_rank == (adam_steps(), adam_steps())
