"""``jumping_clocks``: clocks that jump between two reads, so that a rehearsal shows which values depend on time."""

from __future__ import annotations

import os
import sys
import sysconfig
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lagom.patching.replace import replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_CLOCKS = ("time", "perf_counter", "monotonic", "process_time", "thread_time")
_JUMP_NS = 4_321_987_654_321
"""More than an hour, and no whole number of any unit."""
_LIBRARIES = (
    *{sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")},
    str(Path(__file__).parents[3]) + os.sep,
    "<frozen ",
)


@contextmanager
def jumping_clocks() -> Iterator[None]:
    """Let clocks of the module ``time`` jump ahead whenever the program, not a library, reads one."""
    num_looks = 0

    def ahead() -> int:
        nonlocal num_looks
        if sys._getframe(2).f_code.co_filename.startswith(_LIBRARIES):
            return 0
        num_looks += 1
        return num_looks * _JUMP_NS

    def clock(name: str, unit: float) -> Callable[[], Any]:
        read, kind = before[name], int if name.endswith("_ns") else float
        return lambda: read() + kind(ahead() / unit)

    def date(name: str, position: int) -> Callable[..., Any]:
        make, takes_seconds = before[name], name in ("localtime", "gmtime", "ctime")

        def dated(*args: Any) -> Any:
            if len(args) > position:
                return make(*args)
            seconds = before["time"]() + ahead() / 1e9
            return make(*args, seconds if takes_seconds else before["localtime"](seconds))

        return dated

    before = dict(vars(time))
    with ExitStack() as stack:
        for name in _CLOCKS:
            stack.enter_context(replaced(time, name, clock(name, 1e9)))
            stack.enter_context(replaced(time, f"{name}_ns", clock(f"{name}_ns", 1)))
        for name, position in (("localtime", 0), ("gmtime", 0), ("ctime", 0), ("asctime", 0), ("strftime", 1)):
            stack.enter_context(replaced(time, name, date(name, position)))
        yield
