"""``OptimizerGroup``: all optimizers of a run; coordinates the ranks at steps and when optimizer state is read."""

from __future__ import annotations

import gc
import threading
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from torch.nn.parameter import is_lazy

from lagom.errors import LagomError
from lagom.exchange.agreement_exchange import signature
from lagom.exchange.plain_values import all_gather_values
from lagom.extensions.zero.gradient_shards import ASK
from lagom.extensions.zero.kept_optimizer_state import KeptOptimizerState, Ranges
from lagom.extensions.zero.optimizer_probe import OptimizerFinding, ShardingKind, probe_optimizer
from lagom.extensions.zero.parameters.shards import WEIGHTS
from lagom.extensions.zero.sharded_optimizer import OUTLINE, WHOLE, ShardedOptimizer
from lagom.extensions.zero.sharded_state import ShardedState, refuse_state
from lagom.extensions.zero.step_mismatch import StepSignature, group_settings, raise_step_mismatch
from lagom.gradients.checksum import checksums
from lagom.gradients.divergence import INTERVAL
from lagom.run_state.memory_layout import find_overlapping, is_dense

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch
    from torch.optim import Optimizer

    from lagom.exchange.agreement_exchange import AgreedExchange
    from lagom.exchange.group import Group
    from lagom.extensions.zero.gradient_shards import GradientShards
    from lagom.extensions.zero.optimizer_state import HeldState
    from lagom.extensions.zero.parameters.shards import ParameterShards
    from lagom.gradients.divergence import DivergenceMonitor

_FIRST = "the first optimizer.step()"
_BEFORE = "optimizer.step()"
_AFTER = "the end of optimizer.step()"
_CLOSURE = "a closure of optimizer.step()"


class _OptimizerFinding(NamedTuple):
    """Remembers how an optimizer may be sharded, as long as it has the parameters with which it was probed."""

    number: int
    finding: OptimizerFinding
    parameters: tuple[int, ...]
    """Ids of its parameters at the time of the finding."""


