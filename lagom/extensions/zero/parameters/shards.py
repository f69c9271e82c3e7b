"""``ParameterShards``: each rank holds a shard of large parameters, and a whole parameter only while it is used."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lagom.errors import DivergenceError, LagomError
from lagom.exchange.plain_values import all_gather_values
from lagom.extensions.zero.parameters.residency import ParameterResidency
from lagom.extensions.zero.parameters.storage import ParameterStorage, StorageVersion
from lagom.gradients.checksum import checksums, hash_values
from lagom.gradients.tensor_stores import ParameterStore
from lagom.run_state.malloc_trim import trim_heap
from lagom.run_state.memory_layout import is_dense, storage_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from typing import Any

    from lagom.exchange.group import Group
    from lagom.extensions.zero.partition import ParameterPiece
    from lagom.run_state.leaves import Leaves

WEIGHTS = b"weights"
MIN_ELEMENTS = 1 << 12
"""Fewest elements of a sharded parameter: for smaller ones, an exchange would cost more than their memory is worth."""


class ParameterShards(ParameterStore):
    """Makes parameters whole when they are used, and frees them again. See Note [Parts of parameters].

    Args:
        may_meet: returns whether the other ranks can be reached at this place of the program.
        say: logs a line, once.
    """

    keeps_shards = True

    def __init__(self, group: Group, leaves: Leaves, may_meet: Callable[[], bool], say: Callable[[str], None]) -> None:
        self._group = group
        self._leaves = leaves
        self._may_meet = may_meet
        self._say = say
        self.units: dict[int, ParameterStorage] = {}
        """Sharded units (each is the storage of one parameter) by the address of their storage."""
        self.is_busy = False
        """Whether lagom itself works with tensors now, so that operations make no parameter whole."""
        self.is_streamed = False
        """Whether tensors of a ``state_dict()`` are gathered one by one, so that they need not fit the device."""
        self._by_key: dict[bytes, ParameterStorage] = {}
        """Units by key. A unit that is gone on this rank stays here for a while: another rank may still request it."""
        self._released: dict[int, ParameterStorage] = {}
        """Units that stay whole from now on, by the address of their storage.

        The unit's weak reference keeps the address from being used for another storage.
        """
        self._num_made: dict[int, int] = {}
        """Number of units made so far for each parameter, by number of the parameter."""
        self.resident = ParameterResidency(self._update_shard)
        """The units that are whole now."""

    def adopt(self, tensor: torch.Tensor) -> None:
        """Shard a parameter from now on, if possible; it stays whole until its memory is freed for the first time."""
        if self.is_busy or not isinstance(tensor, nn.Parameter) or is_lazy(tensor) or tensor.numel() < MIN_ELEMENTS:
            return
        if tensor.layout != torch.strided or tensor.is_meta or not self._may_meet():
            return
        storage = storage_of(tensor)
        if (
            storage._cdata in self.units
            or storage._cdata in self._released
            or storage.nbytes() != tensor.nbytes
            or not is_dense(tensor)
        ):
            return
        # For memory of GPUs ``is_shared`` is always true, so it is asked for CPU memory alone.
        if not storage.resizable() or (tensor.is_cpu and storage.is_shared()):
            return
        number = self._leaves.number(tensor)
        self._num_made[number] = self._num_made.get(number, 0) + 1
        unit = ParameterStorage(b"%d.%d" % (number, self._num_made[number]), tensor, self._group.world_size)
        self._forget_dead()
        if self.resident.make_room(coming=unit.num_bytes):
            trim_heap()
        self.units[unit.place] = self._by_key[unit.key] = unit
        self.resident.adopt(unit)

    def find_storage(self, tensor: torch.Tensor) -> ParameterStorage | None:
        """Return the unit whose memory ``tensor``, a parameter or a view of one, uses; None if it is not sharded."""
        if tensor.layout != torch.strided:
            return None
        return self.units.get(storage_of(tensor)._cdata)

    def parts(self, tensor: torch.Tensor) -> list[tuple[int, int]] | None:
        """Return the start and end, in elements, of each rank's part of ``tensor``.

        None if the tensor is not sharded, or is a view of only some elements of a sharded parameter.
        """
        unit = self.find_storage(tensor) if self.units else None
        if unit is None or not unit.covers(tensor):
            return None
        size = tensor.element_size()
        return [(first // size, last // size) for first, last in map(unit.part, range(self._group.world_size))]

    def is_sharded(self, parameter: torch.Tensor) -> bool:
        """See ``ParameterStore``."""
        return self.parts(parameter) is not None

    def own_elements(self, tensor: torch.Tensor, piece: ParameterPiece) -> torch.Tensor:
        """Return this rank's elements of a sharded parameter, ``piece``, for the optimizer to change in place."""
        unit = self.find_storage(tensor)
        assert unit is not None
        assert unit.shard is not None
        return unit.shard.view(tensor.dtype)[: piece.end - piece.start]

    def version(self, tensor: torch.Tensor) -> StorageVersion | None:
        """Return the version of the tensor's values; None if it is not sharded."""
        unit = self.find_storage(tensor) if self.units else None
        if unit is None:
            return None
        self._update_shard(unit)
        return unit.version

    def digest(self, tensor: torch.Tensor) -> bytes:
        """Return the ``hash_values`` of a tensor, or, if it is sharded, its version as bytes."""
        version = self.version(tensor)
        return hash_values(tensor) if version is None else b"%d %d" % version

    def checksums(self, tensors: Mapping[Any, torch.Tensor]) -> dict[Any, tuple[str, int]]:
        """Return the ``checksums`` of tensors by key; a sharded tensor has its version in place of a sum."""
        versions = {key: self.version(tensor) for key, tensor in tensors.items()}
        found = checksums({key: tensor for key, tensor in tensors.items() if versions[key] is None})
        for key, version in versions.items():
            if version is not None:
                tensor = tensors[key]
                found[key] = (f"{tensor.dtype} {tuple(tensor.shape)} {version.num_steps}", version.total)
        return found

    def release(self, tensor: torch.Tensor) -> None:
        """Keep the parameter whose memory ``tensor`` uses whole from now on; a collective, unless it is whole now."""
        unit = self.find_storage(tensor)
        if unit is not None:
            self.make_whole([unit])
            self._forget(unit)
            self._released[unit.place] = unit

    def make_whole(
        self, units: Sequence[ParameterStorage], blank: Sequence[ParameterStorage] = ()
    ) -> list[ParameterStorage]:
        """Gather the values of ``units`` that are not whole.

        Units of ``blank``, which the caller overwrites, get memory without values. Return the units of ``blank`` that
        were not whole.

        Raises:
            DivergenceError: on all ranks, when a rank cannot give its part, or its part is of other values.
            LagomError: when the other ranks cannot be reached here.
        """
        missing = [unit for unit in dict.fromkeys(units) if not unit.is_whole]
        if not missing:
            return []
        if not self._may_meet():
            raise LagomError(
                "a parameter is used where the other ranks cannot be reached, in another thread or process; with "
                "zero_lvl=3 each rank has a part of it: use it in the thread that trains, or use zero_lvl=2"
            )
        self.resident.make_room(coming=sum(unit.room for unit in missing), keep=units)
        for unit in missing:
            if unit in blank:
                self.resident.allocate(unit)
                unit.is_changed = True
            else:
                self._make_whole(unit)
        return [unit for unit in missing if unit in blank]

    def free_unwritten(self, units: Iterable[ParameterStorage]) -> None:
        """Free units that were to be overwritten and were not; the shards still have their values."""
        for unit in units:
            if unit.is_whole:
                self.resident.free(unit)

    def mark_changed(self, units: Iterable[ParameterStorage]) -> None:
        """Mark whole units whose values have changed."""
        for unit in units:
            unit.is_changed = True

    def pin(self, unit: ParameterStorage, *, for_good: bool = False) -> None:
        """Make the unit whole, and keep its memory in place until the next step, or, with ``for_good``, for good."""
        unit.is_shown = unit.is_shown or for_good
        self.make_whole([unit])
        self._update_shard(unit)
        if not unit.is_held:
            unit.is_held, unit.seen = True, self._digest_values(unit)

    def update_shards(self, tensors: Iterable[torch.Tensor]) -> None:
        """Update this rank's shards of ``tensors`` from the whole parameters, before an optimizer steps the shards."""
        for tensor in tensors:
            if (unit := self.find_storage(tensor)) is not None:
                self._update_shard(unit)

    def current_units(self) -> list[ParameterStorage]:
        """Return all units that tensors use, with this rank's shards up to date."""
        found = [unit for unit in self._by_key.values() if unit.is_alive]
        for unit in found:
            self._update_shard(unit)
        return found

    def restore_shard(self, unit: ParameterStorage, raw: torch.Tensor, version: tuple[int, int]) -> None:
        """Give a new unit this rank's shard ``raw``, of values with ``version``, and free the unit's memory."""
        with self.mark_busy():
            unit.restore_part(raw, StorageVersion(*version))
            self.resident.free(unit)

    def count_step(self, tensors: Sequence[torch.Tensor], changed: Sequence[torch.Tensor]) -> None:
        """Count a step on the shards of ``tensors``, and free those that are whole.

        A parameter that must stay in place gets its new values instead; a collective then.

        Args:
            changed: the tensors that had gradients; their version counters are raised.
        """
        units = dict.fromkeys(unit for tensor in tensors if (unit := self.find_storage(tensor)) is not None)
        for unit in units:
            unit.version = unit.version._replace(num_steps=unit.version.num_steps + 1)
        for unit in units:
            if not unit.is_whole:
                continue
            unit.is_held = unit.is_shown or not unit.storage().resizable()  # numpy() makes a storage not resizable
            if unit.is_held:
                self._say("parameters that numpy() was called on stay whole: an array may have their memory")
                self._gather_values(unit)
                unit.seen = self._digest_values(unit)
            else:
                self.resident.free(unit)
        if changed:
            torch.autograd.graph.increment_version([t for t in changed if self.find_storage(t) is not None])

    def num_bytes(self) -> int:
        """Return the bytes of the shards that this rank holds."""
        return sum(unit.shard.nbytes for unit in self._by_key.values() if unit.shard is not None)

    def begin_backward(self, leaves: Iterable[torch.Tensor]) -> None:
        """Shard those of a backward's leaves that are not sharded yet, and count all-gathers anew."""
        for leaf in leaves:
            self.adopt(leaf)
        self.resident.begin()

    def free_idle(self) -> None:
        """Free whole parameters after a backward, when no operation needs them."""
        self.resident.free_idle()

    def find_dead(self) -> list[ParameterStorage]:
        """Return the units whose memory no tensor on this rank uses any more."""
        self._forget_dead()
        return [unit for unit in self._by_key.values() if not unit.is_alive]

    def forget(self, units: Iterable[ParameterStorage]) -> None:
        """Forget units that were gone before the last exchange of all ranks, so that no rank can request them."""
        for unit in units:
            if self._by_key.get(unit.key) is unit:
                del self._by_key[unit.key]

    def serve(self, key: bytes, total: int, num_steps: int) -> None:
        """Take part in another rank's all-gather of the unit ``key`` at the version (``total``, ``num_steps``).

        Raises:
            DivergenceError: on all ranks, when a rank cannot give its part, or its part is of another version.
        """
        unit = self._by_key.get(key)
        if unit is not None and unit.is_alive:
            self._update_shard(unit)
        has = unit is not None and not (unit.is_changed and not unit.is_alive)
        self._agree(has and unit is not None and unit.version == (total, num_steps))
        assert unit is not None
        out = torch.empty(unit.room, dtype=torch.uint8, device=unit.own_part.device)
        with self.mark_busy():
            self._group.all_gather_into(out, unit.own_part)

    def end(self) -> None:
        """Gather all parameters that still exist, at the program's end on all ranks; a collective.

        Raises:
            DivergenceError: when a rank cannot give its part, or its part is of other values.
        """
        gc.collect()
        self._forget_dead()
        for unit in self.resident.units():
            self._update_shard(unit)
        wanted = sorted(unit.key for unit in self.units.values() if not unit.is_whole)
        has = {key: unit.version for key, unit in self._by_key.items() if unit.is_alive or not unit.is_changed}
        rows = all_gather_values(self._group, (wanted, has))
        for key in sorted({key for row, _ in rows for key in row}):
            if len({row.get(key) for _, row in rows}) > 1 or key not in has:
                raise DivergenceError(_APART)
            unit = self._by_key[key]
            with self.mark_busy():
                if unit.is_alive and not unit.is_whole:
                    self.resident.allocate(unit)
                    self._gather_parts(unit)
                else:
                    out = torch.empty(unit.room, dtype=torch.uint8, device=unit.own_part.device)
                    self._group.all_gather_into(out, unit.own_part)
        self.units.clear()
        self._by_key.clear()
        self.resident.clear()

    def _make_whole(self, unit: ParameterStorage) -> None:
        self.resident.count_gather(unit)
        self.resident.allocate(unit)
        try:
            self._gather_values(unit)
        except BaseException:
            self.resident.free(unit)
            raise

    def _gather_values(self, unit: ParameterStorage) -> None:
        unanimous = self._group.ask(b"%s %s %d %d" % (WEIGHTS, unit.key, *unit.version))
        if not unanimous:
            self._agree(True)
        self._gather_parts(unit)
        unit.is_changed = False

    def _agree(self, able: bool) -> None:
        if any(row != b"1" for row in self._group.all_gather_bytes(b"1" if able else b"0")):
            raise DivergenceError(_APART)

    def _gather_parts(self, unit: ParameterStorage) -> None:
        storage = unit.storage()
        with self.mark_busy():
            if storage.nbytes() >= unit.room:
                self._group.all_gather_into(unit.bytes(unit.room), unit.own_part)
                return
            out = torch.empty(unit.room, dtype=torch.uint8, device=storage.device)
            self._group.all_gather_into(out, unit.own_part)
            unit.bytes(unit.num_bytes).copy_(out[: unit.num_bytes])

    def _update_shard(self, unit: ParameterStorage) -> None:
        if not unit.is_whole:
            return
        if unit.is_held and not unit.is_changed:
            total = self._digest_values(unit)
            unit.is_changed, unit.seen = total != unit.seen, total
        if unit.is_changed:
            with self.mark_busy():
                unit.update_part(self._group.rank)

    def _digest_values(self, unit: ParameterStorage) -> int:
        with self.mark_busy():
            return unit.digest_values()

    def _forget_dead(self) -> None:
        for unit in list(self.units.values()):
            if not unit.is_alive:
                self._forget(unit)

    def _forget(self, unit: ParameterStorage) -> None:
        del self.units[unit.place]
        self.resident.forget(unit)

    @contextmanager
    def mark_busy(self) -> Iterator[None]:
        """Let the block work on tensors' memory without making parameters whole, and without autograd."""
        before, self.is_busy = self.is_busy, True
        try:
            with torch.no_grad():
                yield
        finally:
            self.is_busy = before


