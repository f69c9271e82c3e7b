"""``ShuffleWindow``: shuffles one window of rows of each stream while they are decoded. See Note [Wide rows]."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np

from lagom.extensions.data.column_types import values
from lagom.extensions.data.column_types.values import Dense

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Executor

    from numpy.typing import NDArray

    from lagom.extensions.data.column_types.reused_arrays import ReusedArrays
    from lagom.extensions.data.column_types.values import Block, Path

_WIDE = 128
"""Rows of at least this many bytes are wide: they are copied to their places one by one."""


class ShuffleWindow:
    """Collects decoded rows from several threads, and returns them in shuffled order."""

    def __init__(self, index: NDArray[np.int64], memory: ReusedArrays) -> None:
        """Make a window.

        Args:
            index: number of the row for each place of the new order.
        """
        self._index = index
        self._memory = memory
        self._lock = threading.Lock()
        self._places: NDArray[np.int64] | None = None
        self._wide: dict[Path, NDArray[Any]] = {}

    def put(self, block: Block, first: int) -> Block:
        """Copy the wide columns of rows ``first``, ``first + 1``, ... to their places; return the other columns."""
        rest = {}
        for path, rows in block.items():
            if _is_wide(rows):
                out, places = self._column(path, rows.array)
                out[places[first : first + len(rows)]] = _cells(rows.array)
            else:
                rest[path] = rows
        return rest

    def block(self, paths: Sequence[Path], rests: Sequence[Block], pool: Executor) -> Block:
        """Return all rows in the new order.

        Args:
            paths: the columns, in the wanted order.
            rests: the results of ``put``, in the order of the rows' numbers.
        """
        rest = values.joined(rests, self._index, self._memory, pool) if rests[0] else {}
        return {path: Dense(self._wide[path]) if path in self._wide else rest[path] for path in paths}

    def _column(self, path: Path, like: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Return the cells of a wide column, and the place of each row."""
        with self._lock:
            if self._places is None:
                self._places = np.empty_like(self._index)
                self._places[self._index] = np.arange(len(self._index))
            if path not in self._wide:
                self._wide[path] = self._memory.empty((len(self._index), *like.shape[1:]), like.dtype)
            return _cells(self._wide[path]), self._places


def _is_wide(rows: Any) -> TypeGuard[Dense]:
    return type(rows) is Dense and rows.array[0].nbytes >= _WIDE


def _cells(array: NDArray[Any]) -> NDArray[Any]:
    """Return a view in which each row is one cell of bytes."""
    flat = array.reshape(len(array), -1)
    return flat.view(np.dtype((np.void, flat.shape[1] * flat.itemsize)))[:, 0]


# Note [Wide rows]
#
# Shuffling copies rows. Columns with rows of a few bytes are joined and then gathered: the result is written in order,
# and the reads come from the cache. A row of 128 bytes or more fills cache lines of its own in any case. So the thread
# that has just decoded a wide row copies it to its place at once: for 26 MB in lists of 64 floats, this takes 2.4 ms in
# two threads, and joining and gathering 4.1 ms.
