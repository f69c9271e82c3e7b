"""``ModuleTree``: the modules inside a module, and the kinds of its calls."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_flatten
from torch.utils.weak import WeakIdKeyDictionary

from lagom.forward.rows.split_candidate import KnownCalls, SplitCandidate, has_global_hooks, is_batch
from lagom.forward.rows.surroundings import Surroundings
from lagom.forward.rows.whole_reasons import NotByRowsError, WholeReason, whole_line
from lagom.inspection.reads import class_key, is_plain, is_tensor
from lagom.inspection.structures import are_positional, flatten, flatten_arguments, unflatten
from lagom.patching.object_reference import ObjectReference
from lagom.run_state.memory_layout import memory_order

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor


class ModuleTree:
    """Remembers the modules inside of modules.

    Args:
        say: logs a line, once.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._found: WeakIdKeyDictionary = WeakIdKeyDictionary(ref_type=ObjectReference)

    def modules_in(self, module: nn.Module, *, says: bool = True) -> list[nn.Module]:
        """Return ``module`` and all modules inside it; an empty list if it cannot be split.

        It cannot be split without parameters, with lazy parameters or buffers, or with TorchScript inside.

        Args:
            says: whether to log that TorchScript is not split.
        """
        module_list = self._found.get(module)
        if module_list is None or module_list.structure != _tree_fingerprint([module, *module_list.others]):
            state = [*module.parameters(), *module.buffers()]
            if any(is_lazy(tensor) for tensor in state):
                return []  # the first call makes lazy parameters
            modules = list(module.modules())
            # C++ runs TorchScript, so nothing shows whether it works row by row.
            scripted = any(isinstance(one, torch.jit.ScriptModule) for one in modules)
            trained = not scripted and any(isinstance(tensor, nn.Parameter) for tensor in state)
            if scripted and says:
                how = ", which is right but not faster"
                self._say(whole_line(type(module).__name__, how, WholeReason.TORCHSCRIPT.filled()))
            around = Surroundings(modules)
            around.forget_parts()
            module_list = self._found[module] = _ModuleList(trained, modules[1:], _tree_fingerprint(modules), around)
        return [module, *module_list.others] if module_list.trained else []

    def candidate(
        self,
        module: nn.Module,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        device: torch.device,
        *,
        says: bool = True,
    ) -> SplitCandidate:
        """Describe ``call(module, *args, **kwargs)`` as a call that might be split; with 0 rows if it cannot be."""
        leaves, spec = flatten_arguments(args, kwargs)
        inside = self.modules_in(module, says=says)
        rows = next((leaf.size(0) for leaf in leaves if is_tensor(leaf) and leaf.dim()), 0)
        run = _run_with(partial(call, module), args, kwargs, leaves, spec)
        return SplitCandidate(module, inside, run, leaves, spec, rows if inside else 0, device)

    def portable(self, module: nn.Module, calls: KnownCalls) -> Any:
        """Return ``calls`` of ``module`` without ids of this process, for ``put_back`` in another process.

        Of the states and flags of a kind, only the differences from the current ones are kept.
        """
        listed = self._found.get(module)
        inside = [module, *listed.others] if listed is not None else []
        if listed is None or listed.structure != _tree_fingerprint(inside):
            return calls.without_findings(), 0, [], []
        around, fresh = listed.surroundings, Surroundings(inside)
        places = around.find_in(fresh)
        flags, states = around.flags(), tuple(map(module_state, inside))

        def in_order(all_flags: Sequence[object]) -> tuple[object, ...]:
            return tuple([all_flags[index] for index, _ in places])

        now = in_order(flags)
        findings = [
            (
                kind._replace(states=_difference(kind.states, states), flags=_difference(in_order(kind.flags), now)),
                finding,
            )
            for kind, finding in calls.findings.items()
            if len(kind.flags) == len(flags)
        ]
        return calls.without_findings(), fresh.num_places, [index for _, index in places], findings

    def put_back(self, module: nn.Module, state: Any) -> KnownCalls:
        """Restore the calls of ``module`` from ``state``, which ``portable`` returned in another process."""
        calls: KnownCalls = state[0]
        _, num_places, places, findings = state
        inside = self.modules_in(module, says=False)
        if not inside or self.surroundings(module).num_places != num_places:
            return calls
        around = self.surroundings(module)
        around.keep(places)
        flags, states = around.flags(), tuple(map(module_state, inside))
        for kind, finding in findings:
            own = _with_difference(kind.states, states), _with_difference(kind.flags, flags)
            calls.findings[kind._replace(states=own[0], flags=own[1])] = finding
        return calls

    def surroundings(self, module: nn.Module) -> Surroundings:
        """Return the values that forwards inside ``module`` can see; ``modules_in`` must have been called before."""
        found: _ModuleList = self._found[module]
        return found.surroundings


