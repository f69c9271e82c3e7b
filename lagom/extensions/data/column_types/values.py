"""``Values`` and ``Block``: columns of rows in memory, which the reader cuts, joins, shuffles and batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import numpy as np
import torch

from lagom.extensions.data.column_types import lists, types

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from numpy.typing import NDArray

    from lagom.extensions.data.column_types.reused_arrays import ReusedArrays

_PARTS = 8
"""Number of parts of a column that threads gather in parallel."""
_SMALL = 1 << 14
"""Up to this many bytes are copied with the GIL held; numpy would release the GIL, and wait to get it back."""
_MANY = 4
"""From this many columns on, each thread gathers a whole column."""

Path = tuple[str, ...]
"""The name of a column; for a field of a struct column, the names of the fields on the way follow."""


class Values(Protocol):
    """Holds rows of one column: cuts and joins them, and makes a batch's tensor of them."""

    def __len__(self) -> int: ...

    def cut(self, start: int, stop: int, step: int = 1) -> Values:
        """Return the rows ``start``, ``start + step``, ... before ``stop``; only Arrow copies, if ``step`` is not 1."""

    def batch(self) -> Any:
        """Return the rows as in the program's batch: a writable tensor, or a list if rows cannot be a tensor."""

    @staticmethod
    def joined(
        parts: Sequence[Any], index: NDArray[np.int64] | None, memory: ReusedArrays | None, pool: Executor | None = None
    ) -> Values:
        """Join all rows of ``parts``, or only the rows at ``index`` if it is not None.

        Args:
            index: numbers of rows, counted through all ``parts``.
            memory: gives memory for the copy, if not None.
            pool: threads that share the work, if not None.
        """


class Dense:
    """Rows of equal shape, in one array of shape ``(rows, ...)``.

    In a batch the array must be writable, and each row belongs to one batch only.
    """

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
            # The indices are known to be in bounds; "clip" does not check them, and is twice as fast.
            np.take(source, index, axis=0, out=out, mode="clip")

        if pool is None:
            take(index, out)
        else:
            list(pool.map(take, np.array_split(index, _PARTS), np.array_split(out, _PARTS)))
        return Dense(out)


class Nulls(Dense):
    """Rows of lists that are all null: their shape is taken from other rows, and ``fill`` replaces their numbers."""

    __slots__ = ("fill",)

    def __init__(self, array: NDArray[Any], fill: int | float) -> None:
        super().__init__(array)
        self.fill = fill

    def shaped(self, shape: tuple[int, ...]) -> Dense:
        """Return the rows filled to ``shape``, the shape of one row."""
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
    """Rows that do not fit into one numpy array (texts, bytes, lists of different lengths), kept as an Arrow array."""

    __slots__ = ("array", "finish")

    def __init__(self, array: Any, finish: Callable[[Any], Any]) -> None:
        """Keep ``array``; ``finish`` converts it to a batch's form, such as a list."""
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
    """Return the rows ``start``, ``start + step``, ... before ``stop`` of an Arrow array."""
    import pyarrow as pa

    part = array.slice(start, max(0, stop - start))
    return part if step == 1 else part.take(pa.array(np.arange(0, len(part), step)))


def gathered(arrays: Sequence[Any], index: NDArray[np.int64] | None) -> Any:
    """Join Arrow arrays; with ``index``, return only the rows at these indices."""
    import pyarrow as pa

    array = arrays[0] if len(arrays) == 1 else pa.concat_arrays(arrays)
    return array if index is None else array.take(pa.array(index))


Block = Mapping[Path, Any]
"""Columns of the same rows: ``Values`` by path."""


def num_rows(block: Block) -> int:
    """Return the number of rows of ``block``."""
    return len(next(iter(block.values())))


def cut(block: Block, start: int, stop: int, step: int = 1) -> Block:
    """Return the rows ``start``, ``start + step``, ... before ``stop`` of ``block``, cut by ``Values.cut``."""
    return {path: values.cut(start, stop, step) for path, values in block.items()}


def joined(
    blocks: Sequence[Block],
    index: NDArray[np.int64] | None = None,
    memory: ReusedArrays | None = None,
    pool: Executor | None = None,
) -> Block:
    """Join all rows of ``blocks``, or only the rows at ``index`` if it is not None, in one block.

    The rows of a column must have the same shape in all blocks.

    Args:
        index: numbers of rows, counted through all ``blocks``.
        memory: gives memory for the copy, if not None.
        pool: threads that share the work, if not None.
    """

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
        """Return the rows as a block."""
        return cut(self.block, self.start, self.stop, self.step)


def filled(span: RowSpan, constants: Mapping[str, Any]) -> RowSpan:
    """Return the rows of ``span``, with the columns in ``constants`` set to one value, and their masks to True.

    For a struct column, all fields are set to the value.

    Raises:
        ValueError: for a column that is a list in a batch, unless its new value is a text or bytes.
    """
    block = dict(span.cut())
    for path, rows in block.items():
        unmasked = (*path[:-1], path[-1].removesuffix("__valid"))
        is_mask = unmasked != path and unmasked in block
        name = unmasked[0] if is_mask else path[0]
        if name in constants:
            block[path] = _filled(path, rows, True if is_mask else constants[name])
    return RowSpan(block, 0, num_rows(block), 1)


def _filled(path: Path, rows: Any, value: Any) -> Values:
    import pyarrow as pa

    if isinstance(rows, Arrow) and isinstance(value, (str, bytes)):
        return Arrow(pa.array([value] * len(rows), rows.array.type), rows.finish)
    if isinstance(rows, Arrow) and types.is_number(rows.array.type):  # decimals and dates, for a function
        return Arrow(lists.filled(pa.nulls(len(rows), rows.array.type), value), rows.finish)
    if isinstance(rows, Dense):
        return Dense(np.full(rows.array.shape, value, rows.array.dtype))
    own = rows.batch()
    if not isinstance(own, torch.Tensor):
        raise ValueError(f"column {'.'.join(path)!r} has values of different shapes, which {value!r} cannot replace")
    return Dense(np.full(tuple(own.shape), value, own.numpy().dtype))


def batch(span: RowSpan) -> dict[str, Any]:
    """Return the program's batch of the rows: a dict of values by column, with a dict for each struct."""
    block, start, stop, step = span
    columns: dict[str, Any] = {}
    for path, values in block.items():
        if step == 1 and type(values) is Dense:  # a fast path for most columns of most tables
            rows: Any = torch.from_numpy(values.array[start:stop])
        else:
            rows = values.cut(start, stop, step).batch()
        if len(path) == 1:
            columns[path[0]] = rows
            continue
        inner = columns
        for name in path[:-1]:
            inner = inner.setdefault(name, {})
        inner[path[-1]] = rows
    return columns
