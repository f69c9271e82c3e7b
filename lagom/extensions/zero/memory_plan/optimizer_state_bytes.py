"""``step_meta_copy``: finds the bytes of state that an optimizer keeps, by stepping a copy on the meta device."""

from __future__ import annotations

import copy
import inspect
import math
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.optim import LBFGS, Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from lagom.extensions.zero.memory_plan.meta_modules import like, on_meta
from lagom.extensions.zero.optimizer_probe import ShardingKind, probe_optimizer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Make = Callable[[list[torch.Tensor]], Optimizer]
    Place = Callable[[torch.Tensor], torch.Tensor]

_NUM_STEPS = 2
"""Steps of the copy: some optimizers create a part of their state only in the second step."""
_PRIMES = (3, 5, 7, 11, 13, 17, 19, 23)
"""Sides of a parameter's small stand-in, where the parameter is not smaller. All differ, so the side of a state tensor
shows to which side of the parameter it belongs."""


class KeptState(NamedTuple):
    """Bytes of an optimizer's state for one parameter."""

    like: int
    """Bytes of tensors that have the parameter's shape, and are sharded like the parameter."""
    rest: int
    """Bytes of other tensors, such as step counts and factors."""


class SteppedOptimizer(NamedTuple):
    """The parameters that an optimizer steps, and the state that it keeps for them."""

    name: str
    kind: ShardingKind
    """How finely the step can be sharded: by element, by whole parameter, or not at all."""
    parameters: list[torch.Tensor]
    """Parameters of the optimizer that require gradients, in the optimizer's order."""
    kept: list[KeptState]
    """State for each of ``parameters``."""
    whole: int
    """Bytes of state that belong to no single parameter."""


def step_meta_copy(optimizer: Optimizer | Make, parameters: Sequence[torch.Tensor]) -> SteppedOptimizer:
    """Return the state that ``optimizer`` keeps for ``parameters``, without changing them.

    A copy is stepped on the meta device, or if that fails on small parameters on the CPU.

    Args:
        optimizer: an optimizer of all or some of ``parameters``; or a class or function that makes an optimizer from
            a list of parameters.

    Raises:
        ValueError: if the optimizer cannot be made, steps a tensor that is not in ``parameters``, or can be stepped in
            neither way.
    """
    twins = {id(p): on_meta(p) for p in parameters}
    origin = {id(twin): p for p in parameters for twin in (twins[id(p)],)}
    original = optimizer if isinstance(optimizer, Optimizer) else _made(optimizer, list(twins.values()))
    every = [p for group in original.param_groups for p in group["params"]]
    if isinstance(optimizer, Optimizer):
        if foreign := [p for p in every if id(p) not in twins]:
            raise ValueError(
                f"the {type(optimizer).__name__} steps a tensor of shape {tuple(foreign[0].shape)} that is no "
                "parameter of the module; hand over the module that it was made for, or the optimizer's class"
            )
        origin = {id(p): p for p in every}
    graded = [p for p in every if p.requires_grad]
    if isinstance(original, LBFGS):
        kept, whole = [KeptState(0, 0)] * len(graded), _of_lbfgs(original, graded)
    else:
        kept, whole = _kept(original, graded)
    finding = probe_optimizer(_clone(original, _hollow), _step_of(original), closure=_wants_closure(original))
    return SteppedOptimizer(type(original).__name__, finding.kind, [origin[id(p)] for p in graded], kept, whole)


def _made(make: Make, twins: list[torch.Tensor]) -> Optimizer:
    name = getattr(make, "__name__", type(make).__name__)
    if not callable(make):
        raise ValueError(f"optimizer is {make!r}; want an optimizer, its class, or a function of the parameters")
    try:
        made: object = make(twins)
    except Exception as error:
        raise ValueError(
            f"{name} cannot be made of the parameters alone: {type(error).__name__}: {error}. Hand over a function of "
            "them, such as lambda parameters: SGD(parameters, lr=0.1, momentum=0.9), or the optimizer itself"
        ) from error
    if not isinstance(made, Optimizer):
        raise ValueError(f"{name} gives a {type(made).__name__}; want a torch.optim.Optimizer")
    return made


def _kept(optimizer: Optimizer, graded: Sequence[torch.Tensor]) -> tuple[list[KeptState], int]:
    try:
        return _run(optimizer, graded, on_meta, lambda shape, _: shape)
    except Exception:  # the step reads values, or needs a real device
        pass
    name = type(optimizer).__name__
    try:
        return _run(optimizer, graded, _small, _grown)
    except Exception as error:
        raise ValueError(
            f"{name} cannot be tried out on small parameters: {type(error).__name__}: {error}. Leave the optimizer out "
            "(optimizer=None), and add what it keeps"
        ) from error


