"""The compiled extension ``lagom._native``, if there is one: its codes for types and operations, and its interface."""

from __future__ import annotations

import functools
import importlib
import os
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

TYPES = {
    torch.float64: 0,
    torch.float32: 1,
    torch.float16: 2,
    torch.bfloat16: 3,
    torch.int64: 4,
    torch.int32: 5,
    torch.int16: 6,
    torch.int8: 7,
    torch.uint8: 8,
    torch.bool: 9,
}
"""Codes of the types, as in ``csrc/arithmetic.hpp``."""
OPERATIONS = {"sum": 0, "avg": 1, "min": 2, "max": 3, "product": 4, "band": 5, "bor": 6, "bxor": 7}


class Communicator(Protocol):
    """Exchanges of ``csrc/communicator.hpp``; a failed one is a RuntimeError.

    ``data``, ``source``, ``out``, ``given`` and ``means`` are addresses; ``size`` counts bytes, ``count`` elements.
    """

    def set_timeout(self, timeout_s: float) -> None: ...
    def barrier(self) -> None: ...
    def all_reduce(self, data: int, count: int, type: int, operation: int) -> None: ...
    def reduce_scatter(self, source: int, out: int, count: int, type: int, operation: int) -> None: ...
    def reduce_parts(self, source: int, counts: Sequence[int], out: int, type: int, operation: int) -> None: ...
    def all_gather(self, source: int, out: int, size: int, type: int = ...) -> None: ...
    def broadcast(self, data: int, size: int, root: int, type: int = ...) -> None: ...
    def gather(self, source: int, out: int, size: int, root: int, type: int = ...) -> None: ...
    def scatter(self, source: int, out: int, size: int, root: int, type: int = ...) -> None: ...
    def all_to_all(self, source: int, to: Sequence[int], out: int, back: Sequence[int], type: int = ...) -> None: ...
    def exchange(self, head: bytes, body: memoryview | None) -> list[memoryview]: ...
    def average(self, head: bytes, given: Sequence[int], means: Sequence[int], sections: Any) -> bool: ...
    def rows(self) -> list[memoryview]: ...
    def room(self) -> int: ...
    def send(self, data: int, size: int, type: int, to: int, tag: int) -> None: ...
    def receive(self, data: int, size: int, type: int, sender: int, tag: int) -> None: ...
    def sender(self) -> int: ...
    def waited(self) -> list[int]: ...
    def standing(self) -> tuple[str, int, list[int]]: ...
    def abort(self, why: str) -> None: ...
    def close(self) -> None: ...
    def forget(self) -> None: ...


_VERSION = 12
UNUSABLE = "lagom's compiled part"
"""First words of ``reason_without_native`` if there is a compiled part that this Python cannot use."""


def native() -> Any:
    """Return the extension module; None if ``LAGOM_NATIVE=0``, or none was built for this Python, machine and lagom."""
    found = _load()
    return None if isinstance(found, str) else found


def reason_without_native() -> str:
    """Return why ``native`` returns None; "" if it returns the extension."""
    found = _load()
    return found if isinstance(found, str) else ""


@functools.cache
def _load() -> Any:
    if os.environ.get("LAGOM_NATIVE") == "0":
        return "LAGOM_NATIVE is 0"
    try:
        module = importlib.import_module("lagom._native")
    except ImportError as error:
        if error.path:  # the extension is there, but needs a newer system
            return f"{UNUSABLE} cannot be loaded here: {error}"
        built = [path.name.split(".")[1] for path in sorted(Path(__file__).parents[1].glob("_native.*.so"))]
        here = sysconfig.get_config_var("SOABI")
        if built:
            return f"{UNUSABLE} is for {', '.join(built)}, and this Python is {here}"
        return "lagom was installed without its compiled part"
    if getattr(module, "VERSION", None) != _VERSION:
        return f"{UNUSABLE} is of another version of lagom"
    return module
