"""``position_of``: the loop or the call that a frame of the program is at, by its place in the source."""

from __future__ import annotations

import ast
import dis
import itertools
import types
from dataclasses import dataclass

from lagom.extensions.resume.source_code import SourceFile, Span

_CACHE = dis.opmap.get("CACHE", -1)


class NoSnapshotError(Exception):
    """Says in a few words why no snapshot can be taken at this place."""


@dataclass(frozen=True, slots=True)
class FramePosition:
    """Place in a function: a loop that is about to take its next item, or a call in progress."""

    file: str
    function: str
    first_line: int
    is_loop: bool
    where: Span

    def node(self, source: SourceFile) -> ast.For | ast.Call | None:
        """Return the loop or the call in ``source``; None if there is none at this place."""
        return source.loop_at(self.where) if self.is_loop else source.call_at(self.where)


def position_of(frame: types.FrameType, source: SourceFile) -> FramePosition:
    """Return the position of ``frame``, a function of ``source``.

    Raises:
        NoSnapshotError: if it is at neither a loop nor a call, is inside of a comprehension, or has no positions.
    """
    code, at = frame.f_code, frame.f_lasti
    while code.co_code[at] == _CACHE:  # during a call of a Python function, ``f_lasti`` is in the call's cache
        at -= 2
    name = dis.opname[code.co_code[at]]
    line, end_line, column, end_column = next(itertools.islice(code.co_positions(), at // 2, None))
    is_loop = name.startswith("FOR_ITER")
    if line is None or end_line is None or column is None or end_column is None:
        raise NoSnapshotError("Python was told to leave positions out of its code (-X no_debug_ranges)")
    if not (is_loop or name.startswith(("CALL", "PRECALL"))):  # in 3.11 a specialised PRECALL calls C
        raise NoSnapshotError(f"{place_of(frame)} is neither at a call nor at a loop")
    where = line, column, end_line, end_column
    position = FramePosition(code.co_filename, code.co_name, code.co_firstlineno, is_loop, where)
    if position.node(source) is None:
        raise NoSnapshotError(f"{place_of(frame)} is inside of a comprehension or another expression")
    return position


def place_of(frame: types.FrameType) -> str:
    """Name the line that ``frame`` is at."""
    return f"{frame.f_code.co_name} ({frame.f_code.co_filename}:{frame.f_lineno})"
