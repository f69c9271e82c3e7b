"""``GradientShards``: each rank keeps its shard of the averaged gradients of sharded parameters."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from lagom.errors import DivergenceError, LagomError
from lagom.exchange.plain_values import all_gather_values
from lagom.extensions.zero.gradient_part import GradientPart, ShardedGradient, parts_of_parameters
from lagom.extensions.zero.kept_optimizer_state import as_bytes
from lagom.gradients.reduction.buckets import ShardMap, make_shard_map
from lagom.gradients.tensor_stores import GradientStore
from lagom.patching.object_reference import tensor_dictionary
from lagom.run_state.leaf_hooks import calls_hooks_after
from lagom.run_state.memory_layout import flatten_like, flatten_memory, is_dense

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from lagom.exchange.group import Group
    from lagom.extensions.zero.kept_optimizer_state import Ranges
    from lagom.extensions.zero.partition import ParameterPiece
    from lagom.run_state.leaves import Leaves

ASK = b"gradient"
_SENT_AS_IS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""Types of gradients that the transports send without a conversion; other gradients are reduced whole."""
_slot: Any = vars(torch._C.TensorBase)["grad"]
"""Descriptor of autograd's own slot for a tensor's gradient, below the patched property ``Tensor.grad``."""


class GradientShards(GradientStore):
    """Shards gradients, and gathers them when the program reads them. See Note [Parts of gradients].

    Args:
        may_meet: returns whether the other ranks can be reached at this place of the program.
        check_place: raises a DivergenceError on all ranks unless they are all at a place of the program; a collective.
        say: logs a line, once.
    """

    keeps_shards = True
    always_averages = True

    def __init__(
        self,
        group: Group,
        leaves: Leaves,
        may_meet: Callable[[], bool],
        check_place: Callable[[str], None],
        say: Callable[[str], None],
    ) -> None:
        self._group = group
        self._check_place = check_place
        self._leaves = leaves
        self._may_meet = may_meet
        self._say = say
        self._entries = tensor_dictionary()
        self._clock = 0
        """Number of changes of the shards: if it is equal on two ranks, their shards are of the same gradients."""
        self._num_sharded = 0
        self._early: list[tuple[ShardedGradient, torch.Tensor | None]] = []
        """Gradients that were cut while a backward runs, each with the shard to add to it at the backward's end."""
        self._are_hidden = False
        self._are_exposed = False
        self._is_over = False
        self.parameter_parts: Callable[[torch.Tensor], list[tuple[int, int]] | None] | None = None
        """Returns the start and end of each rank's part, in elements, of a parameter that ``zero_lvl=3`` shards.

        None for other parameters, and None itself with ``zero_lvl=2``.
        """

    def num_bytes(self) -> int:
        """Return the bytes of this rank's shards, without whole gradients."""
        shards = [entry.shard for entry in list(self._entries.values()) if entry.is_cut]
        return sum(shard.nbytes for shard in shards if shard is not None)

    def assign(
        self, number: int, parameters: Sequence[torch.Tensor], pieces: Sequence[Sequence[ParameterPiece]]
    ) -> None:
        """Shard the gradients of ``parameters``, of optimizer ``number``, by each rank's ``pieces`` from now on.

        The gradients must be whole, except those of parameters that are themselves sharded.
        """
        parts = parts_of_parameters(pieces, len(parameters))
        for parameter, own_parts in zip(parameters, parts, strict=True):
            entry = ShardedGradient(number, own_parts, self._group.rank)
            entry.follows_parameter = self.parameter_parts is not None and self.parameter_parts(parameter) is not None
            before = self._entries.get(parameter)
            if before is not None and before.follows_parameter:
                if before.parts == own_parts:
                    continue  # the shards are those of the parameter, whichever optimizer steps the parameter
                self.read(parameter)
            elif before is not None:
                assert not before.is_cut
                entry.stays_whole = before.stays_whole or before.number != number
                if entry.stays_whole:
                    self._say(
                        "gradients of parameters that two optimizers step stay whole on every rank, as with zero_lvl=1"
                    )
            if before is not None and before.is_sharded:
                self._drop_shard(before)
            self._entries[parameter] = entry

    def collect(self, values: dict[Any, Any], ranges: Ranges) -> int:
        """Add this rank's parts of sharded gradients to ``values`` and ``ranges``, for a snapshot; return the clock."""
        for parameter, entry in list(self._entries.items()):
            if entry.is_sharded and entry.mine is not None and (part := self.own_part(parameter)) is not None:
                key, size = ("gradient", self._leaves.number(parameter)), part.dtype.itemsize
                values[key] = part.dtype
                ranges[key] = [(entry.mine.start * size, entry.mine.end * size, as_bytes(part))]
        return self._clock

    def number_if_cut(self, leaf: torch.Tensor) -> int | None:
        """Return the number of a leaf of whose gradient this rank has only a shard; None for other leaves."""
        return None if self._entry_if_cut(leaf) is None else self._leaves.number(leaf)

    def has_gradient(self, parameter: torch.Tensor) -> bool:
        """Return whether the parameter has a gradient, whole or sharded."""
        entry = self._entry_if_cut(parameter)
        return entry is not None or _slot.__get__(parameter) is not None

    def whole_gradient(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return the parameter's gradient if it is whole on every rank; None if sharded, or gathered for a read."""
        entry = self._entries.get(parameter)
        return None if entry is not None and (entry.is_cut or entry.was_shown) else _slot.__get__(parameter)

    def is_sharded(self, parameter: torch.Tensor) -> bool:
        """Return whether ranks have shards of the parameter's gradient; equal on all ranks, whichever have read it."""
        return self._entry_if_sharded(parameter) is not None

    def own_shard(self, parameter: torch.Tensor) -> tuple[bool, torch.Tensor | None]:
        """Return whether this rank has only a shard of the gradient, and the shard, flat in the order of memory.

        The shard is None if the gradient is whole or missing, or if this rank keeps none of its elements.
        """
        entry = self._entry_if_cut(parameter)
        return (False, None) if entry is None else (True, entry.shard)

    def own_part(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return this rank's part of a gradient, also of a whole one, flat in the order of the parameter's memory.

        None if the gradient is missing, or this rank keeps none of its elements.
        """
        entry = self._entries[parameter]
        whole = None if entry.is_cut or entry.mine is None else _slot.__get__(parameter)
        part: torch.Tensor | None = entry.shard
        return part if whole is None else flatten_like(whole, parameter)[entry.mine.start : entry.mine.end]

    def check_all(
        self, parameters: Sequence[torch.Tensor], check: Callable[[Iterable[torch.Tensor | None]], bool], place: str
    ) -> bool:
        """See ``GradientStore``; each rank checks its shards."""
        if not any(map(self.is_sharded, parameters)):
            return super().check_all(parameters, check, place)
        with self.expose_shards():
            mine = check(parameter.grad for parameter in parameters)
        return all(row[0] for row in self.exchange_numbers(place, [float(mine)]))

    def exchange_numbers(self, place: str, mine: list[float]) -> list[list[float]]:
        """Return the numbers ``mine`` of each rank, in rank order; a collective.

        Raises:
            DivergenceError: on all ranks, if not all are at ``place`` of the program.
        """
        self._check_place(place)
        parts = self._group.all_gather_bytes(b" ".join(value.hex().encode() for value in mine))
        return [[float.fromhex(value.decode()) for value in part.split()] for part in parts]

    @contextmanager
    def prepare_backward(self, leaves: Sequence[torch.Tensor]) -> Iterator[None]:
        """See ``GradientStore``; gathers the gradients that hooks will read, and hides the shards of the others."""
        self.gather(leaf for leaf in leaves if calls_hooks_after(leaf))
        with self.hide_shards():
            yield

    def end_backward(self, leaves: Iterable[torch.Tensor]) -> None:
        """See ``GradientStore``; replaces the gradients by shards."""
        self.cut_gradients(leaves)

    def cut_gradients(self, leaves: Iterable[torch.Tensor]) -> None:
        """Replace whole averaged gradients by this rank's shards, which are added to the shards of earlier backwards.

        Shards that were cut while the backward ran are added too. A gradient that must stay whole is left as it is.

        Args:
            leaves: the leaves to cut. After a backward: leaves without a whole gradient before it. Before a step that
                changes gradients: all sharded parameters of the optimizer.
        """
        self._clock += 1
        early, self._early = self._early, []
        for early_entry, part in early:
            self._accumulate_shard(early_entry, part)
        for leaf in leaves:
            if (entry := self._entry_to_cut(leaf)) is not None:
                self._accumulate_shard(entry, self.cut_own_part(leaf, entry))

    def cut_gradient_early(self, leaf: torch.Tensor) -> None:
        """Cut the average in ``leaf.grad`` while the backward runs; ``cut_gradients`` adds the shard at its end."""
        if (entry := self._entry_to_cut(leaf)) is not None:
            self._early.append((entry, self.cut_own_part(leaf, entry)))

    def bucket_shard_map(self, leaves: Sequence[torch.Tensor]) -> ShardMap | None:
        """Return which rank gets which part of a bucket's averages; None if each rank must get the whole averages.

        Each rank gets, and then cuts, whole averages for parameters that are themselves sharded (``zero_lvl=3``): peaks
        of memory were a tenth higher when ranks received only their parts of the sums.
        """
        rows: list[Sequence[GradientPart]] = []
        for leaf in leaves:
            entry: ShardedGradient | None = self._entries.get(leaf)
            if self._is_over or entry is None or entry.follows_parameter or entry.stays_whole:
                return None
            if leaf.dtype not in _SENT_AS_IS or not is_dense(leaf):
                return None
            rows.append(entry.parts)
        return make_shard_map(rows, self._group.rank, self._group.world_size)

    def store_part_early(self, leaf: torch.Tensor, part: torch.Tensor | None) -> None:
        """Remove ``leaf.grad``; keep ``part``, this rank's shard of the average or None, for ``cut_gradients``."""
        _slot.__set__(leaf, None)
        self._early.append((self._entries[leaf], part))

    def _entry_to_cut(self, leaf: torch.Tensor) -> ShardedGradient | None:
        """Return the entry of a leaf whose whole gradient is to be cut; None if it stays whole, or is missing."""
        entry: ShardedGradient | None = self._entries.get(leaf) or self._add_given(leaf)
        gradient = _slot.__get__(leaf)
        if self._is_over or entry is None or gradient is None or entry.stays_whole:
            return None
        able = gradient.layout == torch.strided and not gradient.requires_grad and is_dense(leaf)
        return entry if able else None

    def _add_given(self, leaf: torch.Tensor) -> ShardedGradient | None:
        """Add and return an entry for a parameter that is itself sharded; None if the parameter is not sharded.

        The gradient of such a parameter is cut even before an optimizer has stepped the parameter.
        """
        parts = None if self.parameter_parts is None else self.parameter_parts(leaf)
        if parts is None:
            return None
        given = [GradientPart(owner, start, end) for owner, (start, end) in enumerate(parts) if start < end]
        entry = self._entries[leaf] = ShardedGradient(-1, given, self._group.rank)
        entry.follows_parameter = True
        return entry

    def cut_own_part(self, leaf: torch.Tensor, entry: ShardedGradient) -> torch.Tensor | None:
        """Remove the whole gradient of ``leaf``; return a flat copy of this rank's part, None if it has no part."""
        gradient = _slot.__get__(leaf)
        _slot.__set__(leaf, None)
        if entry.mine is None:
            return None
        return flatten_like(gradient, leaf)[entry.mine.start : entry.mine.end].clone()

    def _accumulate_shard(self, entry: ShardedGradient, part: torch.Tensor | None) -> None:
        """Add ``part`` to the shard of earlier backwards, and mark the gradient as sharded."""
        if part is not None:
            entry.shard = part if entry.shard is None else entry.shard.add_(part)
        self._num_sharded += not entry.is_sharded
        entry.is_cut, entry.was_shown = True, False

    def drop(self, parameters: Iterable[torch.Tensor]) -> None:
        """Drop the shards of the gradients of ``parameters``; whole gradients are left to the caller."""
        self._clock += 1
        if self._num_sharded:
            for parameter in parameters:
                if (entry := self._entry_if_sharded(parameter)) is not None:
                    self._drop_shard(entry)

    def gather(self, parameters: Iterable[torch.Tensor]) -> None:
        """Gather the sharded gradients of ``parameters``."""
        for parameter in parameters:
            self.read(parameter)

    def stop(self) -> None:
        """Gather all sharded gradients, and leave gradients whole from now on; a collective."""
        self._is_over = True
        self.gather(list(self._entries))

    @contextmanager
    def hide_shards(self) -> Iterator[None]:
        """Read ``grad`` as None where the gradient is sharded, in a block where lagom itself handles gradients.

        If the block raises, the shards that a backward in it has cut early are dropped.
        """
        before, self._are_hidden = self._are_hidden, True
        try:
            yield
        except BaseException:
            self._early = []  # the backward failed: its shards are not added to the gradients
            raise
        finally:
            self._are_hidden = before

    @contextmanager
    def expose_shards(self) -> Iterator[None]:
        """Read ``grad`` as this rank's flat shard (None without one) in a block whose operations work on shards."""
        before, self._are_exposed = self._are_exposed, True
        self._clock += 1
        try:
            yield
        finally:
            self._are_exposed = before

    def read(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return ``tensor.grad``; gather it first if it is sharded, unless a block hides or exposes shards.

        Raises:
            DivergenceError: on all ranks, if another rank's shards are of an earlier or later gradient.
            LagomError: if the other ranks cannot be reached here.
        """
        gradient: torch.Tensor | None = _slot.__get__(tensor)
        if gradient is not None or not self._num_sharded or self._are_hidden:
            return gradient
        entry = self._entry_if_cut(tensor)
        if entry is None:
            return None
        return entry.shard if self._are_exposed else self._gather_for_program(tensor, entry)

    def write(self, tensor: torch.Tensor, value: torch.Tensor | None) -> None:
        """Set ``tensor.grad`` to ``value``, and drop its shard, unless a block hides shards."""
        if self._num_sharded and not self._are_hidden and (entry := self._entry_if_sharded(tensor)) is not None:
            self._drop_shard(entry)
            self._clock += 1  # also on a rank that has read the gradient: the clocks of all ranks stay equal
        _slot.__set__(tensor, value)

    def serve(self, number: int, clock: int) -> None:
        """Take part in another rank's read of the gradient of leaf ``number``; ``clock`` is that rank's ``_clock``.

        Raises:
            DivergenceError: on all ranks, if this rank's shards are of an earlier or later gradient, or if the program
                has read the gradient here and then changed it in place.
        """
        tensor = self._leaves.tensor(number)
        entry: ShardedGradient | None = None if tensor is None else self._entries.get(tensor)
        is_same = clock == self._clock
        if is_same and entry is not None and entry.was_shown and entry.shown_version[0] == clock:
            whole = _slot.__get__(tensor)  # None in a backward, which has put the gradient aside
            is_same = whole is not None and entry.shown_version[1] == _version(whole)
        self._gather_gradient(tensor, entry if is_same else None)

    def _gather_for_program(self, tensor: torch.Tensor, entry: ShardedGradient) -> torch.Tensor:
        if not self._may_meet():
            raise LagomError(
                "the gradient of a parameter is read where the other ranks cannot be reached, in another thread or "
                "process; with zero_lvl=2 each rank has a part of it: read it in the thread that trains"
            )
        self._group.ask(b"%s %d %d" % (ASK, self._leaves.number(tensor), self._clock))
        gradient = self._gather_gradient(tensor, entry)
        entry.shard, entry.is_cut, entry.was_shown = None, False, True
        entry.shown_version = self._clock, _version(gradient)
        _slot.__set__(tensor, gradient)
        return gradient

    def _gather_gradient(self, tensor: torch.Tensor | None, entry: ShardedGradient | None) -> torch.Tensor:
        own = None if tensor is None or entry is None else self.own_part(tensor)
        missing = entry is None or (entry.mine is not None and own is None)
        rows = all_gather_values(self._group, (missing, None if own is None else own.dtype))
        if any(row[0] for row in rows) or tensor is None or entry is None:
            raise DivergenceError(
                "a rank reads a gradient (Parameter.grad) at a place of the program that other ranks do not come to; "
                "with zero_lvl=2 each rank has a part of it: read it on every rank, or use zero_lvl=1"
            )
        dtype = next(row[1] for row in rows if row[1])
        gradient = torch.empty_like(tensor, dtype=dtype, requires_grad=False)
        line = flatten_memory(gradient)
        for owner, start, end in entry.parts:
            piece = line[start:end]
            if own is not None and owner == self._group.rank:
                piece.copy_(own)
            self._group.broadcast(piece.view(torch.uint8), owner)
        return gradient

    def _entry_if_cut(self, tensor: torch.Tensor) -> ShardedGradient | None:
        """Return the entry of a tensor of whose gradient this rank has only a shard; None for other gradients."""
        entry: ShardedGradient | None = self._entries.get(tensor)
        return entry if entry is not None and entry.is_cut else None

    def _entry_if_sharded(self, tensor: torch.Tensor) -> ShardedGradient | None:
        """Return the entry of a tensor of whose gradient ranks have shards; None for other gradients."""
        entry: ShardedGradient | None = self._entries.get(tensor)
        return entry if entry is not None and entry.is_sharded else None

    def _drop_shard(self, entry: ShardedGradient) -> None:
        entry.shard, entry.is_cut, entry.was_shown = None, False, False
        self._num_sharded -= 1


def _version(gradient: torch.Tensor) -> int:
    return 0 if gradient.is_inference() else gradient._version


# Note [Parts of gradients]
#
# The gradients of an optimizer's parameters are sharded from its first step on; those of parameters that are themselves
# sharded (``zero_lvl=3``), from the first backward on. A backward then keeps only one part of each averaged gradient:
# the part by which this rank will step. ``Tensor.grad`` is a property: when a program reads a sharded gradient, lagom
# gathers the whole gradient, which is then an ordinary one. It stays whole until the program drops it, since the
# program may hold another reference to it and change it. A read is an exchange: one rank requests it, and the other
# ranks answer wherever they are; see Note [Asking] in exchange/requests.py. If the shards of another rank belong to
# an earlier or later gradient (`_clock` differs), all ranks raise an error. An optimizer's own `step` sees shards. So
# do functions of torch that treat every element alike, or only need norms: gradient_access.py has a patch for each.
#
# So a gradient is whole in these cases: before its optimizer's first step, unless its parameter is itself sharded; from
# a read by the program until the program drops it (`was_shown`), or until a step that changes gradients; if two
# optimizers step its parameter (`stays_whole`); if its optimizer does not shard the parameter (see
# `optimizer_group.py`); if it is sparse, or has a graph (`create_graph`); and once something is compiled (`stop`). A
# backward that adds to a whole gradient leaves it whole: only leaves without a gradient are cut (`without_gradient`,
# which gradients/backward.py passes to `end_backward`). While a backward runs, gradients are whole unless it overlaps
# with their reduction: see Note [Overlap] in gradients/overlap.py.
#
# `_entries` has weak references to parameters. That is safe: once a parameter is gone here, another rank that runs the
# same code has no reference to it by which it could request the gradient.
