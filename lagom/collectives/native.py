"""The compiled part, ``lagom._native``, where there is one: its codes for types and operations, and its types."""

from __future__ import annotations

import functools
import importlib
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
"""As in ``csrc/arithmetic.hpp``."""
OPERATIONS = {"sum": 0, "avg": 1, "min": 2, "max": 3, "product": 4, "band": 5, "bor": 6, "bxor": 7}


class Communicator(Protocol):
    """The exchanges of ``csrc/communicator.hpp``; tensors by address. All raise RuntimeError when an exchange fails."""

    def set_timeout(self, timeout_s: float) -> None: ...
    def barrier(self) -> None: ...
    def all_reduce(self, data: int, count: int, type: int, operation: int) -> None: ...
    def reduce_scatter(self, source: int, out: int, count: int, type: int, operation: int) -> None: ...
    def all_gather(self, source: int, out: int, size: int) -> None: ...
    def broadcast(self, data: int, size: int, root: int) -> None: ...
    def gather(self, source: int, out: int, size: int, root: int) -> None: ...
    def scatter(self, source: int, out: int, size: int, root: int) -> None: ...
    def all_to_all(self, source: int, to: Sequence[int], out: int, back: Sequence[int]) -> None: ...
    def exchange(self, head: bytes, body: memoryview | None) -> list[memoryview]: ...
    def average(self, head: bytes, body: int, size: int, sections: Any) -> bool: ...
    def rows(self) -> list[memoryview]: ...
    def room(self) -> int: ...
    def send(self, data: int, size: int, type: int, to: int, tag: int) -> None: ...
    def receive(self, data: int, size: int, type: int, sender: int, tag: int) -> None: ...
    def sender(self) -> int: ...
    def abort(self, why: str) -> None: ...
    def close(self) -> None: ...
    def forget(self) -> None: ...


_VERSION = 1


@functools.cache
def native() -> Any:
    """The extension module; None where it was not built, or not for this Python, machine and version of lagom."""
    try:
        found = importlib.import_module("lagom._native")
    except ImportError:
        return None
    return found if getattr(found, "VERSION", None) == _VERSION else None
