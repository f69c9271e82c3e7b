"""``ShardedOptimizer``: one optimizer, of which each rank steps a part and holds the state of that part."""

from __future__ import annotations

from collections import defaultdict
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from lagom.collectives.agreement_exchange import signature
from lagom.collectives.plain_values import all_gather_values
from lagom.errors import LagomError
from lagom.run_state.memory_layout import flat, flat_like
from lagom.zero.optimizer_state import cut, gather
from lagom.zero.publish import ParameterPublisher
from lagom.zero.stand_ins import OptimizerShards

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from torch.optim import Optimizer

    from lagom.collectives.agreement_exchange import AgreedExchange
    from lagom.collectives.group import Group
    from lagom.zero.gradient_shards import GradientShards
    from lagom.zero.optimizer_probe import OptimizerNature
    from lagom.zero.parameters.shards import ParameterShards
    from lagom.zero.partition import ParameterPiece


class ShardedParameter:
    """Stands for the state of an optimizer while each rank has a part of it."""

    def __init__(self, sharded: ShardedOptimizer) -> None:
        vars(self)["sharded"] = sharded

    def __getattr__(self, name: str) -> NoReturn:
        # As an AttributeError it would be taken for an optimizer that has no such thing.
        raise LagomError(_GONE)

    def __reduce_ex__(self, _: object) -> NoReturn:
        raise LagomError(_GONE)

    def _gone(self, *_: object) -> NoReturn:
        raise LagomError(_GONE)

    __len__ = __iter__ = __contains__ = __getitem__ = _gone


_GONE = (
    "the state of this optimizer is shared out over the ranks (zero_lvl), and is asked for where the ranks cannot be "
    "reached: in another process or thread, or after the run. Take its state_dict() in the training function"
)


