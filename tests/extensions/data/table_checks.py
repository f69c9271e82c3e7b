"""``check``: compares what lagom reads of a table with the rows that its random history must leave."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch

from lagom.data import ParquetDataset, ParquetLoader


class TableHistory(Protocol):
    """A table that random commits have changed."""

    @property
    def fields(self) -> list[dict[str, Any]]:
        """The columns; each has its "name", and its "type", which for a struct is a dict with its "fields"."""

    @property
    def folder(self) -> Path:
        """What is read: the folder of the table, or its metadata file."""

    def rows(self) -> dict[int, dict[str, Any]]:
        """The rows that the table must have, by their "id"."""


def listed(batch: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of a batch, with None for nulls."""
    names = [name for name in batch if not name.endswith("__valid")]
    columns = {}
    for name in names:
        values = batch[name]
        cells = listed(values) if isinstance(values, dict) else values
        cells = cells.tolist() if isinstance(cells, torch.Tensor) else cells
        valid = batch.get(f"{name}__valid")
        columns[name] = cells if valid is None else [c if v else None for c, v in zip(cells, valid, strict=True)]
    return [dict(zip(names, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def plain(history: TableHistory) -> dict[int, dict[str, Any]]:
    """Rows with fields of None in place of a struct that is None, as batches have them."""
    structs = {
        field["name"]: dict.fromkeys(inner["name"] for inner in field["type"]["fields"])
        for field in history.fields
        if isinstance(field["type"], dict)
    }
    return {
        one: {name: structs.get(name) if value is None else value for name, value in row.items()}
        for one, row in history.rows().items()
    }


def check(history: TableHistory) -> None:
    """Compare what lagom reads with the history's rows: in order, shuffled, filtered, and resumed in an epoch."""
    wanted = plain(history)
    dataset = ParquetDataset(history.folder, nulls="mask")
    assert len(dataset) == len(wanted)
    assert sorted(dataset.columns) == sorted(field["name"] for field in history.fields)
    for shuffle in (False, True):
        found = [row for batch in ParquetLoader(dataset, 5, shuffle=shuffle, seed=3) for row in listed(batch)]
        assert {row["id"]: row for row in found} == wanted
        assert len(found) == len(wanted)
    middle = sorted(wanted)[len(wanted) // 2]
    some = ParquetDataset(history.folder, nulls="mask", filters=[("id", ">=", middle)])
    found = [row for batch in ParquetLoader(some, 5) for row in listed(batch)]
    assert {row["id"]: row for row in found} == {one: row for one, row in wanted.items() if one >= middle}
    assert len(some) == len(found)
    for value in {row["part"] for row in wanted.values()} - {None}:
        alone = ParquetDataset(history.folder, columns=["part"], filters=[("part", "=", value)])
        parts = [part for batch in ParquetLoader(alone, 5) for part in batch["part"]]
        assert parts == [row["part"] for row in wanted.values() if row["part"] == value]
    loader = ParquetLoader(ParquetDataset(dataset, columns=["id"]), 3, shuffle=True, seed=5)
    whole = [batch["id"].tolist() for batch in loader]
    loader = ParquetLoader(ParquetDataset(dataset, columns=["id"]), 3, shuffle=True, seed=5)
    first = next(iter(loader))["id"].tolist()
    resumed = ParquetLoader(ParquetDataset(history.folder, columns=["id"]), 3, shuffle=True, seed=5)
    resumed.load_state_dict(loader.state_dict())
    assert [first, *(batch["id"].tolist() for batch in resumed)] == whole
    dataset.close()
    loader.dataset.close()  # type: ignore[attr-defined]
