"""Objects that a model's forward uses: read-only, lazy, raising, self-referring and huge ones, and some that change."""

from __future__ import annotations

import array
import collections
import contextvars
import enum
import functools
import io
import itertools
import queue
import random
import threading
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, make_dataclass
from typing import Any, NamedTuple

import numpy as np
import torch


def refuse(*_: Any, **__: Any) -> Any:
    raise NotImplementedError("called")


def subclass(base: type, *names: str, **attributes: Any) -> Any:
    """Return a subclass of ``base`` whose methods with these ``names`` raise."""
    return type(f"Strict{base.__name__.capitalize()}", (base,), dict.fromkeys(names, refuse) | attributes)


CHANGES = (
    "__setitem__",
    "__delitem__",
    "clear",
    "update",
    "pop",
    "popitem",
    "setdefault",
    "append",
    "extend",
    "insert",
)
LOOKS = ("__len__", "__iter__", "__eq__", "__repr__", "__getattr__", "__bool__", "__contains__")
DICT_LOOKS = (*LOOKS, "keys", "values", "items", "copy")


class Held(NamedTuple):
    """An object that a forward uses."""

    make: Callable[[], Any]
    use: Callable[[Any, int], Any]
    """Called in the forward with the object and the number of rows; returns the factor of its output."""
    show: Callable[[Any], Any] = lambda _: None
    """Returns what has become of the object."""


class Config(collections.OrderedDict[str, Any]):
    """Refuses changes once it is made, as the configs of diffusers do."""

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)
        self.frozen = True

    def __setitem__(self, name: str, value: Any) -> None:
        if hasattr(self, "frozen"):
            raise TypeError("this dict is read-only")
        super().__setitem__(name, value)

    update = setdefault = pop = __delitem__ = refuse


class Watched(dict[str, Any]):
    """Counts how often it is looked at."""

    looks = 0

    def __iter__(self) -> Any:
        self.looks += 1
        return super().__iter__()

    def __len__(self) -> int:
        self.looks += 1
        return super().__len__()

    def keys(self) -> Any:
        self.looks += 1
        return super().keys()

    def items(self) -> Any:
        self.looks += 1
        return super().items()


class Point(NamedTuple):
    x: float
    y: float


class Mode(enum.Enum):
    PLAIN = 1.0
    DOUBLE = 2.0


class Switches(enum.Flag):
    ON = 1
    FAST = 2


@dataclass
class Options:
    scale: float = 2.0
    calls: int = 0
    names: list[str] = field(default_factory=lambda: ["a"])


@dataclass(frozen=True)
class Fixed:
    scale: float = 2.0


class Slotted:
    __slots__ = ("calls", "empty", "scale")

    def __init__(self) -> None:
        self.scale, self.calls = 2.0, 0


class FixedSlots:
    __slots__ = ("scale",)

    def __init__(self) -> None:
        object.__setattr__(self, "scale", 2.0)

    __setattr__ = __delattr__ = refuse


class Guarded:
    """An object none of whose attributes can be read, but by the way that its owner knows."""

    __slots__ = ("hidden",)

    def __init__(self) -> None:
        object.__setattr__(self, "hidden", 2.0)

    __getattribute__ = __setattr__ = __eq__ = __len__ = __iter__ = __bool__ = __repr__ = refuse
    __hash__ = refuse


class Classless:
    """An object whose class and attributes cannot be asked for."""

    __class__ = property(refuse)
    __dict__ = property(refuse)
    scale = 2.0


class Lazy:
    """A proxy that makes its object as soon as any attribute is read."""

    def __init__(self) -> None:
        object.__setattr__(self, "loaded", [])

    def __getattribute__(self, name: str) -> Any:
        loaded = object.__getattribute__(self, "loaded")
        loaded.append(name)
        return getattr(Fixed(), name)


class Counted:
    """A property counts how often it is read."""

    def __init__(self) -> None:
        self.reads = 0

    @property
    def scale(self) -> float:
        self.reads += 1
        return 2.0

    @property
    def other(self) -> float:
        self.reads += 100
        return 1.0


