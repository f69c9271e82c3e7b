"""``flatten``, ``unflatten``: take nested containers and dataclasses apart into leaves, and put them together again."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from lagom.inspection.reads import attributes, bases, class_attributes, is_plain, is_tensor, read_slot, slots


class Instance(NamedTuple):
    """Class of an instance of a dataclass, and structure of the dict of its attributes."""

    kind: type
    attributes: Any


class Structure(NamedTuple):
    """Structure of containers in which some leaves are instances of dataclasses, which have leaves of their own."""

    outer: Any
    """Structure as torch knows it."""
    instances: tuple[Instance | None, ...]
    """One for each leaf of ``outer``; None for a leaf that is no instance."""
    num_leaves: int


def flatten(value: Any, seen: set[int] | None = None) -> tuple[list[Any], Any]:
    """Return the leaves of ``value`` and their structure, as torch does; ``value`` itself if torch fails.

    Instances of dataclasses are taken apart too, if they have no other state than their attributes.

    Args:
        seen: gets the ids of these instances.
    """
    from torch.utils._pytree import tree_flatten

    if is_leaf(value):  # as nearly all outputs are
        return [value], _leaf_structure()
    try:
        outer, spec = tree_flatten(value)
    except Exception:  # a container in itself, a class that has no hash, a function that the program has registered
        return [value], _leaf_structure()
    if not any(map(_is_instance, outer)):
        return outer, spec
    leaves: list[Any] = []
    instances: list[Instance | None] = []
    seen = set() if seen is None else seen
    for one in outer:
        own = _own_attributes(one) if _is_instance(one) and id(one) not in seen else None
        if own is None:
            leaves.append(one)
            instances.append(None)
            continue
        seen.add(id(one))  # an instance that comes twice, or contains itself, stays a leaf
        found, inner = flatten(own, seen)
        leaves += found
        instances.append(Instance(type(one), inner))
    return leaves, Structure(spec, tuple(instances), len(leaves))


def unflatten(leaves: list[Any], structure: Any) -> Any:
    """Return what ``flatten`` has taken apart, with other leaves; instances are new, and made without their class."""
    from torch.utils._pytree import tree_unflatten

    if structure is _leaf_structure():
        return leaves[0]
    if not isinstance(structure, Structure):
        return tree_unflatten(leaves, structure)
    outer: list[Any] = []
    rest = iter(leaves)
    for instance in structure.instances:
        if instance is None:
            outer.append(next(rest))
            continue
        own = unflatten([next(rest) for _ in range(instance.attributes.num_leaves)], instance.attributes)
        made: Any = object.__new__(instance.kind)
        held = attributes(made)
        if held is not None:
            held.update(own)
        else:
            for member in slots(made):
                if member.__name__ in own:
                    member.__set__(made, own[member.__name__])
        outer.append(made)
    return tree_unflatten(outer, structure.outer)


def flatten_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Any]:
    """Return what ``flatten((args, kwargs))`` returns, sooner for a few tensors and plain values by position."""
    if kwargs or not all(map(is_leaf, args)):
        return flatten((args, kwargs))
    return list(args), _positional_structure(len(args))


def are_positional(structure: Any, num_leaves: int) -> bool:
    """Return whether ``structure`` is that of arguments by position, none of which is a container or an instance."""
    return structure is _positional_structure(num_leaves)


def is_leaf(value: Any) -> bool:
    """Return whether ``value`` is a plain tensor or a plain value, without a look at what a program has registered."""
    import torch

    kind = type(value)
    return kind is torch.Tensor or kind is torch.nn.Parameter or is_plain(value)


@cache
def _leaf_structure() -> Any:
    from torch.utils._pytree import tree_flatten

    return tree_flatten(None)[1]


@cache
def _positional_structure(num_leaves: int) -> Any:
    from torch.utils._pytree import tree_flatten

    return tree_flatten(((None,) * num_leaves, {}))[1]


def _is_instance(value: Any) -> bool:
    kind = type(value)
    if is_plain(value) or is_tensor(value) or issubclass(kind, type):
        return False
    return any("__dataclass_fields__" in class_attributes(one) for one in bases(kind))


_EMPTY = object()


def _own_attributes(value: Any) -> dict[str, Any] | None:
    """Return the attributes of an instance; None if it may have other state, or is made by code of its class."""
    kinds = bases(type(value))
    # Of other classes, such as a tuple or a Module, a new object would lack what C code or their own code keeps.
    if any("__dataclass_fields__" not in class_attributes(kind) for kind in kinds if kind is not object):
        return None
    held, members = attributes(value), slots(value)
    if held is not None:
        return None if members else dict(held)
    found = {member.__name__: read_slot(value, member, _EMPTY) for member in members}
    return {name: one for name, one in found.items() if one is not _EMPTY}
