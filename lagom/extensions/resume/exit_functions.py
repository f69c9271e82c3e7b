"""``ExitFunctions``: functions that a program has registered with ``atexit``, which does not list them."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lagom.patching.replace import replaced
from lagom.program.sources import is_installed


class ExitFunctions:
    """The functions that the program itself has registered, with their arguments; libraries register theirs again."""

    def __init__(self) -> None:
        self.registered: list[tuple[Callable[..., Any], Sequence[Any], dict[str, Any]]] = []

    @contextmanager
    def noticed(self) -> Iterator[None]:
        """Note the functions that the program registers in the block, and forget those that it unregisters."""
        register, unregister = atexit.register, atexit.unregister

        def note(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Callable[..., Any]:
            caller = sys._getframe(1)
            module = caller.f_globals.get("__name__", "").partition(".")[0]
            if module != "lagom" and not is_installed(caller.f_code.co_filename):
                self.registered.append((function, args, kwargs))
            return register(function, *args, **kwargs)

        def forget(function: Callable[..., Any], /) -> None:
            self.registered = [one for one in self.registered if one[0] != function]
            unregister(function)

        with replaced(atexit, "register", note), replaced(atexit, "unregister", forget):
            yield

    def restore(self, registered: Sequence[Any]) -> None:
        """Register the functions that another process has noted."""
        self.registered = list(registered)
        for function, args, kwargs in registered:
            atexit.register(function, *args, **kwargs)