class Once:
    """A descriptor that gives its value once for each object."""

    def __get__(self, owner: Any, _: Any) -> float:
        vars(owner).setdefault("reads", []).append(1)
        return 2.0

    def __set__(self, owner: Any, value: float) -> None:
        raise AttributeError


class WithDescriptor:
    scale = Once()


class Unequal(type):
    """A metaclass whose classes can be neither compared nor hashed, nor asked for instances."""

    __eq__ = __hash__ = __instancecheck__ = __subclasscheck__ = __repr__ = refuse

    def __getattribute__(cls, name: str) -> Any:
        raise NotImplementedError(name)


class OfUnequal(metaclass=Unequal):
    def __init__(self) -> None:
        self.scale = 2.0


class Tally:
    calls = 0


class Late(types.ModuleType):
    """A module whose attributes appear as they are asked for."""

    asked: int

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        vars(self)["asked"] = vars(self).get("asked", 0) + 1
        return 2.0


class Bad(Exception):
    __str__ = __repr__ = refuse


class Callable_:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> float:
        self.calls += 1
        return 2.0


def _itself(kind: type) -> Any:
    made: Any = kind()
    if kind is dict:
        made.update(scale=2.0, itself=made)
    else:
        made += [2.0, made]
    return made


def _counted(held: Any, key: Any) -> float:
    held[key] += 1
    return float(held[key])


def _counts(held: Any) -> float:
    held.calls += 1
    return float(held.calls)


def _rises(held: Any) -> float:
    variable: contextvars.ContextVar[float] = held
    variable.set(variable.get() + 1.0)
    return variable.get()


def _adds(held: Any, name: str, *args: Any) -> float:
    getattr(held, name)(*args)
    return float(len(held))


def _notes_rows(held: Any, rows: int) -> float:
    held["rows"] = rows
    return 1.0


def _variable() -> contextvars.ContextVar[float]:
    variable: contextvars.ContextVar[float] = contextvars.ContextVar("scale")
    variable.set(2.0)
    return variable


def _local() -> Any:
    local = threading.local()
    local.calls = 0
    return local


def _keyed() -> Any:
    keys = [Keyed(), Keyed()]
    return types.SimpleNamespace(keys=keys, held=weakref.WeakKeyDictionary(dict.fromkeys(keys, 2.0)))


class Keyed:
    """A key that can be referred to weakly."""


def _generator() -> Any:
    while True:
        yield 2.0


def _cached() -> Any:
    @functools.lru_cache
    def doubled(value: float) -> float:
        return 2 * value

    return doubled


def _read_only_array() -> Any:
    found = np.full(3, 2.0)
    found.setflags(write=False)
    return found


def _by_name(held: Any, _: int) -> Any:
    return held["scale"]


def _by_place(held: Any, _: int) -> Any:
    return held[0]


def _by_attribute(held: Any, _: int) -> Any:
    return held.scale


def _plain_dict(held: Any) -> Any:
    return dict.copy(held)


MADE_CLASS = make_dataclass("MadeClass", [("scale", float, 2.0)], frozen=True)

