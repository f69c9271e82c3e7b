"""``ShardedOptimizer``: one optimizer whose step and state are divided over the ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from lagom.errors import LagomError
from lagom.exchange.agreement_exchange import signature
from lagom.extensions.zero.kept_optimizer_state import KeptOptimizerState, StateOfOptimizer, collect_piece
from lagom.extensions.zero.optimizer_shards import OptimizerShards
from lagom.extensions.zero.optimizer_state import cut_state, gather_states, outline_states
from lagom.extensions.zero.partition import ParameterPiece
from lagom.extensions.zero.publish import ParameterPublisher
from lagom.extensions.zero.sharded_state import ShardedState
from lagom.run_state.memory_layout import flatten_like, flatten_memory

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from torch.optim import Optimizer

    from lagom.exchange.agreement_exchange import AgreedExchange
    from lagom.exchange.group import Group
    from lagom.extensions.zero.gradient_shards import GradientShards
    from lagom.extensions.zero.kept_optimizer_state import Ranges
    from lagom.extensions.zero.optimizer_probe import OptimizerFinding
    from lagom.extensions.zero.optimizer_state import HeldState
    from lagom.extensions.zero.parameters.shards import ParameterShards


WHOLE, OUTLINE = -1, -2
"""Requests for the whole state and for its outline; other requests are for one parameter, by its index."""


class ShardedOptimizer:
    """Swaps a rank's shards into an optimizer for its step, and publishes the changes. See Note [Stepping a part].

    Args:
        number: number of the optimizer, equal on all ranks.
        finding: how the optimizer can be stepped in parts, never ``ShardingKind.COUPLED``.
        parameters: the sharded parameters; the others are stepped whole on every rank.
        gradients: has the shards of gradients; None if gradients are whole (``zero_lvl=1``).
        weights: has the shards of parameters; None if parameters are whole (``zero_lvl`` below 3).
    """

    def __init__(
        self,
        group: Group,
        frame: AgreedExchange,
        number: int,
        finding: OptimizerFinding,
        optimizer: Optimizer,
        parameters: list[torch.Tensor],
        gradients: GradientShards | None = None,
        weights: ParameterShards | None = None,
    ) -> None:
        self.number = number
        self.finding = finding
        self.parameters = parameters
        self.clock = 0
        """Number of steps begun plus steps published: equal on two ranks whose shards belong to the same state."""
        self.part: Any = defaultdict(dict)
        """The optimizer state that this rank keeps: that of this rank's pieces, and of all unsharded parameters."""
        self._group = group
        self._frame = frame
        self._weights = weights
        self._given = {} if weights is None else {i: x for i, p in enumerate(parameters) if (x := weights.parts(p))}
        """Each rank's part of the parameters that are themselves sharded, by index of the parameter."""
        self._shards = OptimizerShards(optimizer, parameters, self._given, finding, group)
        self.pieces = self._shards.pieces
        """The pieces that each rank steps, by rank."""
        self.idle = self._shards.idle
        """The optimizer's parameters that are not sharded."""
        self._whole: list[list[torch.Tensor]] = []
        """The program's parameters of each group, kept here while the groups hold this rank's pieces."""
        shapes = [(tuple(p.shape), p.dtype) for p in parameters]
        self.identity = repr((number, finding, shapes)).encode()
        """Bytes that are equal on two ranks if they divide the same parameters into the same parts."""
        self._order: list[int] = []
        """Ids of the parameters in the order in which they got state; the gathered state has the same order."""
        self._publisher: ParameterPublisher | None = None
        self._gradients = gradients
        self._lent_shards: list[torch.Tensor] = []
        """Parameters that this rank steps whole, and whose ``grad`` is set to this rank's shard for the step."""
        self._changes_gradients = finding.changes_gradients
        self._published: dict[str, bytes] = {}

    @property
    def is_current(self) -> bool:
        """Whether the parameters are still sharded as they were when the optimizer was sharded."""
        return self._weights is None or all(
            self._weights.parts(p) == self._given.get(i) for i, p in enumerate(self.parameters)
        )

    def step_identity(self) -> bytes:
        """Return bytes that are equal on ranks that are about to make the same step."""
        if self._gradients is not None:
            return self.identity + bytes(self._gradients.has_gradient(p) for p in self.parameters)
        return self.identity + bytes(p.grad is not None for p in self.parameters)

    @contextmanager
    def swap_in(self, optimizer: Optimizer) -> Iterator[None]:
        """Give the optimizer this rank's pieces as parameters, with their gradients and their state, in the block."""
        self._whole = [group["params"] for group in optimizer.param_groups]
        self._swap(optimizer)
        try:
            yield
        finally:
            self._swap_back(optimizer)
            self._whole = []
            self._count_step()

    @contextmanager
    def swap_out(self, optimizer: Optimizer) -> Iterator[None]:
        """Give the optimizer its whole parameters back for a block inside ``swap_in``, and swap again afterwards.

        The block is a closure, which may change gradients.
        """
        self._swap_back(optimizer)
        self._count_step()
        try:
            yield
        finally:
            self._swap(optimizer)

    def _count_step(self) -> None:
        if self._weights is not None:
            given = [self.parameters[i] for i in self._given]
            self._weights.count_step(given, changed=[p for p in given if self._has_gradient(p)])

    def _swap(self, optimizer: Optimizer) -> None:
        if self._gradients is None:
            for parameter in self.parameters:
                # Read every gradient, in the same order on all ranks: a read may be an exchange between the ranks.
                # See Note [Accumulation] in gradients/accumulation.py.
                _ = parameter.grad
        elif self._changes_gradients:
            self._gradients.cut_gradients(self.parameters)
        if self._weights is not None:
            self._weights.update_shards(self.parameters)
        for group, own in zip(optimizer.param_groups, self._shards.lists, strict=True):
            group["params"] = own
        for piece, stand_in in self._shards.partial:
            parameter = self.parameters[piece.param]
            line = _shape_like(self._own_elements(piece, parameter), parameter)
            if stand_in.data_ptr() != line.data_ptr() or stand_in.dtype != line.dtype:
                with nullcontext() if self._weights is None else self._weights.mark_busy():
                    stand_in.data = line
            is_cut, part = self._gradient_shard(parameter)
            if is_cut:
                stand_in.grad = None if part is None else _shape_like(part, parameter)
                continue
            gradient = parameter.grad
            if self._changes_gradients and gradient is not None and gradient.stride() != parameter.stride():
                gradient = parameter.grad = torch.empty_like(parameter).copy_(gradient.to_dense())
            part = None if gradient is None else flatten_like(gradient, parameter)[piece.start : piece.end]
            stand_in.grad = None if part is None else _shape_like(part, parameter)
        for _, stand_in in self._shards.own:
            is_cut, part = self._gradient_shard(stand_in)
            if is_cut and part is not None:
                self._lent_shards.append(stand_in)
                lent = part.as_strided(stand_in.shape, stand_in.stride())
                with self._hide_shards():
                    stand_in.grad = lent
        vars(optimizer)["state"] = self.part

    def _own_elements(self, piece: ParameterPiece, parameter: torch.Tensor) -> torch.Tensor:
        if self._weights is not None and piece.param in self._given:
            return self._weights.own_elements(parameter, piece)
        return flatten_memory(parameter)[piece.start : piece.end]

    def _gradient_shard(self, parameter: torch.Tensor) -> tuple[bool, torch.Tensor | None]:
        return (False, None) if self._gradients is None else self._gradients.own_shard(parameter)

    def _hide_shards(self) -> AbstractContextManager[None]:
        return nullcontext() if self._gradients is None else self._gradients.hide_shards()

    def _swap_back(self, optimizer: Optimizer) -> None:
        self.part = vars(optimizer)["state"]
        vars(optimizer)["state"] = ShardedState(self)
        for _, stand_in in self._shards.partial:
            stand_in.grad = None
        with self._hide_shards():
            for parameter in self._lent_shards:
                parameter.grad = None
        self._lent_shards.clear()
        for group, one in zip(optimizer.param_groups, self._whole, strict=True):
            group["params"] = one

    def whole_gradients(self) -> dict[int, torch.Tensor]:
        """Return the gradients that are whole on every rank, by index of the parameter."""
        own_whole = (lambda p: p.grad) if self._gradients is None else self._gradients.whole_gradient
        return {i: g for i, p in enumerate(self.parameters) if (g := own_whole(p)) is not None}

    def publish(self, place: str) -> bool:
        """Send this rank's pieces to all ranks if all are at ``place``, and return whether all are; a collective.

        At level 1, gradients that the step may have changed are sent too.
        """
        if self._publisher is None or not self._publisher.is_current:
            whole = [i for i in range(len(self.parameters)) if i not in self._given]
            number = {i: number for number, i in enumerate(whole)}
            pieces = [[p._replace(param=number[p.param]) for p in part] for part in self._shards.plain_pieces]
            self._publisher = ParameterPublisher(self._group, self._frame, [self.parameters[i] for i in whole], pieces)
        signed = self._published.get(place)
        if signed is None:
            signed = self._published[place] = signature(place.encode() + self.identity)
        if not self._publisher.publish(signed):
            return False
        if changed := [p for i, p in enumerate(self.parameters) if i not in self._given and self._has_gradient(p)]:
            torch.autograd.graph.increment_version(changed)
        return not self._changes_gradients or self._gradients is not None or self._publish_gradients(signed)

    def _has_gradient(self, parameter: torch.Tensor) -> bool:
        """Return whether the parameter has a gradient.

        A parameter without one is not stepped, so its version must stay: an autograd graph may have saved its values.
        """
        return parameter.grad is not None if self._gradients is None else self._gradients.has_gradient(parameter)

    def _publish_gradients(self, signed: bytes) -> bool:
        present = {i: p.grad for i, p in enumerate(self.parameters) if p.grad is not None}
        place = {i: number for number, i in enumerate(present)}
        pieces = [[p._replace(param=place[p.param]) for p in part if p.param in place] for part in self.pieces]
        gradients = list(present.values())
        torch.autograd.graph.increment_version(gradients)
        return ParameterPublisher(self._group, self._frame, gradients, pieces).publish(signed)

    def held(self) -> StateOfOptimizer:
        """Return the optimizer's state without the values that ``collect`` gives, for a snapshot."""
        place = {key: i for i, key in enumerate(self._order)}
        mine = {id(stand_in) for _, stand_in in self._shards.own}
        return StateOfOptimizer(
            key=self.number,
            kind=self.finding.kind.value,
            changes_gradients=self.finding.changes_gradients,
            parameters=self.parameters,
            every=sorted(self._shards.every, key=lambda p: place.get(id(p), len(place))),
            rest=[(key, state) for key, state in self.part.items() if id(key) not in mine],
            is_default=isinstance(self.part, defaultdict),
        )

    def collect(self, values: dict[Any, Any], ranges: Ranges) -> None:
        """Add the state of this rank's pieces to ``values`` and ``ranges``, for a snapshot.

        Raises:
            LagomError: if a parameter's state is no dict.
        """
        for piece, stand_in in self._shards.own:
            state = self.part.get(stand_in, {})
            if not isinstance(state, Mapping):
                raise LagomError(f"an optimizer keeps a {type(state).__name__} for a parameter, not a dict of values")
            collect_piece(self.number, piece, self.parameters[piece.param], state, values, ranges)

    def keep_state(self, whole: Any) -> None:
        """Keep this rank's part of the optimizer's state, ``whole`` or a ``KeptOptimizerState``, for the next step."""
        if isinstance(whole, KeptOptimizerState):
            self._keep_from_files(whole)
            return
        part = defaultdict(whole.default_factory) if isinstance(whole, defaultdict) else type(whole)()
        shared = {id(p) for p in self.parameters}
        for key, state in whole.items():
            if not isinstance(key, torch.Tensor) or id(key) not in shared:
                part[key] = state
        for piece, stand_in in self._shards.own:
            parameter = self.parameters[piece.param]
            if parameter in whole:
                part[stand_in] = _own_state(whole[parameter], parameter, piece)
        self.part = part
        self._order = [id(key) for key in whole]

    def _keep_from_files(self, kept: KeptOptimizerState) -> None:
        shared = {id(p) for p in self.parameters}
        self.part = kept.held.new_state()
        self.part.update((key, state) for key, state in kept.held.rest if id(key) not in shared)
        for p in kept.held.parameters:
            if id(p) not in shared and kept.has(p):
                self.part[p] = kept.read(ParameterPiece(0, 0, p.numel()), p)
        whole = {id(key): state for key, state in kept.held.rest}
        for piece, stand_in in self._shards.own:
            parameter = self.parameters[piece.param]
            if id(parameter) in whole:
                self.part[stand_in] = _own_state(whole[id(parameter)], parameter, piece)
            elif kept.has(parameter):
                self.part[stand_in] = kept.read(piece, parameter)
        self._order = [id(key) for key in kept.held.every if kept.has(key)]

    def serve_state(self, what: int) -> None:
        """Take part in another rank's ``gather_state`` or ``outline``, or, with an index, its ``gather_entry``."""
        if what == OUTLINE:
            self.outline()
        else:
            self._gather_states(keep=False, only=None if what == WHOLE else what)

    def outline(self) -> list[dict[str, HeldState] | None]:
        """Return what the state of each sharded parameter consists of, without values of large tensors; a collective.

        Raises:
            DivergenceError, LagomError: as ``gather_state``.
        """
        return outline_states(self._group, self.parameters, self.pieces, self._own_states())

    def gather_entry(self, index: int) -> dict[str, Any]:
        """Return the whole state of one sharded parameter; a collective."""
        return self._gather_states(keep=True, only=index)[index] or {}

    def set_entry(self, index: int, name: str, value: Any) -> None:
        """Keep this rank's part of ``value``, which is ``name`` in the state of one sharded parameter."""
        for piece, stand_in in self._shards.own:
            if piece.param == index and isinstance(state := self.part.get(stand_in), dict):
                own = _own_state({name: value}, self.parameters[index], piece)[name]
                kept = state.get(name)
                if isinstance(kept, torch.Tensor) and isinstance(own, torch.Tensor) and kept.shape == own.shape:
                    kept.copy_(own)
                else:
                    state[name] = own

    def gather_state(self) -> Any:
        """Return the optimizer's whole state, in the order in which the parameters got state; a collective.

        Raises:
            DivergenceError: on all ranks, when a rank does not have its part of the state.
            LagomError: when the state has objects that are neither plain values nor tensors.
        """
        states = self._gather_states(keep=True)
        whole = defaultdict(self.part.default_factory) if isinstance(self.part, defaultdict) else type(self.part)()
        by_id = {id(p): state for p, state in zip(self.parameters, states, strict=True) if state is not None}
        place = {key: i for i, key in enumerate(self._order)}
        for p in sorted(self._shards.every, key=lambda p: place.get(id(p), len(place))):
            if id(p) in by_id:
                whole[p] = by_id[id(p)]
            elif p in self.part and any(p is idle for idle in self.idle):
                whole[p] = self.part[p]
        mine = {id(stand_in) for _, stand_in in self._shards.own}
        for key, state in self.part.items():
            if id(key) not in mine and key not in whole:
                whole[key] = state
        return whole

    def _own_states(self) -> dict[ParameterPiece, Any]:
        return {piece: self.part.get(one, {}) for piece, one in self._shards.own}

    def _gather_states(self, *, keep: bool, only: int | None = None) -> list[dict[str, Any] | None]:
        pieces = [[piece for piece in own if only in (None, piece.param)] for own in self.pieces]
        return gather_states(self._group, self.parameters, pieces, self._own_states(), keep=keep)

    def num_bytes(self) -> int:
        """Return the bytes of the state that this rank holds."""
        held = [state.values() for state in self.part.values() if isinstance(state, dict)]
        return sum(value.nbytes for values in held for value in values if isinstance(value, torch.Tensor))


