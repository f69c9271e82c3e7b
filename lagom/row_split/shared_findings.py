"""``SharedFindings``: facts about calls that modules of one structure share. See Note [Modules of one structure]."""

from __future__ import annotations

import types
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from lagom.inspection.reads import class_path
from lagom.row_split.module_tree import ModuleTree, module_state
from lagom.row_split.split_candidate import KnownCalls

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

_MAX_STRUCTURES = 1024
"""Number of structures after which modules of new ones keep their facts to themselves."""


class SharedFindings:
    """Gives a module that is called for the first time the findings about an earlier module of the same structure."""

    def __init__(self, trees: ModuleTree) -> None:
        self._trees = trees
        self._earlier: dict[object, _Earlier] = {}
        self._kept: dict[object, tuple[KnownCalls, list[_PortableFinding]]] = {}
        """By structure, facts from the process from which this one continues."""

    def known_calls(self, module: nn.Module, *, says: bool = False) -> KnownCalls:
        """Return the facts about ``module`` with which its first call begins; ``says`` is for ``modules_in``."""
        inside = self._trees.modules_in(module, says=says)
        flags = self._trees.surroundings(module).flags() if inside else ()
        key = _structure(inside, flags)
        if key is None or (key not in self._earlier and len(self._earlier) > _MAX_STRUCTURES):
            return KnownCalls()
        states = tuple(map(module_state, inside))
        classes = list(map(type, inside))
        earlier = self._earlier.get(key)
        if earlier is not None and earlier.classes != classes:
            del self._earlier[key]  # other classes with the same names
        known, findings = self._kept.pop(key) if key in self._kept else self._portable(key)
        calls = KnownCalls(small=known.small, num_changes=known.num_changes if known.num_changes > 1 else 0)
        for finding in findings:
            moved = tuple([_in_mode(state, mode) for state, mode in zip(states, finding.modes, strict=True)])
            kind = finding.kind._replace(states=moved, flags=finding.kind.flags or flags)
            calls.findings[kind] = finding.finding
        self._earlier[key] = _Earlier(calls, classes, states, flags)
        return calls

    def state(self) -> list[tuple[object, Any]]:
        """Return the facts by structure, for ``set_state`` in another process."""
        return [*self._kept.items(), *((key, self._portable(key)) for key in self._earlier if key not in self._kept)]

    def set_state(self, state: list[tuple[object, Any]]) -> None:
        """Continue with the facts that ``state`` returned in another process."""
        self._kept = dict(state)

    def _portable(self, key: object) -> tuple[KnownCalls, list[_PortableFinding]]:
        """Return what is known of the last module with this structure, without ids of its parts."""
        earlier = self._earlier.get(key)
        if earlier is None:
            return KnownCalls(), []
        findings = []
        for kind, finding in earlier.calls.findings.items():
            modes = [_other_mode(state, now) for state, now in zip(kind.states, earlier.states, strict=False)]
            if len(kind.states) == len(earlier.states) and None not in modes and len(kind.flags) == len(earlier.flags):
                flags = None if kind.flags == earlier.flags else kind.flags
                findings.append(_PortableFinding(kind._replace(states=None, flags=flags), modes, finding))
        return replace(earlier.calls, findings={}), findings


class _Earlier(NamedTuple):
    calls: KnownCalls
    classes: list[type[nn.Module]]
    """Classes of the modules inside."""
    states: Sequence[Any]
    """States of the modules inside, before the first call; they hold ids, and no objects."""
    flags: tuple[object, ...]


class _PortableFinding(NamedTuple):
    kind: Any
    """The ``CallKind`` without states; its flags are None if they were those before the first call."""
    modes: Sequence[bool | None]
    """For each module inside, whether it was in training mode."""
    finding: Any


_TRAINING, _HOOKED, _OWN = 2, 3, 4
"""Indices of the training mode, the names of hooks and the own attributes in a module's state."""


def _other_mode(state: Any, before: Any) -> bool | None:
    """Return the training mode in ``state``; None if anything else differs from ``before``, as that may be an id."""
    return state[_TRAINING] if _in_mode(state, before[_TRAINING]) == before else None


def _in_mode(state: Any, mode: bool | None) -> Any:
    return (*state[:_TRAINING], mode, *state[_TRAINING + 1 :])


def _structure(inside: Sequence[nn.Module], flags: tuple[object, ...]) -> object:
    """Return a key of a tree of modules that is equal on all ranks and in all processes; None if there is none."""
    numbers: dict[int, int] = {}
    parts: list[object] = []
    for module in inside:
        kind, state = type(module), module_state(module)
        forward = kind.forward
        if state[_HOOKED] or not isinstance(forward, types.FunctionType):
            return None
        own = [(name, _own_value(module.__dict__[name], value)) for name, value in state[_OWN]]
        if any(value is None for _, value in own):
            return None
        tensors = [
            tensor
            if tensor is None
            else (numbers.setdefault(id(tensor), len(numbers)), tensor.shape, tensor.dtype, tensor.requires_grad)
            for held in (module._parameters, module._buffers)
            for tensor in held.values()
        ]
        children = [
            (name, child if child is None else numbers.setdefault(id(child), len(numbers)))
            for name, child in module._modules.items()
        ]
        name = kind.__module__, kind.__qualname__, _code_place(forward)
        parts.append((name, state[_TRAINING], tuple(own), tuple(tensors), tuple(children)))
    return (tuple(parts), flags) if parts else None


def _own_value(value: Any, seen: object) -> object:
    """Return what identifies an attribute, as ``module_state`` has ``seen`` it; None for one that cannot be shared."""
    if not callable(value):
        return (seen,)
    kind = type(value)  # isinstance() would ask the object, too
    if issubclass(kind, types.FunctionType):
        has_values = value.__closure__ or value.__defaults__ or value.__kwdefaults__ or vars(value)
        return None if has_values else _code_place(value)
    if issubclass(kind, type):
        return class_path(value)
    is_plain = kind is types.BuiltinFunctionType and issubclass(type(value.__self__), (types.ModuleType, type(None)))
    return (value.__module__, value.__name__) if is_plain else None


def _code_place(function: types.FunctionType) -> object:
    code = function.__code__
    return code.co_filename, code.co_firstlineno, code.co_name


# Note [Modules of one structure]
#
# Findings belong to calls of a module, and some programs make modules all the time: a wrapper for each step around one
# network (torchdiffeq), copies for an average of weights, a model for each fold. Each was examined anew, and a wrapper
# was never split, since its second call never came. A module that is called for the first time begins with the
# findings about the last module of the same structure: the same classes, code, attributes, shapes, tied tensors and
# modes, and the same values in what its forwards can see (see Note [Surroundings] in surroundings.py). Everything in
# this key is equal on all ranks, so no id is in it: Python gives a new object the id of a dead one by chance. A
# callable among the attributes counts by the place of its code, and modules with one that holds values of its own (a
# closure, a bound method, an object) share nothing. Of the findings, those are taken that differ from the state
# before the first call in training modes or flags alone; the states of others may hold ids.
