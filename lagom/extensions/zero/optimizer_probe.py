"""``probe_optimizer``: finds out how an optimizer can be sharded by stepping small copies of it."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from contextlib import suppress
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn.parameter import is_lazy

from lagom.extensions.zero.probe_copies import (
    CAP,
    EVERY_OTHER,
    HALVES,
    capped_shape,
    copy_group,
    initial_values,
    set_gradients,
    typical_parameters,
)
from lagom.random_states import equal_random_states, random_states, set_random_states

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from torch.optim import Optimizer

    from lagom.extensions.zero.probe_copies import Part

_NUM_STEPS = 12
"""Steps of a probe. Some methods begin differently: RAdam for 5 steps, Lookahead's slow weights for 5 or 6."""
_SHORT_SIDE = 8
"""Longest side of a small parameter if an earlier group with the same settings has full-sized ones (``CAP``)."""
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Tolerance relative to the largest change of a parameter: allows for another order of rounding, and no more."""


class ShardingKind(Enum):
    """Ways in which an optimizer can be sharded."""

    ELEMENTWISE = "by element"
    BY_PARAMETER = "by whole parameter"
    COUPLED = "not at all"


class OptimizerFinding(NamedTuple):
    """Result of a probe: the way in which an optimizer may be sharded, and whether its step changes gradients."""

    kind: ShardingKind
    changes_gradients: bool
    """Whether a step changes ``grad`` in place, where the program can see it.

    ``SGD(nesterov=True, foreach=True)`` is an example.
    """


_COUPLED = OptimizerFinding(ShardingKind.COUPLED, False)


def probe_optimizer(optimizer: Optimizer, step: Callable[..., Any], *, closure: bool) -> OptimizerFinding:
    """Find out whether halves of parameters, or else whole parameters, can be stepped apart with the same result.

    See Note [Optimizer probe]. The optimizer, its parameters and all random states stay as they are.

    Args:
        step: the ``step`` function of the optimizer's class.
        closure: whether the program passes a closure to ``step``.
    """
    if optimizer.defaults.get("differentiable") or any(g.get("differentiable") for g in optimizer.param_groups):
        return _COUPLED  # the program differentiates through the step of whole parameters
    states = random_states()
    try:
        for dtype in (torch.float64, torch.float32):  # some optimizers accept float32 only
            # A third party's code may raise anything on a copy of itself.
            with suppress(Exception), torch.enable_grad():
                probe = _Probe(optimizer, step, dtype, closure=closure)
                kind = probe.kind()
                same = equal_random_states(states, random_states())
                return (
                    OptimizerFinding(kind, probe.changes_gradients)
                    if same and kind is not ShardingKind.COUPLED
                    else _COUPLED
                )
            set_random_states(states)
    finally:
        set_random_states(states)
    return _COUPLED


class _Outcome(NamedTuple):
    """Parameters, settings and state of a copied optimizer after the steps of the probe."""

    values: list[torch.Tensor]
    """Values of all small parameters, also of those that were not stepped."""
    settings: list[dict[str, Any]]
    """Plain values in each group, and last in the attributes of the copy; the step of some optimizers changes these."""
    states: dict[int, Any]
    """The stepped piece and its optimizer state, by index of the small parameter."""


class _Probe:
    def __init__(self, optimizer: Optimizer, step: Callable[..., Any], dtype: torch.dtype, *, closure: bool) -> None:
        self._optimizer = optimizer
        self._step = step
        self._dtype = dtype
        self._closure = closure
        self.changes_gradients = False
        self._ignored: frozenset[str] = frozenset()
        """Attributes that may differ between ranks, since no step depends on them."""

    def kind(self) -> ShardingKind:
        whole = self._step_copy(lambda small, _: [small])
        start = [initial_values(small, self._dtype) for small in whole.values]
        changes = [float((a - b).abs().max()) for a, b in zip(whole.values, start, strict=True)]
        moved = max(changes, default=0.0)
        if not 0 < moved < float("inf"):
            return ShardingKind.COUPLED  # nothing to compare
        if any((one > 0) != (twin > 0) for one, twin in zip(changes[::2], changes[1::2], strict=True)):
            return ShardingKind.COUPLED  # it steps parameters that it holds elsewhere than in its groups
        try:
            nothing = self._step_copy(lambda *_: [])  # a rank may have no part of a group: its list is then empty
        except Exception:
            return ShardingKind.COUPLED
        self._ignored = self._find_ignorable(nothing, whole)
        if not self._have_equal_settings(nothing, whole):
            return ShardingKind.COUPLED
        limit = _TOLERANCE[self._dtype] * moved
        for kind, parts in ((ShardingKind.ELEMENTWISE, HALVES), (ShardingKind.BY_PARAMETER, EVERY_OTHER)):
            try:
                first, second = (self._step_copy(part) for part in parts)
            except Exception:
                continue
            if self._agree(whole, (first, second), start, parts, limit) and (
                kind is ShardingKind.BY_PARAMETER or _has_separable_state(whole, first, second)
            ):
                return kind
        return ShardingKind.COUPLED

    def _find_ignorable(self, nothing: _Outcome, whole: _Outcome) -> frozenset[str]:
        """Return the private flags that only a step with parameters changes, if no step depends on them.

        An example is the flag of ``SGD(fused=True)`` that says that types have yet to be checked. A copy that has the
        first values of these flags before each step must give the results of ``whole``. Not ignored are public
        attributes, which the program may read, and values of other types, such as a cached number of elements.
        """
        left, right = nothing.settings[-1], whole.settings[-1]
        ignorable = frozenset(
            key
            for key, value in right.items()
            if key.startswith("_") and value in ("True", "False") and left.get(key) != value
        )
        if ignorable:
            again = self._step_copy(lambda small, _: [small], reset=ignorable)
            if not all(map(torch.equal, again.values, whole.values)):
                return frozenset()
        return ignorable

    def _have_equal_settings(self, one: _Outcome, other: _Outcome) -> bool:
        """Return whether the settings of two copies are equal, apart from those that no step depends on."""
        left, right = (
            {key: value for key, value in outcome.settings[-1].items() if key not in self._ignored}
            for outcome in (one, other)
        )
        return one.settings[:-1] == other.settings[:-1] and left == right

    def _agree(
        self,
        whole: _Outcome,
        apart: tuple[_Outcome, _Outcome],
        start: list[torch.Tensor],
        parts: Sequence[Part],
        limit: float,
    ) -> bool:
        """Return whether each part changed as in the step of whole parameters, and nothing outside the part changed."""
        for outcome, mine, other in zip(apart, parts, parts[::-1], strict=True):
            if not self._have_equal_settings(outcome, whole):
                return False
            for i, (value, wanted, before) in enumerate(zip(outcome.values, whole.values, start, strict=True)):
                pairs = [*zip(mine(value, i), mine(wanted, i), strict=True)]
                if any(not bool(((a - b).abs() <= limit).all()) for a, b in pairs):
                    return False
                if any(not torch.equal(a, b) for a, b in zip(other(value, i), other(before, i), strict=True)):
                    return False
        return True

    def _step_copy(self, part: Part, reset: Collection[str] = ()) -> _Outcome:
        """Step ``part`` of each parameter of a copy, and return the outcome.

        Before each step the attributes named in ``reset`` get the values that they had at first.
        """
        clone, groups = self._copy_optimizer()
        first = {key: vars(clone)[key] for key in reset if key in vars(clone)}
        for group, smalls in zip(clone.param_groups, groups, strict=True):
            group["params"] = [piece for i, small in enumerate(smalls) for piece in part(small, i)]
        for number in range(_NUM_STEPS):
            for key in reset:
                vars(clone).pop(key, None)
            vars(clone).update(first)
            given = set_gradients(clone, groups, part, number)
            if self._closure:
                self._step(clone, _constant_closure)
            else:
                self._step(clone)
            if any(one.grad is None for one, _ in given):
                raise ValueError("it drops gradients")
            self.changes_gradients |= any(not torch.equal(one.grad, before) for one, before in given)  # type: ignore[arg-type]
        settings = [_plain_settings(group) for group in clone.param_groups] + [_plain_settings(vars(clone))]
        states: dict[int, Any] = {}
        i = 0
        for group, smalls in zip(clone.param_groups, groups, strict=True):
            pieces = iter(group["params"])
            for j, small in enumerate(smalls):
                for _ in part(small, j):
                    piece = next(pieces)
                    states[i] = (piece, clone.state.get(piece, {}))
                i += 1
        return _Outcome([small.detach() for smalls in groups for small in smalls], settings, states)

    def _copy_optimizer(self) -> tuple[Any, list[list[torch.Tensor]]]:
        """Return a copy of the optimizer with a few small parameters in each group, and these parameters by group."""
        optimizer = self._optimizer
        memo: dict[int, Any] = {id(vars(optimizer).get("state")): defaultdict(dict)}
        for group in optimizer.param_groups:
            for p in group["params"]:
                shape = (2,) * (0 if is_lazy(p) else p.dim())
                tiny = torch.zeros(shape, dtype=self._dtype, device="cpu", requires_grad=True)
                memo[id(p)] = tiny
        groups, seen = [], set()
        for group in optimizer.param_groups:
            settings = repr(sorted((k, v) for k, v in _plain_settings(group).items() if k not in ("lr", "initial_lr")))
            groups.append(self._copy_small_parameters(group["params"], memo, _SHORT_SIDE if settings in seen else CAP))
            seen.add(settings)
        clone = object.__new__(type(optimizer))
        memo[id(optimizer)] = clone
        for key, value in vars(optimizer).items():
            if key == "state":
                value = defaultdict(dict)
            elif key in ("step", "zero_grad"):  # wrapped by a scheduler
                continue
            elif key in ("grad_scale", "found_inf"):  # set by a GradScaler for a step
                value = None
            elif key.endswith("_hooks"):
                value = OrderedDict()
            elif key == "param_groups":
                value = [copy_group(group, smalls, memo) for group, smalls in zip(value, groups, strict=True)]
            else:
                value = copy.deepcopy(value, memo)
            vars(clone)[key] = value
        return clone, groups

    def _copy_small_parameters(
        self, params: Sequence[torch.Tensor], memo: dict[int, Any], cap: int
    ) -> list[torch.Tensor]:
        """Return two small copies each of the smallest and the largest parameter of each number of dimensions."""
        found: list[torch.Tensor] = []
        for p in typical_parameters(params):
            for _ in range(2):
                small = torch.empty(capped_shape(p.shape, cap), dtype=self._dtype, device=p.device)
                found.append(initial_values(small, self._dtype).requires_grad_())
            memo[id(p)] = found[-2]
        return found


def _has_separable_state(whole: _Outcome, *halves: _Outcome) -> bool:
    """Return whether the state of a parameter can be gathered from its halves.

    Each entry must have one value per element, or be one value that is equal for both halves.
    """
    for i, (small, state) in whole.states.items():
        pieces = [half.states[i] for half in halves if i in half.states]
        if not isinstance(state, dict) or any(set(state) != set(other) for _, other in pieces):
            return False
        for key, value in state.items():
            for piece, other in pieces:
                other_value = other[key]
                if isinstance(value, torch.Tensor) and value.dim():
                    if value.shape != small.shape or other_value.shape != piece.shape:
                        return False
                elif isinstance(value, (torch.Tensor, int, float, bool, str, type(None))):
                    if type(other_value) is not type(value) or not bool(other_value == value):
                        return False
                else:
                    return False
    return True


def _plain_settings(settings: dict[str, Any]) -> dict[str, Any]:
    plain = (int, float, bool, str, tuple, type(None))
    found: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            found[key] = value.item()
        elif isinstance(value, plain):
            found[key] = repr(value)  # as text, since nan is not equal to itself
    return found


def _constant_closure() -> torch.Tensor:
    return torch.ones((), device="cpu", requires_grad=True)


# Note [Optimizer probe]
#
# A list of names would say nothing about a third party's optimizer, and a wrong guess silently gives wrong weights:
# half of a matrix factors differently from the whole matrix (Adafactor), has another norm (LARS), and has other
# singular vectors (Muon). So lagom runs copies of the optimizer, with its settings (but a learning rate of 0.01) and
# attributes, for a dozen steps on small parameters: first a copy that steps all parameters whole; then one that steps
# none, since a rank may have no part of a group; then two copies that step the first and the second half of each
# parameter's memory, as flat tensors, like two ranks; then two copies that step every other parameter. If the halves
# give the results of the first copy, and change nothing else, the optimizer is sharded by element; otherwise, if every
# other parameter does, by whole parameter. This assumes that the method does not change after more steps or with larger
# sizes; sizes up to 256 by 256 are tried unshortened. To be sharded by element, an optimizer must have state with one
# value per element, or equal for both halves, so that the state can be gathered.
#
# An optimizer is coupled if it draws random numbers (ranks would draw different amounts), cannot be copied, raises when
# it is stepped in parts, changes no parameter of the copy, drops gradients, is differentiable, or holds its parameters
# elsewhere than in its groups (LBFGS): then one of two copies of a parameter moves, and the other does not. A coupled
# optimizer gives the right results, and saves nothing.
#
# A rank without any part keeps the settings of an optimizer that has stepped nothing. So these must be those of the
# others, but for private flags on which no step depends: torch's fused SGD and Adagrad check types once, and note it.
