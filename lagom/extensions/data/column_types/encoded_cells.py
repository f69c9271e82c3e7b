"""Columns whose rows are arrays of different shapes (``CellColumn``) or are not decoded yet (``Encoded``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lagom.errors import DataError
from lagom.extensions.data.column_types import values

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Executor

    from numpy.typing import NDArray

    from lagom.extensions.data.column_types.reused_arrays import ReusedArrays


class CellColumn:
    """A column with one array for each row, or None for a null."""

    __slots__ = ("cells", "dtype", "name", "ragged", "shape")

    def __init__(
        self,
        cells: Sequence[NDArray[Any] | None],
        ragged: str,
        name: str,
        shape: tuple[int, ...] | None,
        dtype: np.dtype[Any],
    ) -> None:
        """Make a column of ``cells``.

        Args:
            ragged: how a batch shows cells of different shapes: "error", "pad" or "list".
            name: the column's name, for errors.
            shape: shape of every cell; None if shapes may differ.
            dtype: type of the column if all cells are null.
        """
        self.cells = cells
        self.ragged = ragged
        self.name = name
        self.shape = shape
        self.dtype = dtype

    def __len__(self) -> int:
        return len(self.cells)

    def cut(self, start: int, stop: int, step: int = 1) -> CellColumn:
        return CellColumn(self.cells[start:stop:step], self.ragged, self.name, self.shape, self.dtype)

    def batch(self) -> Any:
        if self.shape is None and self.ragged == "list":
            return [None if cell is None else torch.from_numpy(cell.copy()) for cell in self.cells]
        return torch.from_numpy(self.dense())

    def dense(self) -> NDArray[Any]:
        """Return the rows as one array, with zeros for nulls and, if ``ragged`` is "pad", after the ends of cells.

        Raises:
            DataError: if cells have different shapes and ``ragged`` is not "pad", or all cells are null and no shape is
                known.
        """
        there = [cell for cell in self.cells if cell is not None]
        shapes = {cell.shape for cell in there}
        if not there:
            if self.shape is None:
                raise DataError(f"column {self.name!r}: all cells of a batch are null, so that their shape is unknown")
            return np.zeros((len(self.cells), *self.shape), self.dtype)
        if len(shapes) > 1 and self.ragged != "pad":
            raise DataError(
                f"column {self.name!r} has cells of the shapes {min(shapes)} and {max(shapes)} in a batch; ragged= may "
                'be "pad" (with zeros) or "list" (a list of tensors), or have a transform make them equal'
            )
        whole = tuple(max(sizes) for sizes in zip(*shapes, strict=True))
        if len(shapes) == 1 and len(there) == len(self.cells):
            return np.stack(there)
        out = np.zeros((len(self.cells), *whole), there[0].dtype)
        for row, cell in enumerate(self.cells):
            if cell is not None:
                out[row, ...][tuple(slice(size) for size in cell.shape)] = cell
        return out

    @staticmethod
    def joined(
        parts: Sequence[CellColumn],
        index: NDArray[np.int64] | None,
        memory: ReusedArrays | None,
        pool: Executor | None = None,
    ) -> CellColumn:
        cells = [cell for part in parts for cell in part.cells]
        first = parts[0]
        taken = cells if index is None else [cells[place] for place in index]
        return CellColumn(taken, first.ragged, first.name, first.shape, first.dtype)


class Encoded:
    """A column of cells that are not decoded yet, with their origins for errors."""

    __slots__ = ("array", "decoder", "origins")

    def __init__(
        self, array: Any, origins: NDArray[np.int64], decoder: Callable[[Any, NDArray[np.int64]], CellColumn]
    ) -> None:
        """Make a column of the cells in the Arrow array ``array``; ``Where.origins`` makes ``origins``."""
        self.array = array
        self.origins = origins
        self.decoder = decoder

    def __len__(self) -> int:
        return len(self.array)

    def cut(self, start: int, stop: int, step: int = 1) -> Encoded:
        part = values.sliced(self.array, start, stop, step)
        return Encoded(part, self.origins[start:stop:step], self.decoder)

    def decoded(self) -> CellColumn:
        """Decode the cells into arrays."""
        return self.decoder(self.array, self.origins)

    def batch(self) -> Any:
        return self.decoded().batch()

    @staticmethod
    def joined(
        parts: Sequence[Encoded],
        index: NDArray[np.int64] | None,
        memory: ReusedArrays | None,
        pool: Executor | None = None,
    ) -> Encoded:
        array = values.gathered([part.array for part in parts], index)
        origins = np.concatenate([part.origins for part in parts])
        return Encoded(array, origins if index is None else origins[index], parts[0].decoder)
