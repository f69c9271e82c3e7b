"""``torch.distributed.checkpoint.save`` of a sharded program writes what plain torch loads, and gathers little."""

from __future__ import annotations

import os
import pickle
import re
import shutil
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from lagom.errors import LagomError
from lagom.run_state.random_streams import seed_everything
from lagom.session.session import Session
from tests.ranks import run_ranks

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint"),
]
WIDTH = 72
LEVELS = (1, 2, 3)


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(5, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if p.dim() > 1]},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    return model, torch.optim.AdamW(groups, lr=0.01)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    x = torch.rand(8, 5, generator=torch.Generator().manual_seed(seed))
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def numbers(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Weights, state and settings as lists."""
    state = optimizer.state_dict()
    entries = {i: {name: value.tolist() for name, value in one.items()} for i, one in sorted(state["state"].items())}
    return {key: value.tolist() for key, value in model.state_dict().items()}, entries, state["param_groups"]


def train_and_save(session: Session, path: str, how: str) -> Any:
    seed_everything(1)
    model, optimizer = make()
    for seed in range(3):
        step(model, optimizer, seed)
    optimizer.param_groups[0]["lr"] = 0.5
    states = {
        "objects": {"model": model, "optimizer": optimizer, "epoch": 3},
        "state of the model": {"model": model.state_dict(), "optimizer": optimizer, "epoch": 3},
        "states": {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3},
    }
    dcp.save(states[how], checkpoint_id=path)
    return numbers(model, optimizer)


def load_and_train(session: Session | None, path: str) -> Any:
    """Load into a program that has trained with other numbers; return its numbers, and those after one more step."""
    seed_everything(2)
    model, optimizer = make()
    for seed in range(2):
        step(model, optimizer, 10 + seed)
    dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=path)
    loaded = numbers(model, optimizer)
    step(model, optimizer, 3)
    return loaded, numbers(model, optimizer)


@pytest.mark.parametrize(
    ("level", "world_size", "how"),
    [
        (1, 2, "state of the model"),
        (2, 3, "objects"),
        (3, 2, "state of the model"),
        (3, 3, "objects"),
        (3, 2, "states"),
        *(
            pytest.param(level, world_size, how, marks=pytest.mark.soak)
            for level in (0, *LEVELS)
            for world_size in (1, 2, 3)
            for how in ("objects", "states")
        ),
    ],
)
def test_plain_torch_loads_what_ranks_have_saved(level: int, world_size: int, how: str, tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    run = partial(train_and_save, path=path, how=how)
    wanted = run_ranks(world_size, run, batches="whole", zero_lvl=level)[0]
    assert load_and_train(None, path)[0] == wanted
    dcp_to_torch_save(path, str(tmp_path / "whole.pt"))
    whole = torch.load(tmp_path / "whole.pt")
    assert {key: value.tolist() for key, value in whole["model"].items()} == wanted[0]
    assert whole["epoch"] == 3


def save_in_safetensors(session: Session, path: str) -> Any:
    module: Any = ModuleType("safetensors.torch")
    module.save = lambda tensors, metadata: pickle.dumps({key: value.tolist() for key, value in tensors.items()})
    sys.modules |= {"safetensors": ModuleType("safetensors"), "safetensors.torch": module}
    seed_everything(1)
    model, optimizer = make()
    step(model, optimizer, 0)
    writer = filesystem.FileSystemWriter(path, serialization_format=filesystem.SerializationFormat.SAFETENSORS)
    dcp.save({"model": model}, storage_writer=writer)
    return numbers(model, optimizer)[0]


@pytest.mark.skipif(not hasattr(filesystem, "SerializationFormat"), reason="this torch has no other format")
def test_tensors_that_are_written_at_the_end_of_a_file_are_kept_until_then(tmp_path: Path) -> None:
    wanted = run_ranks(2, partial(save_in_safetensors, path=str(tmp_path)), batches="whole", zero_lvl=3)[0]
    files = [pickle.loads(path.read_bytes()) for path in tmp_path.glob("*.distcp")]
    written = {key: value for file in files for key, value in file.items()}
    assert {key: written[f"model.{key}"] for key in wanted} == wanted


@pytest.mark.parametrize(
    ("level", "world_size"),
    [(3, 2), (2, 3), *(pytest.param(*other, marks=pytest.mark.soak) for other in [(1, 2), (1, 3), (2, 2), (3, 3)])],
)
def test_ranks_load_what_plain_torch_has_saved(level: int, world_size: int, tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    train_and_save(None, path, "objects")  # type: ignore[arg-type]
    wanted = load_and_train(None, path)
    for found in run_ranks(world_size, partial(load_and_train, path=path), batches="whole", zero_lvl=level):
        assert found[0] == wanted[0]
        for one, other in zip(found[1][0].values(), wanted[1][0].values(), strict=True):
            assert torch.allclose(torch.tensor(one), torch.tensor(other), rtol=0, atol=1e-6)


def save_and_use(session: Session, path: str) -> Any:
    """Save beside the last checkpoint, list, rename and load it, and overwrite it, as programs do."""
    seed_everything(1)
    model, optimizer = make()
    found = []
    for seed in range(3):
        step(model, optimizer, seed)
        wanted = numbers(model, optimizer)
        dcp.save({"model": model.state_dict(), "optimizer": optimizer}, checkpoint_id=f"{path}.new")
        shutil.rmtree(path, ignore_errors=True)
        os.rename(f"{path}.new", path)
        sizes = {name: os.path.getsize(os.path.join(path, name)) for name in sorted(os.listdir(path))}
        step(model, optimizer, 10 + seed)
        reader = dcp.FileSystemReader(path)
        dcp.load({"model": model.state_dict(), "optimizer": optimizer}, storage_reader=reader)
        found.append((sizes, str(reader.path), numbers(model, optimizer) == wanted))
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=path)
        step(model, optimizer, 10 + seed)
        dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=path)
        found.append(numbers(model, optimizer) == wanted)
    return found


@pytest.mark.parametrize(("level", "world_size"), [(3, 2), (1, 3), pytest.param(2, 2, marks=pytest.mark.soak)])
def test_each_rank_sees_the_checkpoint_that_rank_0_has_written(level: int, world_size: int, tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    first, *others = run_ranks(world_size, partial(save_and_use, path=path), batches="whole", zero_lvl=level)
    sizes, used, is_equal = first[0]
    assert set(sizes) == {".metadata", "__0_0.distcp"}
    assert (used, is_equal) == (path, True)
    assert first[1::2] == [True] * 3
    assert others == [first] * (world_size - 1)


def save_then_lose(session: Session, path: str) -> str:
    model, optimizer = make()
    step(model, optimizer, 1)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=path)
    if session.rank == 0:
        shutil.rmtree(path)
    with pytest.raises((LagomError, dcp.CheckpointException)) as caught:
        dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=path)
    return str(caught.value)


def test_a_host_that_does_not_see_the_checkpoint_says_so(tmp_path: Path) -> None:
    """As on another host, the real disk has no checkpoint where rank 1 looks for it."""
    path = str(tmp_path / "checkpoint")
    errors = run_ranks(2, partial(save_then_lose, path=path), batches="whole", zero_lvl=3)
    assert "No such file or directory" in errors[0]
    assert re.search(rf"checkpoint {path} to a disk that .* does not see; save it to a folder that all", errors[1])


class Training:
    """The state of a program, by torch's functions for states; the first call steps an optimizer without state."""

    def __init__(self) -> None:
        self.model, self.optimizer = make()
        self.num_saved = 0

    def state_dict(self) -> dict[str, Any]:
        self.num_saved += 1
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def save_before_training(session: Session, path: str) -> Any:
    seed_everything(1)
    training = Training()
    dcp.save({"training": training}, checkpoint_id=path)
    wanted = numbers(training.model, training.optimizer)
    step(training.model, training.optimizer, 1)
    dcp.load({"training": training}, checkpoint_id=path)
    return numbers(training.model, training.optimizer) == wanted, training.num_saved


def test_an_object_with_a_state_of_its_own_is_asked_on_each_rank(tmp_path: Path) -> None:
    run = partial(save_before_training, path=str(tmp_path / "checkpoint"))
    assert run_ranks(2, run, batches="whole", zero_lvl=1) == [(True, 2)] * 2


def save_large(session: Session, path: str) -> float:
    """Save 67 MB of parameters and 134 MB of state; return by how many MB this has raised the memory of the rank."""
    model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(16)])
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        model(torch.rand(4, 1024)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
    before = memory("VmRSS")
    dcp.save({"model": model.state_dict(), "optimizer": optimizer}, checkpoint_id=path)
    return memory("VmHWM") - before


def memory(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1000


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_rank_has_the_whole_model_or_state_while_it_is_saved(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    grown = run_ranks(2, partial(save_large, path=str(path)), batches="whole", zero_lvl=3)
    size = sum(file.stat().st_size for file in path.iterdir()) / 1e6
    assert size > 200
    assert max(grown) < size / 2


def save_in_vain(session: Session, path: str) -> str:
    model, optimizer = make()
    with pytest.raises((LagomError, dcp.CheckpointException, OSError)) as caught:
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=path)
    return str(caught.value)


@pytest.mark.parametrize("name", ["a file", "metadata is a folder"])
def test_an_error_of_rank_0_ends_save_on_all_ranks(name: str, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    if name == "a file":
        path.touch()
        path = path / "below"
    else:
        (path / ".metadata" / "in the way").mkdir(parents=True)
    errors = run_ranks(2, partial(save_in_vain, path=str(path)), zero_lvl=3)
    assert re.search("Not a directory|Is a directory", errors[0])
    assert errors[1].startswith("rank 0 could not write the checkpoint: ")
