"""``warn_of_programs``: warns that a program that every rank starts writes to the real disk on every rank."""

from __future__ import annotations

import functools
import logging
import os
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from lagom.patching.replace import replaced

log = logging.getLogger("lagom")

_LIBRARIES = tuple({os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "purelib", "platlib")})
_LIBRARIES += (os.path.join(str(Path(__file__).parents[1]), ""),)

_PACKAGES = frozenset(("site-packages", "dist-packages"))


@contextmanager
def warn_of_programs(knows_rank: Callable[[], bool]) -> Iterator[None]:
    """Warn once in the block when the user's code starts another program (``subprocess``, ``os.system``) on every rank.

    There is no warning if ``knows_rank`` returns True, or if a library starts the program.
    """
    told = False

    def started(original: Callable[..., Any], at: int, name: str) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal told
            if not told and not knows_rank() and _is_of_the_program():
                told = True
                log.warning(
                    "every rank runs `%s`, and what that writes goes to the real disk, from all of them at once; "
                    "if it writes, run it where lagom.rank() == 0",
                    _words(kwargs.get(name, args[at] if len(args) > at else "")),
                )
            return original(*args, **kwargs)

        return call

    with ExitStack() as stack:
        stack.enter_context(replaced(subprocess.Popen, "__init__", started(subprocess.Popen.__init__, 1, "args")))
        stack.enter_context(replaced(os, "system", started(os.system, 0, "command")))
        yield


def _is_of_the_program() -> bool:
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename in (subprocess.__file__, os.__file__):
        frame = frame.f_back
    path = frame.f_code.co_filename
    # A library may be outside of this Python, as on a PYTHONPATH: MLflow's Git runs `git version`, for example.
    return not path.startswith(_LIBRARIES) and _PACKAGES.isdisjoint(Path(path).parts)


def _words(command: Any) -> str:
    words = command if isinstance(command, (str, bytes, os.PathLike)) else shlex.join(map(os.fsdecode, command))
    return os.fsdecode(words)[:100]
