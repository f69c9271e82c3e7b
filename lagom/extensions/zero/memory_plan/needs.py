"""``MemoryPlan``: the bytes that a rank needs at each ``zero_lvl``, compared with its memory and shown as a table."""

from __future__ import annotations

import html
from dataclasses import dataclass

from lagom.available_memory import format_bytes

HEADROOM = 0.2
"""Fraction of a rank's memory that stays free for temporaries of steps, buckets and the allocator's rounding.
Measured peaks were 10 to 23% above the bytes held (``python -m benchmarks.zero_memory``)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Level:
    """Computed bytes that a rank holds at one ``zero_lvl``; figures are those of the rank that holds most."""

    zero_lvl: int
    parameters: int
    buffers: int
    gradients: int
    state: int
    """Bytes of optimizer state."""
    possible: bool
    """Whether the optimizer works at this level; at level 3, an optimizer that steps whole parameters does not."""

    @property
    def held(self) -> int:
        """Bytes held between a backward and the step, without activations."""
        return self.parameters + self.buffers + self.gradients + self.state


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """Bytes that a rank needs at each level, and the memory that it has. Prints as a table, in notebooks as HTML."""

    module: str
    optimizer: str
    shared_out: str
    """How the optimizer's state is sharded: "by element", "by whole parameter" or "not at all"."""
    num_parameters: int
    world_size: int
    levels: tuple[Level, ...]
    """The levels 0 to 3, at their own index."""
    activations: int | None
    """Bytes that the forward of the largest share keeps for the backward; None if no batch was given."""
    num_samples: int | None
    """Samples in the largest share; None if no batch was given, or no tensor in it has a first dimension."""
    memory: int
    """Bytes that a rank may use."""
    where: str
    """Origin of ``memory``, for the report, such as "of its GPU"."""

    def needed(self, zero_lvl: int) -> int:
        """Return the bytes that a rank needs at the level, with activations and gradients alive at the same time."""
        return self.levels[zero_lvl].held + (self.activations or 0)

    def fits(self, zero_lvl: int) -> bool:
        """Return whether the level leaves a fifth of the memory free for temporaries."""
        return self.needed(zero_lvl) <= self.memory * (1 - HEADROOM)

    @property
    def zero_lvl(self) -> int | None:
        """The lowest level that fits, which is the fastest; None if no level fits."""
        return next((one.zero_lvl for one in self.levels if one.possible and self.fits(one.zero_lvl)), None)

    def __repr__(self) -> str:
        rows = [_HEAD, *(self._row(one) for one in self.levels)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(_HEAD))]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        return "\n".join([self._title(), *lines, self._verdict()])

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{html.escape(cell)}</th>" for cell in _HEAD)
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in self._row(one)) + "</tr>"
            for one in self.levels
        )
        return (
            f"<table><caption style='text-align:left'><b>{html.escape(self._title())}</b><br>"
            f"{html.escape(self._verdict())}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        )

    def _row(self, one: Level) -> tuple[str, ...]:
        parts = (one.parameters, one.buffers, one.gradients, one.state, self.activations)
        fits = ("yes" if self.fits(one.zero_lvl) else "no") if one.possible else f"not with {self.optimizer}"
        return str(one.zero_lvl), *map(format_bytes, parts), format_bytes(self.needed(one.zero_lvl)), fits

    def _title(self) -> str:
        batch = "" if self.num_samples is None else f", {self.num_samples} samples each"
        return (
            f"{self.module}, {self.num_parameters / 1e6:,.1f} million parameters, {self.optimizer} "
            f"(state shared out {self.shared_out}), {self.world_size} ranks{batch}: bytes on a rank"
        )

    def _verdict(self) -> str:
        left = "" if self.activations is not None else "; activations are not in it: give batch="
        room = f"a rank has {format_bytes(self.memory)} ({self.where}){left}"
        if (level := self.zero_lvl) is not None:
            return f"zero_lvl={level} fits: {room}"
        lowest = min(self.needed(one.zero_lvl) for one in self.levels if one.possible)
        return (
            f"nothing fits: at least {format_bytes(int(lowest / (1 - HEADROOM)))} are wanted, and {room}; take more "
            "ranks, smaller batches, mixed_precision, or larger machines"
        )


_HEAD = ("zero_lvl", "parameters", "buffers", "gradients", "state", "activations", "in all", "fits")