def _run(
    optimizer: Optimizer,
    graded: Sequence[torch.Tensor],
    place: Place,
    grown: Callable[[torch.Size, torch.Tensor], Sequence[int]],
) -> tuple[list[KeptState], int]:
    """Step a copy of ``optimizer``, and return its state for each of ``graded`` and the bytes of all other state.

    Args:
        place: makes the copy's parameter for a parameter.
        grown: returns the full-size shape of a state tensor, from its shape in the copy and the parameter.
    """
    memo: dict[int, torch.Tensor] = {}
    clone = _clone(optimizer, place, memo)
    step, arguments = _step_of(optimizer), (_constant,) if _wants_closure(optimizer) else ()
    with torch.random.fork_rng(devices=[]):
        for _ in range(_NUM_STEPS):
            for p in graded:
                twin = memo[id(p)]
                twin.grad = torch.ones_like(twin, requires_grad=False)
            step(clone, *arguments)
    kept, counted = [], {id(memo[id(p)]) for p in graded}
    for p in graded:
        twin = memo[id(p)]
        same = rest = 0
        for tensor in _tensors(vars(clone)["state"].get(twin, {}), counted):
            if tensor.shape == twin.shape and tensor.dim():
                same += p.numel() * tensor.element_size()
            else:
                rest += math.prod(grown(tensor.shape, p)) * tensor.element_size()
        kept.append(KeptState(same, rest))
    others = [value for key, value in vars(clone).items() if key not in ("param_groups", "state")]
    others += [value for key, value in vars(clone)["state"].items()]
    return kept, sum(tensor.nbytes for tensor in _tensors(others, counted))


def _tensors(tree: Any, counted: set[int]) -> list[torch.Tensor]:
    """Return the tensors in ``tree`` whose ids are not in ``counted``, and add their ids."""
    found = [one for one in tree_leaves(tree) if isinstance(one, torch.Tensor) and id(one) not in counted]
    counted.update(map(id, found))
    return found


def _clone(optimizer: Optimizer, place: Place, memo: dict[int, Any] | None = None) -> Any:
    """Copy ``optimizer``; ``place`` makes the copy's parameters, and tensors for the state that already exists.

    Args:
        memo: receives the copy's parameters by the ids of the originals.
    """
    memo = {} if memo is None else memo
    every = [p for group in optimizer.param_groups for p in group["params"]]
    memo |= {id(p): place(p) for p in every}
    clone = object.__new__(type(optimizer))
    memo[id(optimizer)] = clone
    for key, value in vars(optimizer).items():
        if key == "state":
            state: Any = defaultdict(dict)
            for p, own in value.items() if isinstance(value, Mapping) else ():  # not a mapping if a run shards it
                state[memo.get(id(p), p)] = tree_map_only(torch.Tensor, _cheap(place), own)
            vars(clone)[key] = state
        elif key.endswith("_hooks"):
            vars(clone)[key] = OrderedDict()
        elif key not in ("step", "zero_grad"):  # wrappers that a scheduler sets on the optimizer
            vars(clone)[key] = copy.deepcopy(value, memo)
    return clone


def _cheap(place: Place) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: place(tensor).detach() if tensor.dim() else tensor.clone()


def _hollow(p: torch.Tensor) -> torch.Tensor:
    """Return a CPU leaf with the shape of ``p`` and one element in memory; ``probe_optimizer`` needs no values."""
    return like(p, torch.zeros((), dtype=p.dtype).expand(p.shape))


def _small(p: torch.Tensor) -> torch.Tensor:
    shape = [min(side, prime) for side, prime in zip(p.shape, (*_PRIMES, *p.shape), strict=False)]
    return like(p, torch.full(shape, 0.5, dtype=p.dtype))


def _grown(shape: torch.Size, p: torch.Tensor) -> Sequence[int]:
    """Return the shape that a state tensor has for ``p``, if it has ``shape`` for ``p``'s small stand-in."""
    sides = dict(zip(_small(p).shape, p.shape, strict=True))
    sides[math.prod(_small(p).shape)] = p.numel()
    return [sides.get(side, side) for side in shape]


def _step_of(optimizer: Optimizer) -> Callable[..., Any]:
    """Return the class's own ``step``, without torch's wrapper for hooks."""
    step: Any = next(vars(kind)["step"] for kind in type(optimizer).__mro__ if "step" in vars(kind))
    found: Callable[..., Any] = step.__wrapped__ if vars(step).get("hooked", False) else step
    return found


def _wants_closure(optimizer: Optimizer) -> bool:
    parameters = [*inspect.signature(_step_of(optimizer)).parameters.values()]
    return len(parameters) > 1 and parameters[1].default is inspect.Parameter.empty and parameters[1].kind in (0, 1)


def _constant() -> torch.Tensor:
    return torch.ones((), requires_grad=True)


def _of_lbfgs(optimizer: LBFGS, graded: Sequence[torch.Tensor]) -> int:
    """Return the bytes of LBFGS's state with a full history.

    LBFGS keeps a step and a change of the gradient for each entry of the history, the last direction and the last
    gradient.
    """
    history: int = optimizer.param_groups[0]["history_size"]
    return sum(p.nbytes for p in graded) * (2 * history + 2)