def _run_with(
    call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Any], spec: Any
) -> Callable[[list[Any]], Any]:
    """Return a function that makes the ``call`` with other leaves in place of its arguments' ``leaves``.

    Raises:
        NotByRowsError: from the returned function, if the call changes the lists, dicts and dataclasses of its
            arguments, or returns one of these dataclasses.
    """

    def run(changed: list[Any]) -> Any:
        if changed is leaves:
            return call(*args, **kwargs)
        if are_positional(spec, len(leaves)):
            return call(*changed)
        its_args, its_kwargs = unflatten(changed, spec)
        output = call(*its_args, **its_kwargs)
        instances: set[int] = set()
        after, its_spec = flatten((its_args, its_kwargs), instances)
        if instances:
            num = len(instances)
            flatten(output, made := set[int]())
            if len(instances | made) < num + len(made):
                raise NotByRowsError(WholeReason.CHANGES_ARGUMENTS)
        if its_spec != spec or any(one is not other for one, other in zip(after, changed, strict=True)):
            raise NotByRowsError(WholeReason.CHANGES_ARGUMENTS)
        return output

    return run


class _ModuleList(NamedTuple):
    """Keeps facts about the modules inside a module, so that a call need not walk the tree again."""

    trained: bool
    """Whether the module has parameters, and no TorchScript inside."""
    others: list[nn.Module]
    """All modules inside, without the module itself: it is the weak key of this value, which would keep it alive."""
    structure: object
    surroundings: Surroundings


def _tree_fingerprint(modules: list[nn.Module]) -> object:
    """Return a fingerprint of the submodule tree; it changes when a child is added or replaced."""
    return [tuple(map(id, (module.__dict__.get("_modules") or {}).values())) for module in modules]


class CallKind(NamedTuple):
    """Facts by which calls are distinguished: the same finding applies to calls of one kind."""

    spec: object
    leaves: tuple[object, ...]
    states: Any
    """State of each module inside."""
    flags: Any
    modes: tuple[bool, ...]
    """Modes of torch, and whether it has hooks that it calls for all modules."""
    is_short: bool
    """Whether a block may have a single row, whose shape squeeze() changes."""
    way: int = 0
    """Number among the kinds that differ only by numbers which the forward reads from its input."""


_SAME = ...
"""Marks a part of a kind that equals the module's current state."""


def _difference(kept: object, now: object) -> object:
    if kept == now:
        return _SAME
    if isinstance(kept, tuple) and isinstance(now, tuple) and len(kept) == len(now):
        return tuple(map(_difference, kept, now))
    return kept


def _with_difference(difference: object, now: object) -> object:
    if difference is _SAME:
        return now
    if isinstance(difference, tuple) and isinstance(now, tuple) and len(difference) == len(now):
        return tuple(map(_with_difference, difference, now))
    return difference


def call_kind(candidate: SplitCandidate, surroundings: Surroundings, *, is_short: bool = False) -> CallKind:
    """Return a key that is equal for calls to which the same finding applies."""
    leaves = tuple(
        (leaf.dim(), _ones(leaf), leaf.dtype, leaf.requires_grad, is_batch(leaf, candidate.rows), memory_order(leaf))
        if is_tensor(leaf)
        else _leaf_key(leaf)
        for leaf in candidate.leaves
    )
    states = tuple(map(module_state, candidate.inside))
    modes = (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled(candidate.device.type),
        has_global_hooks(),
    )
    spec = candidate.spec if _SPECS_HASH else repr(candidate.spec)
    return CallKind(spec, leaves, states, surroundings.flags(), modes, is_short)


def _specs_hash() -> bool:
    try:
        hash(tree_flatten([0])[1])
    except TypeError:  # torch 2.6
        return False
    return True


_SPECS_HASH = _specs_hash()


def _ones(leaf: Tensor) -> tuple[bool, ...]:
    """Return for each dimension whether its size is 1, which hides the order of dimensions."""
    return () if leaf.is_nested else tuple([size == 1 for size in leaf.shape])


def _leaf_key(leaf: Any) -> object:
    """Return an argument's value, or its class; of a float the sign: a coefficient of zero may switch mixing off."""
    kind = type(leaf)
    if issubclass(kind, int):
        return int.__pos__(leaf)
    if issubclass(kind, float):
        return float, float.__gt__(leaf, 0) - float.__lt__(leaf, 0)
    return str.__str__(leaf) if issubclass(kind, str) else None if leaf is None else class_key(kind)


def module_state(module: nn.Module) -> tuple[Any, ...]:
    """Return the state of ``module`` that may change its forward's way: modes, hooks, and its own attributes."""
    state = module.__dict__
    hooked = [name for name in _HOOKS if state.get(name)]
    # Callables count by id, since a program may replace them; other objects by type, since ids are reused.
    own = [
        (name, value if is_plain(value) else (id(value) if callable(value) else class_key(type(value))))
        for name, value in state.items()
        if name not in EVERYONES
    ]
    watched = [p is not None and bool(p._backward_hooks) for p in state["_parameters"].values()]
    parts = [(id(part), class_key(type(part))) for part in state["_modules"].values()]
    kind = class_key(type(module))
    return kind, type(module).forward, module.training, tuple(hooked), tuple(own), tuple(watched), tuple(parts)


def attribute_numbers(modules: Sequence[nn.Module]) -> object:
    """Return the numbers among the attributes of ``modules``."""
    return [
        {name: value for name, value in module.__dict__.items() if type(value) is int or type(value) is float}
        for module in modules
    ]


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
EVERYONES = frozenset(vars(nn.Module()))
"""Names of the attributes that every module has."""
