"""What a module has inside of it, and which of its calls are of one kind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.weak import WeakIdKeyDictionary

from lagom.patching.object_reference import ObjectReference
from lagom.row_split.recorder import NotByRowsError
from lagom.row_split.split_candidate import SplitCandidate, is_batch
from lagom.row_split.surroundings import Surroundings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class ModuleTree:
    """Remembers the modules inside of modules.

    Args:
        say: logs a line, once.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._found: WeakIdKeyDictionary = WeakIdKeyDictionary(ref_type=ObjectReference)

    def of(self, module: nn.Module, *, says: bool = True) -> list[nn.Module]:
        """All modules inside one, and itself; none when it has no parameters yet, or none at all."""
        found = self._found.get(module)
        if found is None or found.structure != _structure([module, *found.others]):
            state = [*module.parameters(), *module.buffers()]
            if any(is_lazy(tensor) for tensor in state):
                return []  # its first call makes them
            modules = list(module.modules())
            # What TorchScript runs is C++'s: whether it works row by row is not looked into.
            scripted = any(isinstance(one, torch.jit.ScriptModule) for one in modules)
            trained = not scripted and any(isinstance(tensor, nn.Parameter) for tensor in state)
            if scripted and says:
                self._say(
                    f"{type(module).__name__} runs whole on every rank, which is right but not faster: it is "
                    "TorchScript, into which lagom does not look"
                )
            found = self._found[module] = _Inside(trained, modules[1:], _structure(modules), Surroundings(modules))
        return [module, *found.others] if found.trained else []

    def surroundings(self, module: nn.Module) -> Surroundings:
        """What the forwards inside of a module, of which ``of`` was asked before, can see."""
        found: _Inside = self._found[module]
        return found.surroundings


def run_with(
    call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Any], spec: TreeSpec
) -> Callable[[list[Any]], Any]:
    """What makes a ``call`` with other leaves of its arguments than ``leaves``.

    Raises:
        NotByRowsError: when called, where the call changes the lists and dicts that it is given.
    """

    def run(changed: list[Any]) -> Any:
        if changed is leaves:
            return call(*args, **kwargs)
        its_args, its_kwargs = tree_unflatten(changed, spec)
        output = call(*its_args, **its_kwargs)
        after, its_spec = tree_flatten((its_args, its_kwargs))
        if its_spec != spec or any(one is not other for one, other in zip(after, changed, strict=True)):
            raise NotByRowsError("changes the lists or dicts that it is called with")
        return output

    return run


class _Inside(NamedTuple):
    """What is inside a module."""

    trained: bool
    """It has parameters, and is no TorchScript."""
    others: list[nn.Module]
    """All its modules but itself: what holds its own key is never let go of."""
    structure: object
    surroundings: Surroundings


def _structure(modules: list[nn.Module]) -> object:
    """Another one when any of ``modules`` has got other modules."""
    return [tuple(map(id, module.__dict__["_modules"].values())) for module in modules]


def kind_of(candidate: SplitCandidate, spec: TreeSpec, surroundings: Surroundings) -> object:
    """Equal for calls that the same finding holds for."""
    leaves = tuple(
        (leaf.dim(), leaf.dtype, leaf.requires_grad, is_batch(leaf, candidate.rows))
        if isinstance(leaf, torch.Tensor)
        else (leaf if isinstance(leaf, (bool, int, str, type(None))) else (type(leaf), _sign(leaf)))
        for leaf in candidate.leaves
    )
    states = tuple(map(_state, candidate.inside))
    modes = torch.is_grad_enabled(), torch.is_autocast_enabled(candidate.device.type)
    return spec, leaves, states, surroundings.flags(), modes


def _sign(leaf: object) -> int:
    """Of a number: one that is zero may switch off what mixes rows."""
    return (leaf > 0) - (leaf < 0) if isinstance(leaf, float) else 0


def _state(module: nn.Module) -> object:
    """What of a module's attributes may have its forward take another way: modes, hooks, and whatever is its own."""
    state = module.__dict__
    hooked = [name for name in _HOOKS if state.get(name)]
    # An id, for it may be replaced; with the type, since ids are used again.
    own = [
        (name, value if type(value) in _PLAIN else (id(value) if callable(value) else type(value)))
        for name, value in state.items()
        if name not in _EVERYONES
    ]
    watched = [p is not None and bool(p._backward_hooks) for p in state["_parameters"].values()]
    parts = [(id(part), type(part)) for part in state["_modules"].values()]
    return type(module), module.training, tuple(hooked), tuple(own), tuple(watched), tuple(parts)


def numbers_of(modules: Sequence[nn.Module]) -> object:
    """The numbers among the attributes of ``modules``."""
    return [
        {name: value for name, value in module.__dict__.items() if type(value) in (int, float)} for module in modules
    ]


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_EVERYONES = frozenset(vars(nn.Module()))
_PLAIN = frozenset((bool, int, float, str, type(None)))
