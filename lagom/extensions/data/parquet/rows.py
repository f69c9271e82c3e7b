"""``Rows``: the rows that a ``ParquetDataset`` returns for several indices; tensors are made only on access."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

import torch
from torch.utils.data._utils.collate import collate, default_collate_fn_map

from lagom.extensions.data.column_types import values
from lagom.extensions.data.column_types.values import RowSpan

if TYPE_CHECKING:
    from lagom.extensions.data.column_types.values import Block


class Rows(Sequence[Any]):
    """A sequence of rows. A loader's default collate function turns all of them at once into a dict of tensors."""

    __slots__ = ("_spans",)

    def __init__(self, spans: Sequence[RowSpan]) -> None:
        self._spans = spans

    def __len__(self) -> int:
        return sum(len(range(span.start, span.stop, span.step)) for span in self._spans)

    def block(self) -> Block:
        """Return all rows as one block."""
        parts = [span.cut() for span in self._spans]
        return parts[0] if len(parts) == 1 else values.joined(parts)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Rows: ...
    def __getitem__(self, index: int | slice) -> Row | Rows:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step < 1:
                raise ValueError("rows are cut forwards")
            return Rows([RowSpan(self.block(), start, stop, step)])
        place = index + len(self) if index < 0 else index
        for span in self._spans:
            inside = range(span.start, span.stop, span.step)
            if 0 <= place < len(inside):
                return Row(span.block, inside[place])
            place -= len(inside)
        raise IndexError(f"row {index} of {len(self)}")

    def batch(self) -> dict[str, Any]:
        """Return values by column: tensors with a first dimension of rows, lists of other values, dicts for structs."""
        if len(self._spans) == 1:
            return values.batch(self._spans[0])
        return values.batch(RowSpan(self.block(), 0, len(self), 1))


class Row(Mapping[str, Any]):
    """One row, a mapping from columns to values."""

    __slots__ = ("_block", "_found", "_place")

    def __init__(self, block: Block, place: int) -> None:
        self._block = block
        self._place = place
        self._found: dict[str, Any] | None = None

    def __getitem__(self, name: str) -> Any:
        return self.dict()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.dict())

    def __len__(self) -> int:
        return len(self.dict())

    def __repr__(self) -> str:
        return repr(self.dict())

    def dict(self) -> dict[str, Any]:
        """Return values by column: tensors without the row dimension, texts, bytes."""
        if self._found is None:
            self._found = _first(values.batch(RowSpan(self._block, self._place, self._place + 1, 1)))
        return self._found


def _first(batch: Any) -> Any:
    return {name: _first(part) if isinstance(part, dict) else part[0] for name, part in batch.items()}


def _collate(batch: Any, *, collate_fn_map: Any = None) -> Any:
    """Collate rows in a loader's default collate function, which torch lets others extend by type."""
    if isinstance(batch, Rows):
        found = batch.batch()
        if torch.utils.data.get_worker_info() is not None:
            return _shared(found)
        return found
    return collate([row.dict() if isinstance(row, Row) else row for row in batch], collate_fn_map=collate_fn_map)


def _shared(batch: Any) -> Any:
    """Copy tensors, since a worker sends the whole memory behind a view."""
    if isinstance(batch, torch.Tensor):
        return batch.clone()
    if isinstance(batch, dict):
        return {name: _shared(part) for name, part in batch.items()}
    return [_shared(part) for part in batch] if isinstance(batch, list) else batch


default_collate_fn_map[Row] = _collate
