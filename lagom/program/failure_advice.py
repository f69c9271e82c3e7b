"""``advice``: one line about an error of a program that says what to do, if lagom knows that; ``imported_packages``."""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

from lagom.program.script import Script
from lagom.program.sources import imports_of, is_foreign, own_root, reachable_modules, used_modules

_OF_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_NO_GROUP = "Default process group has not been initialized"


def advice(error: BaseException, packages: Sequence[str], *, already_distributed: bool = False) -> str:
    """Return a line that says what to do about ``error``, which a program raised in this process; "" if unknown.

    Args:
        packages: the driver's packages that the program imports, from ``imported_packages``.
    """
    said = error.args[0] if error.args else None
    if isinstance(error, ModuleNotFoundError):
        missing = [name for name in packages if not _is_here(name)]
        if (error.name or "").partition(".")[0] not in missing:
            return ""
        which = " and ".join(filter(None, (", ".join(missing[:-1]), missing[-1])))
        them = "them" if len(missing) > 1 else "it"
        return (
            f"lagom: {platform.node()} lacks {which} in its Python, {sys.executable}, and the driver has {them}: "
            f"install {them} there"
        )
    if already_distributed or type(said) is not str:
        return ""
    if isinstance(error, KeyError) and said in _OF_TORCHRUN and _is_of_environment(error):
        return (
            f"lagom: {said} is not set, since this program starts no process group and lagom distributes it: drop what "
            "reads it, or ask lagom.rank() and lagom.world_size()"
        )
    if isinstance(error, (ValueError, RuntimeError)) and said.startswith(_NO_GROUP):
        return (
            "lagom: this program starts no process group, so lagom shares its batches out and averages its gradients: "
            "drop DistributedSampler, DDP and calls of torch.distributed, or call init_process_group before them"
        )
    return ""


def imported_packages(*values: Any) -> tuple[str, ...]:
    """Return the installed packages of this process that the code of ``values`` imports, or uses as modules."""
    names = {name.partition(".")[0] for value in reachable_modules(*values) for name in _modules_of(value)}
    known = {*sys.stdlib_module_names, *sys.builtin_module_names, "__main__", "lagom"}
    return tuple(sorted(name for name in names - known if _is_here(name) and own_root(name) is None))


def _modules_of(value: Any) -> Iterator[str]:
    if isinstance(value, Script):
        yield from imports_of(value)
    elif isinstance(value, types.FunctionType) and not is_foreign(value):
        yield from imports_of(value)
        yield from (module.__name__ for module in used_modules(value))


def _is_here(name: str) -> bool:
    try:
        return name in sys.modules or importlib.util.find_spec(name) is not None
    except (ImportError, ValueError, AttributeError):
        return False


def _is_of_environment(error: BaseException) -> bool:
    """Return whether ``os.environ`` raised ``error``."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_globals.get("__name__") == os.__name__
