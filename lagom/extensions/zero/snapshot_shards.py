"""``SnapshotShards``: what a snapshot holds of this rank's shards, and how they are put back on any number of ranks."""

from __future__ import annotations

import hashlib
import weakref
from typing import TYPE_CHECKING, Any

import torch

from lagom.accelerators import available_accelerator
from lagom.extensions.zero.kept_optimizer_state import KeptOptimizerState, StateOfOptimizer
from lagom.extensions.zero.sharded_state import ShardedState
from lagom.run_state.memory_layout import flatten_memory, storage_of
from lagom.run_state.state_shards import ShardParts, StateShards

if TYPE_CHECKING:
    from lagom.extensions.zero.gradient_shards import GradientShards
    from lagom.extensions.zero.optimizer_group import OptimizerGroup
    from lagom.extensions.zero.parameters.shards import ParameterShards
    from lagom.extensions.zero.parameters.storage import ParameterStorage
    from lagom.run_state.state_shards import KeptParts
    from lagom.session.session import Session


class SnapshotShards(StateShards):
    """The shards of a run for its snapshots; see ``StateShards``. See Note [Restoring shards]."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.is_sharding = session.world_size > 1
        """See ``StateShards``."""
        self.optimizers: OptimizerGroup | None = None
        """The optimizers of the run, once torch is patched; None with one rank."""
        self.gradients: GradientShards | None = None
        self.weights: ParameterShards | None = None
        self._states: weakref.WeakSet[KeptOptimizerState] = weakref.WeakSet()
        """States of optimizers that have not stepped since this process continued from a snapshot."""
        self._num_states = 0
        self._pending: dict[int, RestoredStorage] = {}
        """Storages without values of parameters that are being unpickled, by address."""

    def collect(self) -> ShardParts:
        """See ``StateShards``."""
        values: dict[Any, Any] = {}
        ranges: dict[Any, list[tuple[int, int, torch.Tensor]]] = {}
        rank, digest = self._session.rank, hashlib.sha256()
        with torch.no_grad():
            if self.optimizers is not None:
                digest.update(repr(self.optimizers.collect(values, ranges)).encode())
            for state in sorted(self._states, key=lambda one: str(one.key)):
                state.collect(values, ranges, rank, self._session.world_size)
            if self.gradients is not None:
                digest.update(b"%d" % self.gradients.collect(values, ranges))
            if self.weights is not None:
                for unit in self.weights.current_units():
                    first, last = unit.part(rank)
                    ranges["weights", unit.key] = [(first, last, unit.own_part[: last - first])]
                    digest.update(b"%s %d %d" % (unit.key, *unit.version))
        return ShardParts(values, ranges, digest.hexdigest())

    def reduce(self, value: Any) -> Any:
        """See ``StateShards``."""
        if isinstance(value, ShardedState):
            return self.restore_state, (vars(value)["sharded"].held(),)
        if isinstance(value, KeptOptimizerState):
            return self.restore_state, (value.held._replace(key=value.key),)
        unit = self.weights.find_storage(value) if self.weights is not None and type(value) is torch.Tensor else None
        if unit is None:
            return NotImplemented
        assert self.weights is not None
        self.weights.update_shards([value])
        shape = value.storage_offset(), tuple(value.shape), value.stride()
        held = unit.reference(lambda: _HeldStorage(self, unit, value.device.type))
        return self.restore_tensor, (held, value.dtype, shape, value.requires_grad)

    def gradient(self, leaf: torch.Tensor) -> Any:
        """See ``StateShards``."""
        number = None if self.gradients is None else self.gradients.number_if_cut(leaf)
        return None if number is None else _HeldGradient(self, leaf, number)

    def restore_state(self, held: StateOfOptimizer) -> Any:
        """Return what an optimizer has as its state: the whole state with one rank, else a ``KeptOptimizerState``."""
        self._num_states += 1
        state = KeptOptimizerState(held, ("kept", self._num_states), self._parts)
        if not self.is_sharding:
            return state.whole()
        self._states.add(state)
        return state

    def restore_gradient(self, leaf: torch.Tensor, number: int) -> torch.Tensor:
        """Return the whole gradient of ``leaf``; a backward or step cuts it again."""
        dtype = self._parts.value(("gradient", number))
        found = torch.empty_like(leaf, dtype=dtype, requires_grad=False)
        raw = self._parts.read(("gradient", number), 0, found.nbytes).view(dtype)
        flatten_memory(found).copy_(raw)
        return found

    def restore_storage(self, key: bytes, num_bytes: int, device: str, version: tuple[int, int]) -> RestoredStorage:
        """Return the storage of a parameter, with values only if ranks have no shards of parameters."""
        here = available_accelerator() if device != "cpu" else None
        place = here if here is not None and here.type == device else torch.device("cpu")
        restored = RestoredStorage(torch.UntypedStorage(num_bytes, device=place), key, version)
        if self.weights is None:
            self._fill(restored)
        else:
            self._pending[restored.storage._cdata] = restored
        return restored

    def restore_tensor(
        self,
        restored: RestoredStorage,
        dtype: torch.dtype,
        shape: tuple[int, tuple[int, ...], tuple[int, ...]],
        requires_grad: bool,
    ) -> torch.Tensor:
        """Return a tensor that uses a restored storage."""
        storage = restored.storage
        size = storage.nbytes()
        if size < restored.num_bytes:  # freed: the tensor gets no memory either, but ``set_`` checks the size
            storage.resize_(restored.num_bytes)
        tensor = torch.empty(0, dtype=dtype, device=storage.device).set_(storage, *shape)
        if size < restored.num_bytes:
            storage.resize_(size)
        return tensor.requires_grad_(requires_grad)

    def adopt(self, parameter: torch.Tensor) -> None:
        """Read this rank's shard of a parameter that was just unpickled, and free the parameter's memory."""
        restored = self._pending.pop(storage_of(parameter)._cdata, None) if self._pending else None
        if restored is None:
            return
        assert self.weights is not None
        if (unit := self.weights.find_storage(parameter)) is None:
            self._fill(restored)
            return
        first, last = unit.part(self._session.rank)
        self.weights.restore_shard(unit, self._parts.read(("weights", restored.key), first, last), restored.version)

    def end_restore(self) -> None:
        """See ``StateShards``."""
        for restored in self._pending.values():
            self._fill(restored)
        self._pending.clear()

    @property
    def _parts(self) -> KeptParts:
        parts = self._session.resumption.parts
        assert parts is not None
        return parts

    def _fill(self, restored: RestoredStorage) -> None:
        raw = self._parts.read(("weights", restored.key), 0, restored.num_bytes)
        empty = torch.empty(0, dtype=torch.uint8, device=restored.storage.device)
        empty.set_(restored.storage, 0, (restored.num_bytes,), (1,)).copy_(raw)


class RestoredStorage:
    """The storage of a parameter that is being unpickled."""

    def __init__(self, storage: torch.UntypedStorage, key: bytes, version: tuple[int, int]) -> None:
        self.storage, self.key, self.version = storage, key, version
        self.num_bytes = storage.nbytes()


class _HeldStorage:
    """Stands for a sharded storage in a pickle, once for all tensors that use it."""

    def __init__(self, shards: SnapshotShards, unit: ParameterStorage, device: str) -> None:
        self._given = shards.restore_storage, (unit.key, unit.num_bytes, device, tuple(unit.version))

    def __reduce__(self) -> Any:
        return self._given


class _HeldGradient:
    """Stands for a sharded gradient in a pickle."""

    def __init__(self, shards: SnapshotShards, leaf: torch.Tensor, number: int) -> None:
        self._given = shards.restore_gradient, (leaf, number)

    def __reduce__(self) -> Any:
        return self._given


# Note [Restoring shards]
#
# A snapshot has one file of shards from each rank (``resume`` writes and reads them). In a file, each range belongs to
# a whole object with a key that is equal on all ranks: the state of a parameter in an optimizer, by the optimizer's
# number and the parameter's index; a gradient, by the number of its leaf; a parameter's storage, by its unit's key.
#
# Rank 0 pickles a reference where the program has such an object. With one rank a reference unpickles as the whole
# object. With several:
#
# - A parameter gets its memory without values. When the parameter itself has been made, it is sharded as a new one is,
#   and this rank's part comes from the files: no value of another rank's part is read, and no whole parameter stays.
# - An optimizer's state is a ``KeptOptimizerState``. At the optimizer's next step, parameters are divided as at a first
#   step, but without a probe, and each rank reads its pieces.
# - A gradient is whole, as at a run's first step, until a step or backward cuts it again. It is added up by element, so
#   it has the same bits.