_APART = (
    "a rank uses a parameter that other ranks do not have, or that has other values there; with zero_lvl=3 each rank "
    "has a part of it: create the same parameters on every rank, draw initial values from torch's, numpy's or random's "
    "global generators, and change them on every rank alike, or use zero_lvl=2"
)


# Note [Parts of parameters]
#
# A parameter stays the object that the program made. Only its memory is freed: the storage is resized to 0 bytes, and
# each rank keeps a part of the bytes. All tensors that share the storage (the parameter, its ``.data``, a state_dict(),
# tensors that autograd has saved) then have no values, and have them again when the storage is filled.
#
# lagom needs no knowledge of the program to see which values are needed. A TorchDispatchMode handles each operation of
# torch before it runs: in a forward, in a backward, in a checkpoint that repeats a forward, and between them, also in
# the program's own operations. When an argument has no memory, the operation's parameters are made whole. To make room
# for them, other parameters are freed, the longest whole first. So few parameters are whole at a time, and after a
# backward only those whose address the program has. A parameter to which an operation writes is marked; when it is
# freed, each rank keeps its part of the new values. Functions that read values without an operation (numpy(),
# data_ptr(), pickle) have their own patches.
#
# To make a parameter whole, a rank sends a request (see Note [Asking] in exchange/requests.py), so a rank may do so
# alone. When all ranks request the same parameter at once, the only other exchange is the all-gather of the values.
# Parts belong together if the parameter had the same values on all ranks when it was cut. So each rank keeps a digest
# of the bits of the whole parameter from which its part was cut, and the number of optimizer steps since. If these
# differ, one rank has changed the parameter alone, or to other values, which is an error on all ranks.
#
# An optimizer steps the parts in place; see Note [Stepping a part] in sharded_optimizer.py. Small parameters stay
# whole, and are handled as with ``zero_lvl=2``.
