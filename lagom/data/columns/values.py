"""Columns of rows in memory, as the reader moves them: cut, joined, taken, and at last made what a batch holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import numpy as np
import torch

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from numpy.typing import NDArray

    from lagom.data.decoders.reused_arrays import ReusedArrays

_PARTS = 8
"""In which rows of a column are gathered by several threads."""
_SMALL = 1 << 14
"""Bytes that are copied without giving the interpreter away, as numpy does, and having to wait for it."""
_MANY = 4
"""Columns that keep threads busy, each with one of them."""

Path = tuple[str, ...]
"""A column, or a field inside of a struct column."""


class Values(Protocol):
    """Some rows of one column."""

    def __len__(self) -> int: ...

    def cut(self, start: int, stop: int, step: int = 1) -> Values:
        """Rows ``start``, ``start + step``, ... before ``stop``."""

    def batch(self) -> Any:
        """What the program sees: a tensor, which it may write to, or a list where rows are no tensors."""

    @staticmethod
    def joined(
        parts: Sequence[Any], index: NDArray[np.int64] | None, memory: ReusedArrays | None, pool: Executor | None = None
    ) -> Values:
        """All rows of ``parts``, or those at ``index``, copied; into ``memory`` where there is one, by ``pool``."""


class Dense:
    """Rows of equal shape: an array of shape ``(rows, ...)``; once in batches, writable, and its rows only in one."""

    __slots__ = ("array",)

    def __init__(self, array: NDArray[Any]) -> None:
        self.array = array

    def __len__(self) -> int:
        return len(self.array)

    def cut(self, start: int, stop: int, step: int = 1) -> Dense:
        return Dense(self.array[start:stop:step])

    def batch(self) -> torch.Tensor:
        return torch.from_numpy(self.array if self.array.flags.c_contiguous else self.array.copy())

    @staticmethod
    def joined(
        parts: Sequence[Dense],
        index: NDArray[np.int64] | None,
        memory: ReusedArrays | None,
        pool: Executor | None = None,
    ) -> Dense:
        arrays = [part.array for part in parts]
        empty = np.empty if memory is None else memory.empty
        shape, dtype = arrays[0].shape[1:], arrays[0].dtype
        if index is None or len(arrays) > 1:
            source = _concatenated(arrays, empty((sum(map(len, arrays)), *shape), dtype))
        else:
            source = arrays[0]
        if index is None:
            return Dense(source)
        out = empty((len(index), *shape), dtype)

        def take(index: NDArray[np.int64], out: NDArray[Any]) -> None:
            # "clip" looks at no bounds, which are right: twice as fast.
            np.take(source, index, axis=0, out=out, mode="clip")

        if pool is None:
            take(index, out)
        else:
            list(pool.map(take, np.array_split(index, _PARTS), np.array_split(out, _PARTS)))
        return Dense(out)


class Nulls(Dense):
    """Rows of lists none of which is there: other rows tell their shape; ``fill`` stands for their numbers."""

    __slots__ = ("fill",)

    def __init__(self, array: NDArray[Any], fill: int | float) -> None:
        super().__init__(array)
        self.fill = fill

    def shaped(self, shape: tuple[int, ...]) -> Dense:
        """The same, each of ``shape``."""
        return Dense(np.full((len(self.array), *shape), self.fill, self.array.dtype))


def _concatenated(arrays: Sequence[NDArray[Any]], out: NDArray[Any]) -> NDArray[Any]:
    if out.ndim > 1 or out.nbytes > _SMALL:
        return np.concatenate(arrays, out=out)
    into = memoryview(cast("Any", out))
    at = 0
    for array in arrays:
        into[at : at + len(array)] = memoryview(cast("Any", array))
        at += len(array)
    return out


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
        return Arrow(sliced(self.array, start, stop, step), self.finish)

    def batch(self) -> Any:
        return self.finish(self.array)

    @staticmethod
    def joined(
        parts: Sequence[Arrow],
        index: NDArray[np.int64] | None,
        memory: ReusedArrays | None,
        pool: Executor | None = None,
    ) -> Arrow:
        return Arrow(gathered([part.array for part in parts], index), parts[0].finish)


def sliced(array: Any, start: int, stop: int, step: int) -> Any:
    """Take the rows ``start``, ``start + step``, ... before ``stop`` of an Arrow array."""
    import pyarrow as pa

    part = array.slice(start, max(0, stop - start))
    return part if step == 1 else part.take(pa.array(np.arange(0, len(part), step)))


def gathered(arrays: Sequence[Any], index: NDArray[np.int64] | None) -> Any:
    """Join Arrow arrays; with ``index`` only the rows there."""
    import pyarrow as pa

    array = arrays[0] if len(arrays) == 1 else pa.concat_arrays(arrays)
    return array if index is None else array.take(pa.array(index))


Block = Mapping[Path, Any]
"""Columns of the same rows: ``Values`` by path."""


def num_rows(block: Block) -> int:
    """How many."""
    return len(next(iter(block.values())))


def cut(block: Block, start: int, stop: int, step: int = 1) -> Block:
    """Some rows of ``block``, uncopied."""
    return {path: values.cut(start, stop, step) for path, values in block.items()}


def joined(
    blocks: Sequence[Block],
    index: NDArray[np.int64] | None = None,
    memory: ReusedArrays | None = None,
    pool: Executor | None = None,
) -> Block:
    """All rows of ``blocks``, or those at ``index``; of each column, rows in all blocks have one shape."""

    is_many = len(blocks[0]) >= _MANY

    def column(path: Path) -> Values:
        parts = [block[path] for block in blocks]
        return cast("Values", type(parts[0]).joined(parts, index, memory, None if is_many else pool))

    return dict(zip(blocks[0], (pool.map if is_many and pool is not None else map)(column, blocks[0]), strict=True))


class RowSpan(NamedTuple):
    """Rows ``start``, ``start + step``, ... before ``stop`` of a block."""

    block: Block
    start: int
    stop: int
    step: int

    def cut(self) -> Block:
        """These rows."""
        return cut(self.block, self.start, self.stop, self.step)


def batch(span: RowSpan) -> dict[str, Any]:
    """What the program sees of rows: values by column, structs as dicts in it."""
    block, start, stop, step = span
    found: dict[str, Any] = {}
    for path, values in block.items():
        if step == 1 and type(values) is Dense:  # most columns of most tables, and nothing but this takes time here
            rows: Any = torch.from_numpy(values.array[start:stop])
        else:
            rows = values.cut(start, stop, step).batch()
        if len(path) == 1:
            found[path[0]] = rows
            continue
        inner = found
        for name in path[:-1]:
            inner = inner.setdefault(name, {})
        inner[path[-1]] = rows
    return found