class ShardedOptimizer:
    """The parts of an optimizer. See Note [Stepping a part].

    Args:
        number: of the optimizer, equal on all ranks.
        nature: what of it can be stepped apart, never ``Kind.COUPLED``.
        parameters: what is shared out; the others are stepped whole on every rank.
        gradients: has parts of gradients; None where they are whole.
        weights: has parts of parameters; None where they are whole.
    """

    def __init__(
        self,
        group: Group,
        frame: AgreedExchange,
        number: int,
        nature: OptimizerNature,
        optimizer: Optimizer,
        parameters: list[torch.Tensor],
        gradients: GradientShards | None = None,
        weights: ParameterShards | None = None,
    ) -> None:
        self.number = number
        self.parameters = parameters
        self.clock = 0
        """Of steps begun and published: where it is equal on two ranks, their parts are of the same time."""
        self.part: Any = defaultdict(dict)
        """The optimizer's state as it is while it steps: that of this rank's pieces, and all that is not shared out."""
        self._group = group
        self._frame = frame
        self._weights = weights
        self._given = {} if weights is None else {i: x for i, p in enumerate(parameters) if (x := weights.parts(p))}
        """Parts of what is shared out already, by place."""
        self._stand_ins = OptimizerShards(optimizer, parameters, self._given, nature, group)
        self.pieces = self._stand_ins.pieces
        """Of each rank."""
        self.idle = self._stand_ins.idle
        """What was not shared out."""
        self._whole: list[list[torch.Tensor]] = []
        """Of each group, while the optimizer steps."""
        shapes = [(tuple(p.shape), p.dtype) for p in parameters]
        self.identity = repr((number, nature, shapes)).encode()
        """Equal on ranks that have the same parts of the same parameters."""
        self._order: list[int] = []
        """Ids of the parameters that had state first: a state_dict() tells."""
        self._publisher: ParameterPublisher | None = None
        self._gradients = gradients
        self._lent: list[torch.Tensor] = []
        """Parameters that are this rank's alone, whose part is their gradient while they are stepped."""
        self._changes_gradients = nature.changes_gradients
        self._published: dict[str, bytes] = {}

    @property
    def is_current(self) -> bool:
        """Whether what is shared out already is what was."""
        return self._weights is None or all(
            self._weights.parts(p) == self._given.get(i) for i, p in enumerate(self.parameters)
        )

    def steps(self) -> bytes:
        """Equal on ranks that are about to make the same step."""
        if self._gradients is not None:
            return self.identity + bytes(self._gradients.is_there(p) for p in self.parameters)
        return self.identity + bytes(p.grad is not None for p in self.parameters)

    @contextmanager
    def swapped(self, optimizer: Optimizer) -> Iterator[None]:
        """The optimizer has this rank's pieces for parameters, with their gradients and their state."""
        self._whole = [group["params"] for group in optimizer.param_groups]
        self._swap(optimizer)
        try:
            yield
        finally:
            self._swap_back(optimizer)
            self._whole = []
            self._have_stepped()

    @contextmanager
    def left(self, optimizer: Optimizer) -> Iterator[None]:
        """Inside ``swapped``, as outside of it for a while; gradients may be others afterwards."""
        self._swap_back(optimizer)
        self._have_stepped()
        try:
            yield
        finally:
            self._swap(optimizer)

    def _have_stepped(self) -> None:
        if self._weights is not None:
            given = [self.parameters[i] for i in self._given]
            self._weights.stepped(given, changed=[p for p in given if self._has_gradient(p)])

    def _swap(self, optimizer: Optimizer) -> None:
        if self._gradients is None:
            for parameter in self.parameters:
                _ = parameter.grad  # of all, on all ranks: to read it may be an exchange. See Note [Accumulation]
        elif self._changes_gradients:
            self._gradients.keep_parts(self.parameters)
        if self._weights is not None:
            self._weights.settle(self.parameters)
        for group, own in zip(optimizer.param_groups, self._stand_ins.lists, strict=True):
            group["params"] = own
        for piece, stand_in in self._stand_ins.partial:
            parameter = self.parameters[piece.param]
            line = _shaped(self._line(piece, parameter), parameter)
            if stand_in.data_ptr() != line.data_ptr() or stand_in.dtype != line.dtype:
                with nullcontext() if self._weights is None else self._weights.own():
                    stand_in.data = line
            is_cut, part = self._part(parameter)
            if is_cut:
                stand_in.grad = None if part is None else _shaped(part, parameter)
                continue
            gradient = parameter.grad
            if self._changes_gradients and gradient is not None and gradient.stride() != parameter.stride():
                gradient = parameter.grad = torch.empty_like(parameter).copy_(gradient.to_dense())
            part = None if gradient is None else flat_like(gradient, parameter)[piece.start : piece.end]
            stand_in.grad = None if part is None else _shaped(part, parameter)
        for _, stand_in in self._stand_ins.own:
            is_cut, part = self._part(stand_in)
            if is_cut and part is not None:
                self._lent.append(stand_in)
                lent = part.as_strided(stand_in.shape, stand_in.stride())
                with self._raw():
                    stand_in.grad = lent
        vars(optimizer)["state"] = self.part

    def _line(self, piece: ParameterPiece, parameter: torch.Tensor) -> torch.Tensor:
        if self._weights is not None and piece.param in self._given:
            return self._weights.line(parameter, piece)
        return flat(parameter)[piece.start : piece.end]

    def _part(self, parameter: torch.Tensor) -> tuple[bool, torch.Tensor | None]:
        return (False, None) if self._gradients is None else self._gradients.part(parameter)

    def _raw(self) -> AbstractContextManager[None]:
        return nullcontext() if self._gradients is None else self._gradients.raw()

    def _swap_back(self, optimizer: Optimizer) -> None:
        self.part = vars(optimizer)["state"]
        vars(optimizer)["state"] = ShardedParameter(self)
        for _, stand_in in self._stand_ins.partial:
            stand_in.grad = None
        with self._raw():
            for parameter in self._lent:
                parameter.grad = None
        self._lent.clear()
        for group, one in zip(optimizer.param_groups, self._whole, strict=True):
            group["params"] = one

    def whole_gradients(self) -> dict[int, torch.Tensor]:
        """By place, those that every rank has for itself."""
        own_whole = (lambda p: p.grad) if self._gradients is None else self._gradients.own_whole
        return {i: g for i, p in enumerate(self.parameters) if (g := own_whole(p)) is not None}

    def publish(self, place: str) -> bool:
        """Have all ranks get this one's pieces, if all are at ``place``; a collective."""
        if self._publisher is None or not self._publisher.is_current:
            whole = [i for i in range(len(self.parameters)) if i not in self._given]
            number = {i: number for number, i in enumerate(whole)}
            pieces = [[p._replace(param=number[p.param]) for p in part] for part in self._stand_ins.dealt]
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
        """What has none is not stepped: a graph that has saved it may still run backward."""
        return parameter.grad is not None if self._gradients is None else self._gradients.is_there(parameter)

    def _publish_gradients(self, signed: bytes) -> bool:
        present = {i: p.grad for i, p in enumerate(self.parameters) if p.grad is not None}
        place = {i: number for number, i in enumerate(present)}
        pieces = [[p._replace(param=place[p.param]) for p in part if p.param in place] for part in self.pieces]
        gradients = list(present.values())
        torch.autograd.graph.increment_version(gradients)
        return ParameterPublisher(self._group, self._frame, gradients, pieces).publish(signed)

    def take(self, whole: Any) -> None:
        """Keep of an optimizer's ``whole`` state what is this rank's."""
        part = defaultdict(whole.default_factory) if isinstance(whole, defaultdict) else type(whole)()
        shared = {id(p) for p in self.parameters}
        for key, state in whole.items():
            if not isinstance(key, torch.Tensor) or id(key) not in shared:
                part[key] = state
        for piece, stand_in in self._stand_ins.own:
            parameter = self.parameters[piece.param]
            if parameter in whole:
                state = whole[parameter]
                is_all = piece.end - piece.start == parameter.numel() or not isinstance(state, dict)
                part[stand_in] = state if is_all else cut(state, parameter, piece)
        self.part = part
        self._order = [id(key) for key in whole]

    def give(self) -> None:
        """Take part in another rank's ``whole``."""
        self._gather(keep=False)

    def whole(self) -> Any:
        """The whole state, in the order of the parameters; a collective.

        Raises:
            DivergenceError: on all ranks, when one of them does not have its part.
        """
        states = self._gather(keep=True)
        found = defaultdict(self.part.default_factory) if isinstance(self.part, defaultdict) else type(self.part)()
        by_id = {id(p): state for p, state in zip(self.parameters, states, strict=True) if state is not None}
        place = {key: i for i, key in enumerate(self._order)}
        for p in sorted(self._stand_ins.every, key=lambda p: place.get(id(p), len(place))):
            if id(p) in by_id:
                found[p] = by_id[id(p)]
            elif p in self.part and any(p is idle for idle in self.idle):
                found[p] = self.part[p]
        mine = {id(stand_in) for _, stand_in in self._stand_ins.own}
        for key, state in self.part.items():
            if id(key) not in mine and key not in found:
                found[key] = state
        return found

    def _gather(self, *, keep: bool) -> list[dict[str, Any] | None]:
        mine = {piece: self.part.get(one, {}) for piece, one in self._stand_ins.own}
        return gather(self._group, self.parameters, self.pieces, mine, keep=keep)

    def num_bytes(self) -> int:
        """Of the state that this rank holds."""
        held = [state.values() for state in self.part.values() if isinstance(state, dict)]
        return sum(value.nbytes for values in held for value in values if isinstance(value, torch.Tensor))