HELD: dict[str, Held] = {
    # Dicts.
    "read_only_dict": Held(lambda: subclass(dict, *CHANGES)(scale=2.0, act="relu"), _by_name, _plain_dict),
    "config": Held(lambda: Config(scale=2.0, act="relu"), _by_name, lambda held: (list(held.items()), held.frozen)),
    "raising_dict": Held(lambda: subclass(dict, *DICT_LOOKS)(scale=2.0), lambda held, _: dict.get(held, "scale")),
    "raising_ordered_dict": Held(
        lambda: subclass(collections.OrderedDict, *LOOKS)(scale=2.0), lambda held, _: dict.get(held, "scale")
    ),
    "watched_dict": Held(lambda: Watched(scale=2.0), _by_name, lambda held: held.looks),
    "defaultdict": Held(lambda: collections.defaultdict(lambda: 2.0), _by_name, _plain_dict),
    "growing_defaultdict": Held(
        lambda: collections.defaultdict(float), lambda held, _: _counted(held, "calls"), _plain_dict
    ),
    "counter": Held(lambda: collections.Counter(a=1), lambda held, _: _counted(held, "a"), _plain_dict),
    "reordered": Held(
        lambda: collections.OrderedDict(a=1.0, b=2.0),
        lambda held, _: held.move_to_end(next(iter(held))) or next(iter(held.values())),
        lambda held: list(held.items()),
    ),
    "chain_map": Held(lambda: collections.ChainMap({}, {"scale": 2.0}), _by_name, lambda held: dict(held)),
    "user_dict": Held(
        lambda: collections.UserDict(calls=0.0), lambda held, _: _counted(held, "calls"), lambda held: held.data
    ),
    "mapping_proxy": Held(lambda: types.MappingProxyType({"scale": 2.0}), _by_name, dict),
    "dict_in_itself": Held(lambda: _itself(dict), _by_name, lambda held: held["itself"] is held),
    "huge_dict": Held(lambda: dict.fromkeys(range(20_000), 2.0), _by_place, len),
    "rows_in_dict": Held(dict, _notes_rows, _plain_dict),
    "nested_dicts": Held(
        lambda: {"a": {"b": {"calls": 0}}}, lambda held, _: _counted(held["a"]["b"], "calls"), _plain_dict
    ),
    "dict_by_enum": Held(lambda: {Mode.PLAIN: 2.0}, lambda held, _: held[Mode.PLAIN], len),
    "class_dict": Held(lambda: vars(Fixed), lambda held, _: held["scale"], lambda held: held["scale"]),
    # Lists, tuples, sets.
    "read_only_list": Held(lambda: subclass(list, *CHANGES)([2.0]), _by_place, list),
    "raising_list": Held(lambda: subclass(list, *LOOKS)([2.0]), _by_place),
    "list_in_itself": Held(lambda: _itself(list), _by_place, lambda held: held[1] is held),
    "huge_list": Held(lambda: [2.0] * 20_000, _by_place, len),
    "late_in_a_list": Held(
        lambda: [{"calls": 0} for _ in range(200)], lambda held, _: _counted(held[150], "calls"), list
    ),
    "growing_list": Held(list, lambda held, _: _adds(held, "append", 1.0), list),
    "user_list": Held(
        lambda: collections.UserList([1.0]), lambda held, _: _adds(held, "append", 2.0), lambda held: held.data
    ),
    "raising_tuple": Held(lambda: subclass(tuple, *LOOKS)((2.0, 1.0)), _by_place),
    "named_tuple": Held(lambda: Point(2.0, 1.0), lambda held, _: held.x, tuple),
    "tuple_with_list": Held(lambda: ([0.0],), lambda held, _: _counted(held[0], 0), list),
    "set": Held(lambda: {1.0}, lambda held, rows: _adds(held, "add", 2.0), sorted),
    "growing_set": Held(set, lambda held, _: _adds(held, "add", len(held)), sorted),
    "raising_set": Held(lambda: subclass(set, "clear", "update", *LOOKS)({2.0}), lambda held, _: 2.0),
    "frozen_set": Held(lambda: frozenset({2.0}), lambda held, _: max(held), sorted),
    "weak_set": Held(lambda: weakref.WeakSet([Mode]), lambda held, _: float(len(held)), len),
    "deque": Held(
        lambda: collections.deque([1.0], maxlen=3),
        lambda held, _: _adds(held, "append", len(held)),
        lambda held: (list(held), held.maxlen),
    ),
    "raising_deque": Held(lambda: subclass(collections.deque, "clear", *LOOKS)([2.0]), _by_place),
    # Numbers and memory.
    "bytearray": Held(lambda: bytearray(b"\1"), lambda held, _: _counted(held, 0), bytes),
    "array": Held(lambda: array.array("d", [0.0]), lambda held, _: _counted(held, 0), list),
    "ndarray": Held(lambda: np.zeros(2), lambda held, _: _counted(held, 0), lambda held: held.tolist()),
    "read_only_ndarray": Held(_read_only_array, _by_place, lambda held: held.tolist()),
    "object_array": Held(lambda: np.array([2.0, None], dtype=object), _by_place, lambda held: held.tolist()),
    "memory_view": Held(lambda: memoryview(b"\2"), _by_place, bytes),
    "random": Held(lambda: random.Random(0), lambda held, _: held.random(), lambda held: held.random()),
    "system_random": Held(random.SystemRandom, lambda held, _: 2.0),
    "torch_generator": Held(
        lambda: torch.Generator().manual_seed(1),
        lambda held, _: torch.rand((), generator=held, dtype=torch.float64),
        lambda held: held.get_state().sum().item(),
    ),
    "numpy_generator": Held(
        lambda: np.random.default_rng(1), lambda held, _: held.random(), lambda held: held.random()
    ),
    "numpy_random_state": Held(
        lambda: np.random.RandomState(1), lambda held, _: held.random(), lambda held: held.random()
    ),
    # Objects.
    "dataclass": Held(Options, lambda held, _: _counts(held), lambda held: (held.calls, held.names)),
    "frozen_dataclass": Held(Fixed, _by_attribute, lambda held: held.scale),
    "made_dataclass": Held(MADE_CLASS, _by_attribute, lambda held: held.scale),
    "slots": Held(Slotted, lambda held, _: _counts(held), lambda held: (held.calls, hasattr(held, "empty"))),
    "frozen_slots": Held(FixedSlots, _by_attribute, lambda held: held.scale),
    "guarded": Held(Guarded, lambda held, _: object.__getattribute__(held, "hidden")),
    "classless": Held(Classless, _by_attribute),
    "lazy": Held(Lazy, _by_attribute, lambda held: object.__getattribute__(held, "loaded")),
    "counted_property": Held(Counted, lambda held, _: held.scale, lambda held: held.reads),
    "descriptor": Held(WithDescriptor, _by_attribute, lambda held: len(held.reads)),
    "metaclass": Held(OfUnequal, _by_attribute, lambda held: held.scale),
    "class_of_metaclass": Held(lambda: OfUnequal, lambda held, _: 2.0),
    "class_attribute": Held(
        lambda: type("Tally", (Tally,), {"calls": 0}), lambda held, _: _counts(held), lambda held: held.calls
    ),
    "enum": Held(lambda: Mode.DOUBLE, lambda held, _: held.value, lambda held: held.name),
    "flag": Held(lambda: Switches.ON, lambda held, _: float(held.value), lambda held: held.name),
    "namespace": Held(lambda: types.SimpleNamespace(calls=0), lambda held, _: _counts(held), vars),
    "callable": Held(Callable_, lambda held, _: held(), lambda held: held.calls),
    "bound_method": Held(lambda: Callable_().__call__, lambda held, _: held(), lambda held: held.__self__.calls),
    "error": Held(Bad, lambda held, _: 2.0),
    # What Python's own modules have.
    "thread_local": Held(_local, lambda held, _: _counts(held), lambda held: held.calls),
    "lock": Held(threading.Lock, lambda held, _: float(held.acquire()) + (held.release() or 0.0), lambda o: o.locked()),
    "partial": Held(
        lambda: functools.partial(_counted, [0.0], 0), lambda held, _: held(), lambda held: list(held.args[0])
    ),
    "cached_function": Held(_cached, lambda held, _: held(1.0)),
    "weak_reference": Held(lambda: weakref.ref(Mode), lambda held, _: held().DOUBLE.value, lambda held: held() is Mode),
    "weak_keys": Held(_keyed, lambda held, _: held.held[held.keys[0]], lambda held: len(held.held)),
    "context_variable": Held(_variable, lambda held, _: _rises(held), lambda held: held.get()),
    "text_stream": Held(
        io.StringIO, lambda held, _: float(held.write("a")) + len(held.getvalue()), lambda held: held.getvalue()
    ),
    "queue": Held(
        queue.Queue,
        lambda held, _: held.put(1.0) or float(held.qsize()),
        lambda held: (held.qsize(), held.unfinished_tasks),
    ),
    "iterator": Held(lambda: itertools.count(1), lambda held, _: float(next(held)), next),
    "generator": Held(_generator, lambda held, _: next(held)),
    "module": Held(lambda: Late("late"), lambda held, _: held.scale, lambda held: vars(held).get("asked")),
}
"""Objects by name."""
