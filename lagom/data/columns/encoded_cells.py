"""Columns whose rows are arrays, of many shapes or not decoded yet, as the reader moves them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lagom.data.columns import values
from lagom.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Executor

    from numpy.typing import NDArray

    from lagom.data.decoders.reused_arrays import ReusedArrays


class CellColumn:
    """An array for each row, or None for a null."""

    __slots__ = ("cells", "dtype", "name", "ragged", "shape")

    def __init__(
        self,
        cells: Sequence[NDArray[Any] | None],
        ragged: str,
        name: str,
        shape: tuple[int, ...] | None,
        dtype: np.dtype[Any],
    ) -> None:
        """``shape`` is that of every row, None where they differ; ``ragged`` says what a batch has then."""
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
        """The rows as one array; nulls are zeros.

        Raises:
            DataError: when they have different shapes, and nothing was said about that.
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
                out[row][tuple(slice(size) for size in cell.shape)] = cell
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
    """Cells that are not decoded yet, and where they come from."""

    __slots__ = ("array", "decoder", "origins")

    def __init__(
        self, array: Any, origins: NDArray[np.int64], decoder: Callable[[Any, NDArray[np.int64]], CellColumn]
    ) -> None:
        self.array = array
        self.origins = origins
        self.decoder = decoder

    def __len__(self) -> int:
        return len(self.array)

    def cut(self, start: int, stop: int, step: int = 1) -> Encoded:
        part = values.sliced(self.array, start, stop, step)
        return Encoded(part, self.origins[start:stop:step], self.decoder)

    def decoded(self) -> CellColumn:
        """The arrays."""
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