def _shaped(line: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """What of ``parameter`` a rank steps: in its shape, if that is all of it."""
    return line.as_strided(parameter.shape, parameter.stride()) if len(line) == parameter.numel() else line


def refuse(group: Group) -> NoReturn:
    """Take part in another rank's ``whole`` without having anything of it."""
    all_gather_values(group, None)
    raise LagomError("another rank asked for the state of an optimizer that this one does not have")


# Note [Stepping a part]
#
# The optimizer stays the object that schedulers, scalers and the program hold. Its parameters, laid end to end, are cut
# into a stretch for each rank. While it steps, the lists in its groups are this rank's: parameters that are in its
# stretch as they are, and of those at its ends a part, which is a view of the same memory, as is its gradient; and
# its state is that of these. Afterwards the lists are what they were, and each rank sends what it has changed to all
# others, into the very memory of the parameters. A closure is evaluated with everything put back.
#
# Before it steps, the ranks make sure that all of them are about to: so outside of a step the parts of all ranks belong
# to the same number of steps, and one of them may ask for the whole state whenever it likes. See Note [Asking].
#
# A whole state, once it was asked for, is the optimizer's until its next step, which keeps this rank's part of it: what
# the program has changed in it, or loaded, is not lost. It is a copy of what it was at that moment; on one machine the
# tensors in a state_dict() change with the next step.
