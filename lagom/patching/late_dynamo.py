"""``put_off_dynamo``: delays the import of torch's compiler from an optimizer's first step to the first compilation."""

from __future__ import annotations

import importlib
import importlib.util
import mmap
import os
import sys
import threading
import weakref
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from lagom.patching.import_hooks import on_import
from lagom.patching.replace import originals

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_NAME = "torch._dynamo"


def put_off_dynamo() -> None:
    """Put a stand-in in the place of ``torch._dynamo``, if the package is not imported yet. See Note [Dynamo]."""
    if _NAME not in sys.modules:
        sys.modules[_NAME] = vars(torch)["_dynamo"] = _LateDynamo()


def import_dynamo_if_used() -> bool:
    """Import Dynamo for later forks, if a process forked from this one did; return whether it was imported now."""
    stand_in = sys.modules[_NAME]
    if not isinstance(stand_in, _LateDynamo) or not stand_in.used[0]:
        return False
    stand_in.load()
    return True


def remember_torch_functions() -> None:
    """Make Dynamo, if imported, build its table of torch's functions now; a later table would contain lagom's."""
    rules: Any = sys.modules.get(f"{_NAME}.trace_rules")
    if rules is not None:  # otherwise the import builds the table; torch.distributed may have cleared it since
        with originals("torch"):
            rules.get_torch_obj_rule_map()


def num_compilations() -> int:
    """Return how many functions and loops Dynamo has compiled, or tried to compile, in this process."""
    dynamo: Any = sys.modules.get(f"{_NAME}.convert_frame")
    return 0 if dynamo is None else dynamo.FRAME_COUNTER


def set_deterministic(enabled: bool, warn_only: bool) -> None:
    """Call ``torch.use_deterministic_algorithms`` only if it changes a setting, since it imports Dynamo."""
    now = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    if now != (enabled, warn_only):
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)


@contextmanager
def at_compilation(callback: Callable[..., None]) -> Iterator[None]:
    """Context manager in which ``callback`` is called at the start of each compilation.

    torch 2.6 calls it without an argument, later versions with one.
    """
    name = f"{_NAME}.callback"
    with on_import({name: lambda module: module.callback_handler.register_start_callback(callback)}):
        try:
            yield
        finally:
            if name in sys.modules:
                sys.modules[name].callback_handler.remove_start_callback(callback)


class _LateDynamo(ModuleType):
    """Stand-in with the functions of ``torch._dynamo`` that uncompiled code calls; other names import the package."""

    def __init__(self) -> None:
        super().__init__(_NAME)
        spec = importlib.util.find_spec(_NAME)
        self.__file__ = spec.origin if spec is not None else None
        self.used = _shared_byte()
        """Memory of one byte, 1 once this process or one forked from it has imported the package."""
        self._lock = threading.RLock()
        self._enabled = weakref.WeakSet[Any]()
        """Functions that ``disable`` has returned unchanged, although torch asked to run them without Dynamo."""

    def graph_break(self, *_: object) -> None:
        """Do nothing, since no graph is being traced."""

    def disable(self, *args: Any, **kwargs: Any) -> Any:
        """Return the function unchanged to ``torch._disable_dynamo``, which keeps the result in the function.

        For other callers, import the package and call its ``disable``.
        """
        if sys._getframe(1).f_globals["__name__"] != "torch._compile":
            return self.load().disable(*args, **kwargs)
        self._enabled.add(args[0])
        return args[0]

    def __getattr__(self, name: str) -> Any:
        if name == "trace_rules" and sys._getframe(1).f_globals["__name__"].startswith("torch.distributed."):
            return SimpleNamespace(clear_lru_cache=lambda: None)
        if name.startswith("__") and name != "__path__":  # ``inspect`` and others read such names of every module
            raise AttributeError(name)
        return getattr(self.load(), name)

    def load(self) -> Any:
        """Import the package in place of this object, and return it."""
        self.used[0] = 1
        with self._lock:
            if sys.modules.get(_NAME) is self:
                del sys.modules[_NAME], vars(torch)["_dynamo"]
                with originals("torch"):  # Dynamo makes tables of torch's functions, which must not contain lagom's
                    importlib.import_module(_NAME).trace_rules.get_torch_obj_rule_map()
                for function in self._enabled:
                    vars(function).pop("__dynamo_disable", None)
        return sys.modules[_NAME]


def _shared_byte() -> mmap.mmap:
    """Return memory of one byte that this process shares with the processes forked from it."""
    try:
        file = os.memfd_create("lagom")  # the name distinguishes it from memory that a program shares with its workers
    except (AttributeError, OSError):  # the system has no memfd, or a container forbids it
        return mmap.mmap(-1, 1)
    os.ftruncate(file, 1)
    _never_freed.append(mmap.mmap(file, 1))
    os.close(file)
    return _never_freed[-1]


_never_freed: list[mmap.mmap] = []
"""Maps that must not be freed: freeing one closes its descriptor, whose number may be another file's in a rank."""


# Note [Dynamo]
#
# The first step of an optimizer imports torch._dynamo, 800 modules that take a third of the time of the first call of a
# run. But an uncompiled program calls only two functions of it: one that breaks the graph under compilation, of which
# there is none, and one that excludes functions from compilation. The stand-in has these two. It is made in the fork
# server, from which all ranks descend. A rank imports the package when its program first compiles, or uses another name
# of the package. At that time torch's functions are replaced by lagom's, so torch's own are restored during the import.
# After the run the fork server imports the package as well, for the ranks of the next run.
