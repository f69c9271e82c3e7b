"""``cut_own_frames``: removes lagom's frames from the traceback of a program's error, as if torch were not patched."""

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
"""Files of torch whose frames are next to lagom's: they call lagom's dispatch modes and uncompiled functions."""


def cut_own_frames(error: BaseException) -> None:
    """Remove lagom's frames from the tracebacks of ``error``, its causes, its contexts and the members of a group.

    Frames of torch next to them are removed too (``_AROUND_MODES``). The innermost frames of lagom stay if the mistake
    is lagom's own. If all frames are lagom's, all stay, unless the cause shows the traceback of a rank.
    """
    waiting, seen = [error], set[int]()
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        one.__traceback__ = _cut(one)
        waiting += [each for each in (one.__cause__, one.__context__) if each is not None]
        waiting += getattr(one, "exceptions", ())  # an ExceptionGroup has this attribute


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
    """Return the entries of ``trace``, and for each whether it is lagom's, or in ``_AROUND_MODES`` next to lagom's."""
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

    It did not if the frame called a function in C, such as torch's own function behind a patch, or if it raised the
    error deliberately: the text of such an error says everything. A failed assertion is always a mistake.
    """
    steps = dis.get_instructions(part.tb_frame.f_code)
    name = next((step.opname for step in steps if step.offset == part.tb_lasti), "")
    return isinstance(error, AssertionError) or not ("CALL" in name or "RAISE" in name)
