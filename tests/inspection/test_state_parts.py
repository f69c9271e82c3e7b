"""``StatePart``: parts of objects are copied and restored by Python's own methods."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from types import CellType
from typing import Any

import pytest

from lagom.inspection.state_parts import class_state, named_items, state_parts, value_key


def refuse(*_: Any, **__: Any) -> Any:
    raise NotImplementedError


def strict(base: type) -> Any:
    """Return a subclass of ``base`` that refuses looks and changes."""
    names = (
        "__len__",
        "__iter__",
        "__eq__",
        "__setitem__",
        "__delitem__",
        "clear",
        "update",
        "append",
        "extend",
        "add",
    )
    return type("Strict", (base,), dict.fromkeys(names, refuse))


class Slotted:
    __slots__ = ("full", "late")
    full: int
    late: int


def slotted() -> Any:
    made = Slotted()
    made.full = 1
    return made


def change_slots(value: Any) -> None:
    value.late = value.full
    del value.full


def empty(cell: CellType) -> None:
    del cell.cell_contents


def reorder(value: Any) -> None:
    OrderedDict.move_to_end(value, "a")
    OrderedDict.__delitem__(value, "b")


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], object], Callable[[Any], Any]]] = {
    "dict": (lambda: strict(dict)(a=1, b=2), lambda v: dict.pop(v, "a"), lambda v: list(dict.items(v))),
    "ordered": (lambda: strict(OrderedDict)(), lambda v: OrderedDict.__setitem__(v, "a", 1), lambda v: dict.keys(v)),
    "order": (lambda: OrderedDict(a=1, b=2, c=3), reorder, lambda v: list(v.items())),
    "list": (lambda: strict(list)([1, 2]), lambda v: list.append(v, 3), lambda v: list.copy(v)),
    "set": (lambda: strict(set)({1, 2}), lambda v: set.add(v, 3), lambda v: set.copy(v) - {1, 2}),
    "deque": (lambda: strict(deque)([1]), lambda v: deque.append(v, 3), lambda v: list(deque.__iter__(v))),
    "slots": (slotted, change_slots, lambda v: (v.full, hasattr(v, "late"))),
    "cell": (lambda: CellType(1), empty, lambda v: v.cell_contents),
    "bytes": (lambda: bytearray(b"a"), lambda v: v.append(1), bytes),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_has_changed_is_restored(name: str) -> None:
    make, change, show = CHANGES[name]
    value = make()
    before = str(show(value))
    copies = [part.copy() for part in state_parts(value)]
    assert not any(copy.has_changed() for copy in copies)
    change(value)
    assert any(copy.has_changed() for copy in copies)
    for copy in copies:
        copy.restore()
    assert str(show(value)) == before


def test_only_named_items_of_a_dict_and_attributes_of_a_class_are_restored() -> None:
    class Owner:
        kept, late = 1, 2

    held = {"named": 1, "other": 1}
    copies = [named_items(held, ["named", "new"]).copy(), class_state(Owner).copy()]
    held.update(named=2, other=2, new=2)
    Owner.kept = 3
    del Owner.late
    Owner.made = 4  # type: ignore[attr-defined]
    for copy in copies:
        copy.restore()
    assert held == {"named": 1, "other": 2}
    assert (Owner.kept, Owner.late, hasattr(Owner, "made")) == (1, 2, False)


def test_a_key_compares_values_of_plain_containers_and_classes_of_others() -> None:
    itself: list[Any] = [1]
    itself.append(itself)
    assert value_key(itself) == value_key(itself)
    assert value_key({"a": [float("nan")]}) == value_key({"a": [float("nan")]})
    assert value_key({"b", "a"}) == value_key({"a", "b"})
    assert value_key([1, 2]) != value_key([1, 3])
    assert value_key(slotted()) == value_key(Slotted())
