"""Parquet data sets on several ranks: batches and weights of one machine, each row once; ranks that differ are told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lagom import PetastormDataLoader, experiment
from lagom.config import TorchDistributedConfig
from lagom.config.torch_distributed import Batches
from lagom.data import ParquetDataset, ParquetLoader
from lagom.errors import DivergenceError
from lagom.session.session import Session
from tests.extensions.data.tables import numbers
from tests.ranks import alone, run_ranks

LAYOUT = [[30, 7], [], [1, 22], [11]]
"""71 rows: neither batches nor ranks divide them."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return numbers(tmp_path / "table", LAYOUT)


def trained(loader: Any, held_out: Any) -> tuple[list[list[int]], list[torch.Tensor], float, int]:
    """Two epochs: the rows seen, batch by batch, the weights, a metric, and the length told."""
    model = nn.Sequential(nn.Linear(1, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    seen = []
    for _ in range(2):
        for batch in loader:
            seen.append(batch["row"].tolist())
            optimizer.zero_grad()
            nn.functional.mse_loss(model(batch["x"][:, None]), batch["y"][:, None]).backward()
            optimizer.step()
    with torch.no_grad():
        wrong = sum((model(batch["x"][:, None])[:, 0] - batch["y"]).abs().sum().item() for batch in held_out)
    return seen, [p.detach() for p in model.parameters()], wrong, len(loader)


def by_lagom(folder: Path, batch_size: int, num_workers: int = 0, window_bytes: int = 1200) -> Any:
    def run(session: Session) -> Any:
        dataset = ParquetDataset(folder, window_bytes=window_bytes)
        loader = ParquetLoader(dataset, batch_size, True, num_workers=num_workers)
        return trained(loader, ParquetLoader(dataset, 10))

    return run


def by_torch(folder: Path, batch_size: int, num_workers: int = 0) -> Any:
    def run(session: Session) -> Any:
        dataset = ParquetDataset(folder)
        return trained(DataLoader(dataset, batch_size, shuffle=True, num_workers=num_workers), DataLoader(dataset, 10))

    return run


@pytest.mark.parametrize(
    ("made", "world_size", "batches", "num_workers"),
    [
        *(
            (by_lagom, 2, "split", 0),
            (by_torch, 2, "split", 0),
            (by_lagom, 2, "whole", 0),
            (by_torch, 2, "per_rank", 0),
        ),
        *(
            pytest.param(*other, marks=pytest.mark.soak)
            for other in ((by_lagom, 3, "split", 0), (by_torch, 2, "split", 1))
        ),
        *(
            pytest.param(made, *other, marks=pytest.mark.soak)
            for made in (by_lagom, by_torch)
            for other in (
                *((1, "split", 0), (3, "split", 2)),
                *((2, "whole", 1), (2, "per_rank", 1), (3, "per_rank", 1)),
            )
        ),
    ],
)
def test_training_is_that_of_one_machine(
    folder: Path, made: Any, world_size: int, batches: Batches, num_workers: int
) -> None:
    wide = world_size if batches == "per_rank" else 1
    found = run_ranks(world_size, made(folder, 5, num_workers), batches=batches)
    seen, weights, wrong, length = alone(made(folder, 5 * wide, num_workers))
    for theirs, their_weights, their_wrong, their_length in found:
        assert len(theirs) == len(seen)
        assert their_length == length
        assert their_wrong == pytest.approx(wrong, rel=1e-9)
        torch.testing.assert_close(their_weights, weights, rtol=0, atol=0 if world_size == 1 else 1e-12)
    for number, whole in enumerate(seen):
        parts = [theirs[number] for theirs, *_ in found]
        if batches == "whole":
            assert parts == [whole] * world_size
        elif len(whole) >= world_size:
            assert sorted(row for part in parts for row in part) == sorted(whole)
        else:
            assert set(whole) == {row for part in parts for row in part}


@pytest.mark.parametrize("batches", ["split", pytest.param("whole", marks=pytest.mark.soak)])
def test_a_transform_of_frames_may_leave_rows_out_and_add_some(folder: Path, batches: Batches) -> None:
    """71 rows in batches of 14: of the last, of one row, two ranks have none."""

    def run(session: Session) -> Any:
        def changed(frame: Any) -> Any:
            import pandas as pd  # type: ignore[import-untyped]

            return pd.concat([frame[frame["row"] % 4 > 0], frame[frame["row"] % 5 == 1]])

        loader = PetastormDataLoader(str(folder), 14, changed, seed=2)
        return trained(loader, PetastormDataLoader(str(folder), 10, changed, shuffle=False))

    seen, weights, wrong, _ = alone(run)
    assert len({len(rows) for rows in seen}) > 3
    for mine, others, metric, _ in run_ranks(3, run, batches=batches):
        assert batches == "whole" or len({len(rows) for rows in mine}) > 1
        torch.testing.assert_close(others, weights, rtol=0, atol=1e-12)
        assert metric == pytest.approx(wrong, abs=1e-9)


@pytest.mark.parametrize("evaluation", ["replicated", "sharded"])
def test_an_evaluation_is_whole_or_shared_out_as_asked(folder: Path, evaluation: Any) -> None:
    def run(session: Session) -> Any:
        with torch.no_grad():
            return [batch["row"].tolist() for batch in ParquetLoader(ParquetDataset(folder), 10)]

    found = run_ranks(2, run, evaluation=evaluation)
    everything = sorted(row for theirs in found for batch in theirs for row in batch)
    assert everything == sorted(list(range(71)) * (2 if evaluation == "replicated" else 1))


def test_a_run_goes_on_with_another_number_of_ranks(folder: Path) -> None:
    def begun(session: Session) -> Any:
        loader = ParquetLoader(ParquetDataset(folder, window_bytes=1200), 6, True)
        seen = []
        for number, batch in enumerate(loader):
            seen.append(batch["row"].tolist())
            if number == 3:
                break
        return seen, loader.state_dict()

    def goes_on(state: Any) -> Any:
        def run(session: Session) -> Any:
            loader = ParquetLoader(ParquetDataset(folder, window_bytes=700), 4, True, num_workers=1)
            loader.load_state_dict(state)
            return [[batch["row"].tolist() for batch in loader] for _ in range(2)], loader.state_dict()

        return run

    first = run_ranks(3, begun)
    states = [state for _, state in first]
    assert states[0] == states[1] == states[2]
    assert states[0]["rows"] == 24
    two, one = run_ranks(2, goes_on(states[0])), alone(goes_on(states[0]))
    assert [state for _, state in two] == [one[1]] * 2
    for epoch in (0, 1):
        for number, whole in enumerate(one[0][epoch]):
            assert sorted(row for theirs, _ in two for row in theirs[epoch][number]) == sorted(whole)
    before = [row for theirs, _ in first for batch in theirs for row in batch]
    after = [row for theirs, _ in two for batch in theirs[0] for row in batch]
    assert sorted(before + after) == list(range(71))


def test_ranks_that_see_other_files_are_told_so(tmp_path: Path) -> None:
    for rank in range(2):
        numbers(tmp_path / str(rank), [[4, 4 + rank]])

    def run(session: Session) -> Any:
        loader = ParquetLoader(ParquetDataset(tmp_path / str(session.rank)), 2, True)
        with pytest.raises(DivergenceError, match="the data set"):
            list(loader)

    run_ranks(2, run)


def test_a_data_set_of_the_config_reaches_the_function(folder: Path) -> None:
    def train(train_set: Any, test_set: Any) -> Any:
        import torch
        from torch.utils.data import DataLoader

        from lagom.data import ParquetLoader

        model = torch.nn.Linear(1, 1).double()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        seen = []
        for batch in ParquetLoader(train_set, 8, shuffle=True):
            seen += batch["row"].tolist()
            optimizer.zero_grad()
            (model(batch["x"][:, None])[:, 0] - batch["y"]).square().mean().backward()
            optimizer.step()
        with torch.no_grad():
            total = sum(batch["row"].sum().item() for batch in DataLoader(test_set, 16))
        return {"total": total, "seen": seen, "weight": model.weight.item()}

    config = TorchDistributedConfig(
        train_set=ParquetDataset(folder),
        test_set=ParquetDataset(folder),
        world_size=2,
        launcher="local",
        batches="split",
    )
    result = experiment.lagom(train, config)
    assert [one["total"] for one in result.per_rank] == [sum(range(71))] * 2
    assert sorted(row for one in result.per_rank for row in one["seen"]) == list(range(71))
    assert result.per_rank[0]["weight"] == result.per_rank[1]["weight"]
