"""``cut_own_frames``: leave lagom's frames out of tracebacks of a program's error, as if torch had not been patched."""

from __future__ import annotations

import dis
import os
import types
from pathlib import Path

from lagom.errors import RankTraceback

_HOME = str(Path(__file__).parents[1]) + os.sep
_AROUND_MODES = tuple(
    os.path.join("torch", *path) for path in (("_compile.py",), ("_dynamo", "eval_frame.py"), ("_ops.py",))
)
"""Files of torch between an operation and a mode that sees it, and between the mode and what it calls."""


def cut_own_frames(error: BaseException) -> None:
    """Leave lagom's frames out of the tracebacks of ``error`` and of the errors that it came from.

    The last ones stay if the mistake is lagom's, and all of them where there are no others: the error arose in lagom.
    """
    waiting, seen = [error], set[int]()
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        one.__traceback__ = _cut(one)
        waiting += [each for each in (one.__cause__, one.__context__) if each is not None]
        waiting += getattr(one, "exceptions", ())  # of an ExceptionGroup


def _cut(error: BaseException) -> types.TracebackType | None:
    parts, own = _parts(error.__traceback__)
    if all(own):
        return None if isinstance(error.__cause__, RankTraceback) else error.__traceback__
    last = parts[len(own) - own[::-1].index(False) :]
    kept = [part for part, is_own in zip(parts, own, strict=True) if not is_own]
    trace = None
    for part in reversed(kept + (last if last and _is_mistake(error, last[-1]) else [])):
        trace = types.TracebackType(trace, part.tb_frame, part.tb_lasti, part.tb_lineno)
    return trace


def _parts(trace: types.TracebackType | None) -> tuple[list[types.TracebackType], list[bool]]:
    """Return the frames of a traceback, and whether each is lagom's or of a mode of lagom's."""
    parts = []
    while trace is not None:
        parts.append(trace)
        trace = trace.tb_next
    files = [part.tb_frame.f_code.co_filename for part in parts]
    own = [file.startswith(_HOME) for file in files]
    for order in (1, -1):
        before = False
        for number in range(len(files))[::order]:
            before = own[number] = own[number] or (before and files[number].endswith(_AROUND_MODES))
    return parts, own


def _is_mistake(error: BaseException, part: types.TracebackType) -> bool:
    """Return whether ``error`` arose from a mistake in lagom's frame ``part``.

    It did not where lagom called what is written in C, such as torch's own function behind a patch, and where it
    raised an error of its choice, whose text says everything.
    """
    steps = dis.get_instructions(part.tb_frame.f_code)
    name = next((step.opname for step in steps if step.offset == part.tb_lasti), "")
    return isinstance(error, AssertionError) or not ("CALL" in name or "RAISE" in name)