class OptimizerGroup:
    """Steps optimizers in shards, and gathers their state when the program reads it.

    Args:
        gradients: has the shards of gradients; None if gradients stay whole (``zero_lvl=1``).
        weights: has the shards of parameters; None if parameters are whole (``zero_lvl`` below 3).
        is_own: returns whether a parameter is this rank's own, and not equal on all ranks.
        say: logs a line, once.
        name: returns the name of a parameter for an error.
    """

    def __init__(
        self,
        group: Group,
        frame: AgreedExchange,
        divergence: DivergenceMonitor,
        gradients: GradientShards | None = None,
        weights: ParameterShards | None = None,
        *,
        is_own: Callable[[torch.Tensor], bool],
        say: Callable[[str], None],
        name: Callable[[torch.Tensor | None], str],
    ) -> None:
        self._group = group
        self._frame = frame
        self._divergence = divergence
        self._gradients = gradients
        self._weights = weights
        self._is_own = is_own
        self._say = say
        self._name = name
        self._thread = threading.get_ident()
        self._busy = False
        self._found: weakref.WeakKeyDictionary[Optimizer, _OptimizerFinding] = weakref.WeakKeyDictionary()
        self._sharded: weakref.WeakKeyDictionary[Optimizer, ShardedOptimizer] = weakref.WeakKeyDictionary()
        self._by_number: dict[int, ShardedOptimizer] = {}
        """Sharded optimizers by number.

        An optimizer that is gone on this rank stays here until the next step: another rank may still use it.
        """
        self._gone: list[int] = []
        """Numbers of optimizers that are gone on this rank since the last step."""
        self._overlapping: set[int] = set()
        """Ids of parameters that share memory, and are not sharded: several ranks could step the same memory."""
        self._num = 0
        self._num_steps = 0
        self._next_check = 1
        group.serve = self._serve

    @property
    def runs_unchanged(self) -> bool:
        """Whether a step that begins now runs unchanged, since it is part of another optimizer's step or of a probe."""
        return self._busy

    def step(
        self, optimizer: Optimizer, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run ``inner(optimizer, ...)``, the class's own step, on this rank's shard; a collective.

        An optimizer that cannot be sharded steps all parameters on every rank, without an exchange once it is probed.
        Otherwise ranks compare which optimizer steps, its settings and which parameters have gradients; now and then
        also checksums of gradients that are whole.

        Raises:
            DivergenceError: on all ranks, if the compared values differ.
            LagomError: if another thread than the main one calls this, or the optimizer cannot be used at this level.
        """
        if threading.get_ident() != self._thread:
            raise LagomError(
                "optimizer.step() is called in a thread; with zero_lvl it must be in the program's main one"
            )
        sharded = self._find_shards(optimizer, inner, args, kwargs)
        if sharded is None:
            return inner(optimizer, *args, **kwargs)
        self._check_step(optimizer, sharded)
        state = vars(optimizer)["state"]
        if not isinstance(state, ShardedState):
            sharded.keep_state(state)
        args, kwargs = self._wrap_closure(optimizer, sharded, args, kwargs)
        sharded.clock += 1
        with self._mark_busy(), sharded.swap_in(optimizer):
            result = inner(optimizer, *args, **kwargs)
        self._publish(sharded, _AFTER)
        sharded.clock += 1
        return result

    def state(self, optimizer: Optimizer) -> Any:
        """Return ``optimizer.state``; if it is sharded, gather the whole state from all ranks first.

        In another thread than the main one, a sharded state is returned as its placeholder, ``ShardedState``.

        Raises:
            DivergenceError: on all ranks, if a rank cannot give its part.
            LagomError: if the state has objects that are neither plain values nor tensors.
        """
        state = vars(optimizer)["state"]
        if isinstance(state, KeptOptimizerState) and threading.get_ident() == self._thread:
            state = vars(optimizer)["state"] = state.whole()
        if not isinstance(state, ShardedState):
            return state
        if threading.get_ident() != self._thread:
            return state  # ShardedState raises an error when it is used
        sharded: ShardedOptimizer = vars(state)["sharded"]
        self._request(sharded, WHOLE)
        whole = sharded.gather_state()
        if vars(optimizer)["state"] is state:
            vars(optimizer)["state"] = whole
        return whole

    def sharded(self, optimizer: Optimizer) -> ShardedOptimizer | None:
        """Return the shards of an optimizer while its state is in shards; None while the optimizer has it whole."""
        state = vars(optimizer).get("state")
        found: ShardedOptimizer | None = vars(state)["sharded"] if isinstance(state, ShardedState) else None
        return found

    def outline(self, sharded: ShardedOptimizer) -> list[dict[str, HeldState] | None]:
        """Request from all ranks what the state of each sharded parameter consists of, without the values."""
        self._request(sharded, OUTLINE)
        return sharded.outline()

    def entry(self, sharded: ShardedOptimizer, index: int) -> dict[str, Any]:
        """Request from all ranks the whole state of one sharded parameter; return copies of its values."""
        self._request(sharded, index)
        return sharded.gather_entry(index)

    @contextmanager
    def shown_state(self, optimizer: Optimizer, state: Any) -> Iterator[None]:
        """Let ``optimizer`` have ``state`` in the block, in place of its sharded state."""
        before, vars(optimizer)["state"] = vars(optimizer)["state"], state
        try:
            yield
        finally:
            vars(optimizer)["state"] = before

    def _request(self, sharded: ShardedOptimizer, what: int) -> None:
        self._group.ask(b"state %d %d %d" % (sharded.number, sharded.clock, what))

    def collect(self, values: dict[Any, Any], ranges: Ranges) -> list[tuple[int, int]]:
        """Add this rank's parts of all sharded states to ``values`` and ``ranges``; return numbers and clocks."""
        mine = {s.number: s for o, s in list(self._sharded.items()) if isinstance(vars(o).get("state"), ShardedState)}
        for _, sharded in sorted(mine.items()):
            sharded.collect(values, ranges)
        return [(number, sharded.clock) for number, sharded in sorted(mine.items())]

    def end(self) -> None:
        """Gather the whole state of each optimizer that still exists on all ranks; a collective.

        Call this at the end of the user's function, which may return an optimizer or its state.
        """
        if self._by_number:
            gc.collect()  # an optimizer that nobody uses may still exist: it and its scheduler reference each other
        mine = {s.number: o for o, s in list(self._sharded.items()) if isinstance(vars(o).get("state"), ShardedState)}
        rows = all_gather_values(self._group, sorted(mine))
        for number in sorted(set.intersection(*map(set, rows))):
            vars(mine[number])["state"] = self._sharded[mine[number]].gather_state()
        self._by_number.clear()
        self._group.serve = None

    def _find_shards(
        self, optimizer: Optimizer, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> ShardedOptimizer | None:
        """Return the shards in which to step ``optimizer``; None if it is stepped whole."""
        every = tuple(id(p) for group in optimizer.param_groups for p in group["params"])
        known = self._found.get(optimizer)
        sharded = self._sharded.get(optimizer)
        if known is None or known.parameters != every:
            if sharded is not None:
                self.state(optimizer)  # gather the state, to shard it anew
            known = self._probe(optimizer, every, inner, args, kwargs, known)
            sharded = None
        if known.finding.kind is ShardingKind.COUPLED:
            return None
        if (
            sharded is None
            or not sharded.is_current
            or any(self._has_gradient(p) and self._can_shard(p) for p in sharded.idle)
        ):
            sharded = self._shard_parameters(optimizer, known, sharded)
        if any(self._is_own(p) for p in sharded.parameters):
            raise LagomError(
                "a tensor that an optimizer has stepped on all ranks alike has become this rank's own, which zero_lvl "
                "cannot tell apart; give the tensors that are made from the batch an optimizer of their own"
            )
        return sharded

    def _probe(
        self,
        optimizer: Optimizer,
        every: tuple[int, ...],
        inner: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        before: _OptimizerFinding | None,
    ) -> _OptimizerFinding:
        """Find out how the optimizer can be sharded, and check that all ranks find the same; a collective."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if self._weights is not None:
            for p in parameters:
                if self._weights.parts(p) is None:
                    self._weights.release(p)  # a view into sharded memory; otherwise this does nothing
            parameters = [p for p in parameters if self._weights.parts(p) is None]
        self._overlapping.update(find_overlapping(parameters))
        number = self._num if before is None else before.number
        self._num += before is None
        known = not (set(kwargs) - {"closure"} or len(args) > 1) and "state" in vars(optimizer)
        finding = OptimizerFinding(ShardingKind.COUPLED, False)
        kept = vars(optimizer).get("state")
        if known and isinstance(kept, KeptOptimizerState) and kept.is_of(every):
            finding = kept.held.finding
        elif known and len(set(every)) == len(every):
            closure = args[0] if args else kwargs.get("closure")
            with self._mark_busy():
                finding = probe_optimizer(optimizer, inner, closure=closure is not None)
        if not self._frame.exchange(signature(f"{_FIRST} {number} {finding}".encode())):
            self._raise_mismatch(_FIRST)
        self._log_kind(type(optimizer).__name__, finding)
        found = self._found[optimizer] = _OptimizerFinding(number, finding, every)
        return found

    def _log_kind(self, name: str, finding: OptimizerFinding) -> None:
        """Log how an optimizer is stepped, unless it is stepped element by element.

        Raises:
            LagomError: with ``zero_lvl=3``, if the optimizer steps by whole parameters.
        """
        if finding.kind is ShardingKind.COUPLED:
            self._say(
                f"{name} is not shared out over the ranks, but stepped whole on each: what it makes of a parameter "
                "depends on others, on random numbers, or could not be found out. That is right, and saves no memory"
            )
        elif finding.kind is ShardingKind.BY_PARAMETER and self._weights is not None:
            raise LagomError(
                f"{name} steps by whole parameters (it factors them, or uses their norms), but with zero_lvl=3 each "
                "rank has a part of every parameter; use zero_lvl=2, or an optimizer that steps element by element"
            )
        elif finding.kind is ShardingKind.BY_PARAMETER:
            self._say(f"{name} steps by whole parameters; each rank steps some, and holds their state")

    def _can_shard(self, p: torch.Tensor) -> bool:
        """Return whether ``p`` can be sharded."""
        if id(p) in self._overlapping or is_lazy(p) or not p.numel() or not is_dense(p) or self._is_own(p):
            return False
        if self._gradients is not None and self._gradients.is_sharded(p):
            return True
        return p.grad is None or not p.grad.is_sparse

    def _has_gradient(self, p: torch.Tensor) -> bool:
        return p.grad is not None if self._gradients is None else self._gradients.has_gradient(p)

    def _shard_parameters(
        self, optimizer: Optimizer, found: _OptimizerFinding, before: ShardedOptimizer | None
    ) -> ShardedOptimizer:
        """Shard the optimizer's parameters that have gradients, or optimizer state.

        If ``before`` has the optimizer's earlier shards, shard all parameters that can be sharded: those without a
        gradient now may get one later.
        """
        weights = self._weights
        kept = vars(optimizer)["state"]
        has_state = kept.has if isinstance(kept, KeptOptimizerState) else self.state(optimizer).__contains__
        every = [p for group in optimizer.param_groups for p in group["params"]]
        able = [
            p for p in every if self._can_shard(p) and (self._has_gradient(p) or before is not None or has_state(p))
        ]
        sharded = ShardedOptimizer(
            self._group, self._frame, found.number, found.finding, optimizer, able, self._gradients, weights
        )
        # Compare the values between ranks: no exchange has compared a parameter that no backward has reached yet.
        sums = repr([(checksums if weights is None else weights.checksums)(dict(enumerate(able))), sharded.identity])
        if not self._frame.exchange(signature(_FIRST.encode() + sums.encode())):
            self._raise_mismatch(_FIRST)
        self._sharded[optimizer] = self._by_number[found.number] = sharded
        if self._gradients is not None:
            self._gradients.gather(p for p in able if weights is None or weights.parts(p) is None)
            self._gradients.assign(found.number, able, sharded.pieces)
        weakref.finalize(optimizer, self._gone.append, found.number).atexit = False
        return sharded

    @contextmanager
    def _mark_busy(self, *, busy: bool = True) -> Iterator[None]:
        before, self._busy = self._busy, busy
        try:
            yield
        finally:
            self._busy = before

    def _check_step(self, optimizer: Optimizer, sharded: ShardedOptimizer) -> None:
        """Check that all ranks are about to make the same step; now and then also that whole gradients are equal."""
        self._num_steps += 1
        sums: dict[int, tuple[str, int]] | None = None
        if self._num_steps >= self._next_check:
            self._next_check += min(self._num_steps, INTERVAL)
            sums = checksums(sharded.whole_gradients())
        # List the objects that are gone before the exchange. After the exchange all ranks have passed the same point,
        # so no rank requests them. An object that goes after this line may still exist on another rank.
        gone, self._gone[:] = list(self._gone), []
        gone_units = [] if self._weights is None else self._weights.find_dead()
        settings = group_settings(optimizer)
        if not self._frame.exchange(
            signature(repr((_BEFORE, sharded.step_identity(), sharded.clock, sums, settings)).encode())
        ):
            self._raise_mismatch(_BEFORE, StepSignature(sharded.identity, sharded.parameters, sums, settings))
        for number in gone:
            self._by_number.pop(number, None)
        if self._weights is not None:
            self._weights.forget(gone_units)

    def _wrap_closure(
        self, optimizer: Optimizer, sharded: ShardedOptimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        closure = args[0] if args else kwargs.get("closure")
        if closure is None:
            return args, kwargs

        def evaluated() -> Any:
            with sharded.swap_out(optimizer), self._mark_busy(busy=False):
                self._publish(sharded, _CLOSURE)  # the changes of the step so far
                return closure()

        return ((evaluated,), kwargs) if args else (args, kwargs | {"closure": evaluated})

    def _publish(self, sharded: ShardedOptimizer, place: str) -> None:
        if not sharded.publish(place):
            self._raise_mismatch(place)

    def _raise_mismatch(self, place: str, step: StepSignature | None = None) -> NoReturn:
        """Raise a DivergenceError that says how the ranks differ at ``place``."""
        self._divergence.find_divergence(place)
        raise_step_mismatch(self._group, step, self._name)

    def _serve(self, asked: bytes) -> None:
        kind, *rest = asked.split()
        if kind == WEIGHTS:
            assert self._weights is not None
            self._weights.serve(rest[0], int(rest[1]), int(rest[2]))
            return
        number, clock, *what = map(int, rest)
        if kind == ASK:
            assert self._gradients is not None
            self._gradients.serve(number, clock)
            return
        sharded = self._by_number.get(number)
        if sharded is None or sharded.clock != clock:
            refuse_state(self._group)
        sharded.serve_state(*what)