def _own_state(state: Any, parameter: torch.Tensor, piece: ParameterPiece) -> Any:
    """Return what belongs to ``piece`` of a whole parameter's state."""
    is_all = piece.end - piece.start == parameter.numel() or not isinstance(state, dict)
    return state if is_all else cut_state(state, parameter, piece)


def _shape_like(line: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return ``line`` in the shape of ``parameter`` if both have as many elements; else return ``line`` flat."""
    return line.as_strided(parameter.shape, parameter.stride()) if len(line) == parameter.numel() else line


# Note [Stepping a part]
#
# The optimizer stays the object that schedulers, scalers and the program hold, but its step is divided over the ranks.
# If it works element by element, the parameters are laid end to end and cut into one range of elements for each rank.
# Otherwise each parameter is assigned whole to one rank. (With zero_lvl=3, a parameter whose memory is sharded keeps
# its parts.) Parameters that are not divided are stepped on every rank.
#
# During a step, the optimizer's groups hold the tensors that this rank steps. A parameter that is wholly inside the
# rank's range is in the group itself. A parameter partly inside is replaced by a tensor with the rank's elements (a
# view of the parameter's memory, or its shard with zero_lvl=3), and with the same elements of the gradient. The
# optimizer's state is the state of these tensors.
#
# After the step, the groups hold the program's parameters again. Each rank sends the new values of its elements to all
# others, which write them into their parameters. Parameters whose memory is sharded are not sent. A closure sees the
# program's parameters: before it runs, groups and state are put back and the values so far are sent; after it has run,
# the groups hold this rank's tensors again.
#
# Before a step, the ranks check that all of them are about to make the same step. So outside of a step all ranks have
# made the same number of steps, and any rank may request the whole state at any time. See Note [Asking] in
# exchange/requests.py.
#
# A whole state that was requested stays in the optimizer until its next step. That step keeps this rank's part of it,
# so the program's changes to the state, or a loaded state, are not lost. Unlike on one process, where the tensors in a
# state_dict() change with the next step, the tensors of a gathered state are copies, which do not change.
