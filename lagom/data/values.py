"""Columns of rows in memory, as the reader moves them: cut, joined, taken, and at last made what a batch holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray

Path = tuple[str, ...]
"""A column, or a field inside of a struct column."""


class Values(Protocol):
    """Some rows of one column."""

    def __len__(self) -> int: ...

    def cut(self, start: int, stop: int, step: int = 1) -> Values:
        """Rows ``start``, ``start + step``, ... before ``stop``."""

    def batch(self) -> Any:
        """What the program sees: a tensor, or a list where rows are no tensors."""

    @staticmethod
    def joined(parts: Sequence[Any], index: NDArray[np.int64] | None) -> Values:
        """All rows of ``parts``, or those at ``index``, in memory of their own."""


class Dense:
    """Rows of equal shape: an array of shape ``(rows, ...)``."""

    __slots__ = ("array",)

    def __init__(self, array: NDArray[Any]) -> None:
        self.array = array

    def __len__(self) -> int:
        return len(self.array)

    def cut(self, start: int, stop: int, step: int = 1) -> Dense:
        return Dense(self.array[start:stop:step])

    def batch(self) -> torch.Tensor:
        # A view, where that is possible: nobody else has these rows, so the program may write to it.
        array = self.array
        if not (array.flags.c_contiguous and array.flags.writeable):
            array = array.copy()
        return torch.from_numpy(array)

    @staticmethod
    def joined(parts: Sequence[Dense], index: NDArray[np.int64] | None) -> Dense:
        arrays = [part.array for part in parts]
        if index is None:
            return Dense(np.concatenate(arrays))
        source = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
        # "clip" looks at no bounds, which are right: twice as fast.
        out = np.empty((len(index), *source.shape[1:]), source.dtype)
        np.take(source, index, axis=0, out=out, mode="clip")
        return Dense(out)


class Arrow:
    """Rows that lie in no array: texts, bytes, lists of many lengths; an Arrow array until they are in a batch."""

    __slots__ = ("array", "finish")

    def __init__(self, array: Any, finish: Callable[[Any], Any]) -> None:
        """``finish`` makes of an Arrow array what a batch holds."""
        self.array = array
        self.finish = finish

    def __len__(self) -> int:
        return len(self.array)

    def cut(self, start: int, stop: int, step: int = 1) -> Arrow:
        import pyarrow as pa

        part = self.array.slice(start, max(0, stop - start))
        return Arrow(part if step == 1 else part.take(pa.array(np.arange(0, len(part), step))), self.finish)

    def batch(self) -> Any:
        return self.finish(self.array)

    @staticmethod
    def joined(parts: Sequence[Arrow], index: NDArray[np.int64] | None) -> Arrow:
        import pyarrow as pa

        array = parts[0].array if len(parts) == 1 else pa.concat_arrays([part.array for part in parts])
        return Arrow(array if index is None else array.take(pa.array(index)), parts[0].finish)


Block = Mapping[Path, Any]
"""Columns of the same rows: ``Values`` by path."""


def num_rows(block: Block) -> int:
    """How many."""
    return len(next(iter(block.values())))


def cut(block: Block, start: int, stop: int, step: int = 1) -> Block:
    """Some rows of ``block``, uncopied."""
    return {path: values.cut(start, stop, step) for path, values in block.items()}


def joined(blocks: Sequence[Block], index: NDArray[np.int64] | None = None) -> Block:
    """All rows of ``blocks``, or those at ``index``; of each column, rows in all blocks have one shape."""
    return {path: type(first).joined([block[path] for block in blocks], index) for path, first in blocks[0].items()}


def batch(block: Block) -> dict[str, Any]:
    """What the program sees of ``block``: values by column, structs as dicts in it."""
    found: dict[str, Any] = {}
    for path, values in block.items():
        inner = found
        for name in path[:-1]:
            inner = inner.setdefault(name, {})
        inner[path[-1]] = values.batch()
    return found
