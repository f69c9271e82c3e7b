"""``recorded_reads``: records numbers that a program reads from tensors, and whether it decides by them."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lagom.patching.replace import replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lagom.extensions.verify.on_rank.record import RecordedRead
    from lagom.session.session import Session

    Note = Callable[[str, float], RecordedRead]
    """Records a number that was read at a place, and returns the record."""

_item = torch.Tensor.item
_TORCH = os.path.dirname(torch.__file__) + os.sep
_OURS = str(Path(__file__).parents[3]) + os.sep


@contextmanager
def recorded_reads(session: Session, note: Note) -> Iterator[None]:
    """Call ``note`` for every number that the program, not torch or lagom, reads from a floating-point tensor.

    ``tensor.item()`` returns a ``Number``, which records comparisons with it, as do the numbers computed from it.
    """
    made = {"item": _make_item, "__float__": _make_float}
    made |= dict.fromkeys(("numpy", "tolist", "__array__"), _make_leaving)
    made |= dict.fromkeys(("__lt__", "__le__", "__gt__", "__ge__"), _make_comparison)
    with ExitStack() as stack:
        for name, make in made.items():
            stack.enter_context(replaced(torch.Tensor, name, make(session, note, getattr(torch.Tensor, name))))
        yield


def _make_item(session: Session, note: Note, original: Callable[..., Any]) -> Callable[..., Any]:
    @torch._disable_dynamo
    def uncompiled(self: torch.Tensor) -> Any:
        return original(self)

    def item(self: torch.Tensor) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return uncompiled(self)  # the graph breaks there anyway
        value = original(self)
        place = _place() if session.live and type(value) is float else None
        return value if place is None else Number.read(value, note(place, value))

    return item


def _make_float(session: Session, note: Note, original: Callable[..., Any]) -> Callable[..., Any]:
    def to_float(self: torch.Tensor) -> Any:
        value = original(self)
        caller = sys._getframe(1).f_code.co_filename
        place = "ReduceLROnPlateau" if _is_scheduler(caller) else _place()
        if session.live and self.is_floating_point() and place is not None:
            note(place, value).decides = place == "ReduceLROnPlateau"
        return value

    return to_float


def _make_leaving(session: Session, note: Note, original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method that converts a tensor to numpy or Python; tensors of several numbers may be data: not recorded."""

    def leave(self: torch.Tensor, *args: Any, **options: Any) -> Any:
        if session.live and self.numel() == 1 and self.is_floating_point() and (place := _place()) is not None:
            note(place, _item(self))
        return original(self, *args, **options)

    return leave


def _make_comparison(session: Session, note: Note, original: Callable[..., Any]) -> Callable[..., Any]:
    def compare(self: torch.Tensor, other: Any) -> Any:
        is_scalar = session.live and self.dim() == 0 and self.is_floating_point()
        if is_scalar and not torch.compiler.is_compiling() and (place := _place()) is not None:
            note(place, _item(self)).decides = True
        return original(self, other)

    return compare


class Number(float):
    """A float that was read from a tensor, or computed from such a float."""

    __slots__ = ("_reads",)
    _reads: tuple[RecordedRead, ...]

    @classmethod
    def read(cls, value: float, *reads: RecordedRead) -> Number:
        """Return ``value``, computed from ``reads``."""
        number = cls(value)
        number._reads = reads[:16]
        return number

    def __float__(self) -> float:
        if _is_scheduler(sys._getframe(1).f_code.co_filename):
            for read in self._reads:
                read.decides = True
        return float.__float__(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return float, (float.__repr__(self),)

    def __hash__(self) -> int:
        return float.__hash__(self)


def _computing(name: str) -> Callable[..., Any]:
    original = getattr(float, name)

    def compute(self: Number, *others: Any) -> Any:
        value = original(self, *others)
        if type(value) is not float:
            return value
        reads = self._reads + tuple(read for other in others if isinstance(other, Number) for read in other._reads)
        return Number.read(value, *reads)

    return compute


def _comparing(name: str) -> Callable[..., Any]:
    original = getattr(float, name)

    def compare(self: Number, other: Any) -> Any:
        for read in self._reads + (other._reads if isinstance(other, Number) else ()):
            read.decides = True
        return original(self, other)

    return compare


_ARITHMETIC = ("add", "sub", "mul", "truediv", "pow")
for _name in [f"__{prefix}{name}__" for name in _ARITHMETIC for prefix in ("", "r")] + [
    "__neg__",
    "__abs__",
    "__round__",
]:
    setattr(Number, _name, _computing(_name))
for _name in ("__lt__", "__le__", "__gt__", "__ge__"):
    setattr(Number, _name, _comparing(_name))


def _place() -> str | None:
    """Return file and line of the program's read; None if torch or lagom itself reads, as an optimizer does."""
    frame = sys._getframe(2)
    name = frame.f_code.co_filename
    return None if name.startswith((_TORCH, _OURS)) else f"{os.path.basename(name)}:{frame.f_lineno}"


def _is_scheduler(name: str) -> bool:
    """Return whether ``name`` is torch's ``lr_scheduler.py``, where ReduceLROnPlateau compares a metric."""
    return name.startswith(_TORCH) and name.endswith("lr_scheduler.py")
