"""``RowPlace``: where a tensor has its rows, if not in the first dimension. See Note [Other dimensions]."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from lagom.inspection.reads import is_tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    Shape = tuple[int, ...]


class RowPlace(NamedTuple):
    """The dimension that has the rows of the batch."""

    dim: int
    is_inner: bool = False
    """Whether the dimension counts the rows once for each step, one step after the other."""

    def fits(self, value: Any, rows: int) -> bool:
        """Return whether ``value`` can have the rows here."""
        if not is_tensor(value) or value.dim() <= self.dim:
            return False
        return bool(value.shape[0] % rows == 0 if self.is_inner else value.shape[self.dim] == rows)

    def bring_first(self, tensor: Tensor, rows: int) -> Tensor:
        """Return a view of ``tensor`` with the rows in its first dimension."""
        if self.is_inner:
            return tensor.unflatten(0, (-1, rows)).transpose(0, 1)  # type: ignore[no-any-return]
        return tensor.movedim(self.dim, 0)

    def put_back(self, tensor: Tensor) -> Tensor:
        """Return ``tensor``, whose first dimension has the rows, as ``bring_first`` got it."""
        return tensor.transpose(0, 1).flatten(0, 1) if self.is_inner else tensor.movedim(0, self.dim)


def find_places(
    wholes: Sequence[Shape | None], parts: Sequence[Shape | None], rows: int, part_rows: int, *, is_turned: bool
) -> list[RowPlace | None]:
    """Return where each output has its rows, from its shapes for the whole batch and for a part of it.

    None for an output that has them in the first dimension, or nowhere.

    Args:
        is_turned: whether the input has the rows in the second dimension, and the steps in the first.
    """
    if len(wholes) != len(parts):
        return []
    return [_find_place(*shapes, rows, part_rows, is_turned) for shapes in zip(wholes, parts, strict=True)]


def _find_place(whole: Shape | None, part: Shape | None, rows: int, part_rows: int, is_turned: bool) -> RowPlace | None:
    if whole is None or part is None or len(whole) != len(part):
        return None
    dims = [dim for dim in range(len(whole)) if whole[dim] != part[dim]]
    if len(dims) != 1:
        return None
    (dim,) = dims
    if dim:
        return RowPlace(dim) if (whole[dim], part[dim]) == (rows, part_rows) else None
    has_steps = is_turned and whole[0] > rows and whole[0] % rows == 0 and part[0] % part_rows == 0
    return RowPlace(0, is_inner=True) if has_steps else None


# Note [Other dimensions]
#
# Recurrent and spiking networks often have the steps in the first dimension, and the rows of the batch in the second.
# All else of lagom cuts and gathers the first dimension. So tensors are turned when they come out of a forward, and
# turned back before the program gets them. A module's first call, and its call on a part of the batch, show in which
# dimension an output has the rows: its size is another. An input is turned only if the first dimension did not do: a
# probe of the first dimension has failed, and one of the second then succeeds. The same checks hold for both. A probe
# of the second dimension turns all inputs whose second dimension is as long as that of the first tensor. If the sizes
# of a later call would turn others, it runs whole.
