"""The programs of the documents this project comes from, in our own words: they run with only their imports changed."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lagom import experiment
from lagom.config import TorchDistributedConfig
from tests.articles_program import Field, train_field

POINTS = torch.rand((300, 2), generator=torch.Generator().manual_seed(1)) * 10 - 5
FIELD = torch.sin(POINTS[:, 1]) + torch.cos(POINTS[:, 0])
TRAIN_SET = TensorDataset(POINTS[:240], FIELD[:240])
TEST_SET = TensorDataset(POINTS[240:], FIELD[240:])


def config(world_size: int, **fields: Any) -> TorchDistributedConfig:
    """Return the config of a run on this machine."""
    return TorchDistributedConfig(launcher="local", world_size=world_size, **fields)


@pytest.mark.parametrize(
    ("world_size", "zero_lvl"),
    [
        *((2, 0), (3, 3)),
        # tests/test_examples.py has each level by default.
        *(pytest.param(*case, marks=pytest.mark.soak) for case in ((1, 0), (3, 0), (2, 1), (2, 2))),
    ],
)
def test_the_articles_program_gives_the_tensor_of_a_plain_call(world_size: int, zero_lvl: int) -> None:
    torch.manual_seed(0)
    plain = train_field(Field, {}, TRAIN_SET, TEST_SET)
    sets = {"module": Field, "train_set": TRAIN_SET, "test_set": TEST_SET}
    torch.manual_seed(0)
    result = experiment.lagom(train_field, config(world_size, zero_lvl=zero_lvl, **sets))
    assert isinstance(result["test result"], torch.Tensor)
    torch.testing.assert_close(result["test result"], plain, rtol=1e-6, atol=0)
    assert len(result.per_rank) == world_size
    assert all(torch.equal(value, result.value) for value in result.per_rank)


def test_a_list_of_modules_reaches_the_function_as_a_list() -> None:
    def train(module: Sequence[Callable[[], torch.nn.Module]], train_set: Dataset[Any]) -> dict[str, float]:
        generator, critic = (part() for part in module)
        optimizer = torch.optim.SGD([*generator.parameters(), *critic.parameters()], lr=0.1)
        for points, _ in DataLoader(train_set, batch_size=60):
            optimizer.zero_grad()
            critic(generator(points)).mean().backward()
            optimizer.step()
        sums = [sum(float(weights.detach().sum()) for weights in part.parameters()) for part in (generator, critic)]
        return {"generator": sums[0], "critic": sums[1]}

    def generator() -> torch.nn.Module:
        return torch.nn.Linear(2, 3)

    def critic() -> torch.nn.Module:
        return torch.nn.Linear(3, 1)

    torch.manual_seed(0)
    plain = train([generator, critic], TRAIN_SET)
    torch.manual_seed(0)
    result = experiment.lagom(train, config(2, module=[generator, critic], train_set=TRAIN_SET))
    assert result["generator"] == pytest.approx(plain["generator"], rel=1e-5)
    assert result["critic"] == pytest.approx(plain["critic"], rel=1e-5)


def test_reporter_and_none_are_as_in_maggy(capsys: pytest.CaptureFixture[str]) -> None:
    def train(hparams: Mapping[str, Any], reporter: Any) -> None:
        for step in range(3):
            reporter.broadcast(metric=hparams["lr"] * step, step=step)
        reporter.log("told once")

    result = experiment.lagom(train, config(2, hparams={"lr": 0.5}))
    assert result["test result"] is None
    assert result.per_rank == (None, None)
    assert capsys.readouterr().out == "told once\n"


def test_a_single_node_notebook_function_trains_and_checkpoints_as_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    os.makedirs(folder)

    def save_checkpoint(model: torch.nn.Module, optimizer: torch.optim.Optimizer, epoch: int) -> None:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, f"{folder}/checkpoint-{epoch}.pth.tar")

    def train(learning_rate: float) -> None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        images, labels = torch.rand(64, 1, 8, 8), torch.randint(0, 10, (64,))
        loader = DataLoader(TensorDataset(images, labels), batch_size=20, shuffle=True)
        network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10), torch.nn.LogSoftmax(dim=1))
        network = network.to(device)
        optimizer = torch.optim.SGD(network.parameters(), lr=learning_rate, momentum=0.5)
        for epoch in range(1, 3):
            network.train()
            for data, target in loader:
                data, target = data.to(device), target.to(device)
                optimizer.zero_grad()
                loss = torch.nn.functional.nll_loss(network(data), target)
                loss.backward()
                optimizer.step()
            save_checkpoint(network, optimizer, epoch)

    torch.manual_seed(0)
    train(learning_rate=0.1)
    plain = torch.load(folder / "checkpoint-2.pth.tar")
    for path in folder.iterdir():
        path.unlink()
    torch.manual_seed(0)
    result = experiment.lagom(train, config(2, hparams={"learning_rate": 0.1}))
    assert result.value is None
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint-1.pth.tar", "checkpoint-2.pth.tar"]
    saved = torch.load(folder / "checkpoint-2.pth.tar")
    assert list(saved["model"]) == list(plain["model"])
    for name, value in plain["model"].items():
        torch.testing.assert_close(saved["model"][name], value, rtol=1e-5, atol=1e-6)
