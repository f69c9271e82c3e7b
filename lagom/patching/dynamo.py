"""Functions for torch's compiler, Dynamo, which is not imported here: ``lagom.host.preload`` imports it for ranks."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from lagom.patching.importers import on_import
from lagom.patching.replace import originals

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_NAME = "torch._dynamo"


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
