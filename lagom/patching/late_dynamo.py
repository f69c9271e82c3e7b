"""``put_off_dynamo``: import torch's compiler when a program compiles, and not at each optimizer's first step."""

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
    """Have torch use a stand-in for ``torch._dynamo`` until something needs the package itself. See Note [Dynamo]."""
    if _NAME not in sys.modules:
        sys.modules[_NAME] = vars(torch)["_dynamo"] = _LateDynamo()


def import_dynamo_if_used() -> bool:
    """Import Dynamo here if a process forked from this one has had to, for those forked later; return whether so."""
    stand_in = sys.modules[_NAME]
    if not isinstance(stand_in, _LateDynamo) or not stand_in.used[0]:
        return False
    stand_in.load()
    return True


def remember_torch_functions() -> None:
    """Have Dynamo look up torch's functions by name now: it takes any function found later for torch's own."""
    rules: Any = sys.modules.get(f"{_NAME}.trace_rules")
    if rules is not None:  # else this is done on import; torch.distributed undoes it
        with originals("torch"):
            rules.get_torch_obj_rule_map()


def set_deterministic(enabled: bool, warn_only: bool) -> None:
    """Call ``torch.use_deterministic_algorithms``, which imports Dynamo, unless that would change nothing."""
    now = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    if now != (enabled, warn_only):
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)


@contextmanager
def at_compilation(callback: Callable[..., None]) -> Iterator[None]:
    """Call ``callback`` at the start of each compilation, with no argument in torch 2.6, else with one."""
    name = f"{_NAME}.callback"
    with on_import({name: lambda module: module.callback_handler.register_start_callback(callback)}):
        try:
            yield
        finally:
            if name in sys.modules:
                sys.modules[name].callback_handler.remove_start_callback(callback)


class _LateDynamo(ModuleType):
    """Does what torch's uncompiled code asks of ``torch._dynamo``; reading anything else imports the package."""

    def __init__(self) -> None:
        super().__init__(_NAME)
        spec = importlib.util.find_spec(_NAME)
        self.__file__ = spec.origin if spec is not None else None
        self.used = _shared_byte()
        """1 once a process forked from this one has imported the package."""
        self._lock = threading.RLock()
        self._enabled = weakref.WeakSet[Any]()
        """Functions that torch believes to run without Dynamo."""

    def graph_break(self, *_: object) -> None:
        """Do nothing, since no graph is being traced."""

    def disable(self, *args: Any, **kwargs: Any) -> Any:
        """Return the function as it is to ``torch._disable_dynamo``, which keeps the result as an attribute of it."""
        if sys._getframe(1).f_globals["__name__"] != "torch._compile":
            return self.load().disable(*args, **kwargs)
        self._enabled.add(args[0])
        return args[0]

    def __getattr__(self, name: str) -> Any:
        if name == "trace_rules" and sys._getframe(1).f_globals["__name__"].startswith("torch.distributed."):
            return SimpleNamespace(clear_lru_cache=lambda: None)
        if name.startswith("__") and name != "__path__":  # asked of every module, by ``inspect`` and others
            raise AttributeError(name)
        return getattr(self.load(), name)

    def load(self) -> Any:
        """Import the package in place of this object, and return it."""
        self.used[0] = 1
        with self._lock:
            if sys.modules.get(_NAME) is self:
                del sys.modules[_NAME], vars(torch)["_dynamo"]
                with originals("torch"):  # Dynamo has tables of torch's functions, and must not find lagom's there
                    importlib.import_module(_NAME).trace_rules.get_torch_obj_rule_map()
                for function in self._enabled:
                    vars(function).pop("__dynamo_disable", None)
        return sys.modules[_NAME]


def _shared_byte() -> mmap.mmap:
    """Return a byte that this process shares with those forked from it."""
    try:
        file = os.memfd_create("lagom")  # by this name it is told from memory that a program shares with its workers
    except (AttributeError, OSError):  # the system has none, or a container forbids it
        return mmap.mmap(-1, 1)
    os.ftruncate(file, 1)
    _never_freed.append(mmap.mmap(file, 1))
    os.close(file)
    return _never_freed[-1]


_never_freed: list[mmap.mmap] = []
"""Maps that must stay: freeing one closes its descriptor, which in a forked rank may be that of another file."""


# Note [Dynamo]
#
# The first step of an optimizer imports torch._dynamo, 800 modules that take a third of the time of the first call of a
# run, though an uncompiled program only asks it to break a graph that is not there, and to leave functions uncompiled.
# The stand-in answers these two. It is made in the process that ranks are forked from; a rank whose program compiles
# imports the package then. By that time lagom's functions stand in the place of torch's, so torch's are put back for
# the import. The process that it was forked from then imports the package as well, for the next run.
