"""``counting_rows``: a module whose forward tells how many rows it gets."""

from __future__ import annotations

from typing import Any

from torch import nn


def counting_rows(kind: type[nn.Module], rows: list[int]) -> nn.Module:
    """Make a module of a subclass of ``kind`` whose forward appends its number of rows to ``rows``.

    It uses no hook, and no list that lagom can see: either would keep the module from being split.
    """
    note = rows.append

    class Noting(kind):  # type: ignore[misc, valid-type]
        def forward(self, x: Any, *args: Any) -> Any:
            note(len(x))
            return super().forward(x, *args)

    return Noting()
