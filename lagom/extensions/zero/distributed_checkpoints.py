"""``stream_checkpoints``: ``torch.distributed.checkpoint`` of sharded models and optimizers, one tensor at a time.

``save`` writes the checkpoint that it writes in one process. See Note [Streamed checkpoints].
"""

from __future__ import annotations

import functools
import os
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from lagom.extensions.zero.checkpoint_files import CheckpointFiles, local_folder
from lagom.patching.importers import Importers, on_import
from lagom.patching.replace import replaced
from lagom.run_state.memory_layout import storage_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import ModuleType

    from lagom.extensions.zero.optimizer_group import OptimizerGroup
    from lagom.extensions.zero.parameters.shards import ParameterShards
    from lagom.extensions.zero.sharded_optimizer import ShardedOptimizer
    from lagom.session.session import Session


@contextmanager
def stream_checkpoints(session: Session, optimizers: OptimizerGroup, weights: ParameterShards | None) -> Iterator[None]:
    """Patch ``save`` and ``load`` of ``torch.distributed.checkpoint`` in the block, once the program imports it."""
    with ExitStack() as stack:

        def patch(module: ModuleType) -> None:
            streams = _Checkpoints(session, optimizers, weights)
            patched = {
                "save": _make_save(streams, vars(module)["save"]),
                "load": _make_load(streams, vars(module)["load"]),
            }
            for importer, name in Importers(module, *patched).find():
                stack.enter_context(replaced(importer, name, patched[name]))

        stack.enter_context(on_import({"torch.distributed.checkpoint": patch}))
        yield


class _Checkpoints:
    def __init__(self, session: Session, optimizers: OptimizerGroup, weights: ParameterShards | None) -> None:
        self.session, self.optimizers, self.weights = session, optimizers, weights

    def streams(self, given: Mapping[str, Any]) -> bool:
        """Return whether ``save`` or ``load`` with these keyword arguments is streamed."""
        return self.session.may_meet and given.get("planner") is None and given.get("process_group") is None

    @contextmanager
    def states(self, state_dict: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], _LazyTensors]]:
        """Yield ``state_dict`` with the states of its sharded optimizers in place of them, without their values.

        In the block, the ``state_dict()`` of a module is not copied to the CPU.
        """
        lazy = _LazyTensors(self)
        outlines = {key: self._state_of(value, lazy) for key, value in state_dict.items()}
        with self.streaming():
            yield outlines, lazy

    @contextmanager
    def streaming(self) -> Iterator[None]:
        """Copy no ``state_dict()`` of a module to the CPU in the block."""
        if self.weights is None:
            yield
            return
        before, self.weights.is_streamed = self.weights.is_streamed, True
        try:
            yield
        finally:
            self.weights.is_streamed = before

    def _state_of(self, value: Any, lazy: _LazyTensors) -> Any:
        sharded = self.optimizers.sharded(value) if isinstance(value, Optimizer) else None
        if sharded is None:
            return value
        outline, held = self.optimizers.outline(sharded), sharded.held()
        state, rest = held.new_state(), {id(key): (key, one) for key, one in held.rest}
        number = {id(p): i for i, p in enumerate(held.parameters)}
        for p in held.every:
            if (i := number.get(id(p))) is None:
                if id(p) in rest:
                    state[p] = rest.pop(id(p))[1]
            elif (told := outline[i]) is not None:
                state[p] = {
                    name: one.value
                    if one.dtype is None or (one.value is not None and not one.cut)
                    else lazy.add(sharded, i, name, one.dtype, tuple(p.shape) if one.cut else one.shape)
                    for name, one in told.items()
                }
        state.update(rest.values())
        with self.optimizers.shown_state(value, state):
            return value.state_dict()


class _LazyTensors:
    """Stand-ins for tensors of optimizers, which have no values: all their elements are in one place of memory."""

    def __init__(self, checkpoints: _Checkpoints) -> None:
        self._checkpoints = checkpoints
        self._entries: dict[int, tuple[ShardedOptimizer, int, str, torch.Tensor]] = {}
        self._last: tuple[ShardedOptimizer, int, dict[str, Any]] | None = None
        """The state of one parameter, of which the tensors are written one after the other."""

    def add(
        self, sharded: ShardedOptimizer, number: int, name: str, dtype: torch.dtype, shape: tuple[int, ...]
    ) -> torch.Tensor:
        """Return a stand-in for the tensor ``name`` in the state of parameter ``number``."""
        stand_in = torch.zeros((), dtype=dtype).expand(shape)
        self._entries[id(stand_in)] = sharded, number, name, stand_in
        return stand_in

    def place(self, value: Any) -> tuple[ShardedOptimizer, int, str] | None:
        """Return the optimizer, number of the parameter and name that ``value`` stands in for; None if it does not."""
        entry = self._entries.get(id(value))
        return None if entry is None else entry[:3]

    def values(self, value: Any) -> Any:
        """Return the tensor for which ``value`` stands in, or a copy of a sharded parameter; else ``value`` itself."""
        if (place := self.place(value)) is None:
            weights = self._checkpoints.weights
            is_sharded = weights is not None and isinstance(value, torch.Tensor) and weights.find_storage(value)
            return value.detach().to("cpu", copy=True) if is_sharded else value
        sharded, number, name = place
        if self._last is None or self._last[:2] != (sharded, number):
            self._last = None  # before the next one comes
            self._last = sharded, number, self._checkpoints.optimizers.entry(sharded, number)
        return self._last[2].pop(name)


def _make_save(checkpoints: _Checkpoints, original: Callable[..., Any]) -> Callable[..., Any]:
    from torch.distributed.checkpoint import CheckpointException

    session, files, planner = checkpoints.session, CheckpointFiles(checkpoints.session), _streamed_planner()

    def write(state_dict: Mapping[str, Any], given: dict[str, Any]) -> Any:
        frees = _choose_writer(given)
        with checkpoints.states(state_dict) as (states, lazy):
            return original(states, planner=planner(lazy, frees), **_but_planner(given))

    @functools.wraps(original)
    def save(state_dict: Any, **given: Any) -> Any:
        if not checkpoints.streams(given):
            return original(state_dict, **given)
        folder = local_folder(given, "storage_writer")
        with checkpoints.streaming():
            state_dict = {key: _call_on_all_ranks(value) for key, value in state_dict.items()}
        if session.rank != 0:
            files.tell_saved(folder)
            return None
        try:
            metadata = write(state_dict, given)
        except (Exception, CheckpointException) as error:  # the latter is a BaseException
            files.tell_saved(folder, error=f"{type(error).__name__}: {error}")
            raise
        files.tell_saved(folder, metadata)
        return metadata

    return save


def _streamed_planner() -> Callable[[_LazyTensors, bool], Any]:
    """Return the class of planners for ``save``; a function, since it imports torch's class."""
    from torch.distributed.checkpoint import DefaultSavePlanner

    class StreamedPlanner(DefaultSavePlanner):
        """Gathers a tensor when it is about to be written.

        Args:
            frees: whether each tensor has been written when the next one is looked up, so that its memory can be freed:
                torch's writer keeps all tensors of a file until the file is complete.
        """

        def __init__(self, lazy: _LazyTensors, frees: bool) -> None:
            super().__init__()
            self._lazy, self._frees = lazy, frees
            self._written: torch.UntypedStorage | None = None

        def lookup_object(self, index: Any) -> Any:
            if self._written is not None:
                self._written.resize_(0)
            value = super().lookup_object(index)
            gathered = self._lazy.values(value)
            self._written = storage_of(gathered) if self._frees and gathered is not value else None
            return gathered

    return StreamedPlanner


def _choose_writer(given: dict[str, Any]) -> bool:
    """Set the writer among the arguments of ``save``; return whether it writes a tensor before it asks for the next."""
    from torch.distributed.checkpoint import FileSystemWriter

    writer, path = given.get("storage_writer"), given.get("checkpoint_id")
    if writer is None and path is not None and "://" not in os.fspath(path):
        writer = given["storage_writer"] = FileSystemWriter(path)
    # The setting is newer than torch 2.6. With safetensors, all tensors of a file are written at its end.
    serialization = getattr(writer, "serialization_format", None)
    frees = type(writer) is FileSystemWriter and getattr(serialization, "value", "torch_save") == "torch_save"
    if frees:
        vars(writer)["per_thread_copy_ahead"] = 0  # no tensor is looked up before the one before is written
    if getattr(writer, "thread_count", 1) > 1:
        vars(writer)["thread_count"] = 1  # tensors are gathered in this thread
    return frees


def _call_on_all_ranks(value: Any) -> Any:
    """Return the ``state_dict()`` of an object of the program's, which may step an optimizer; else ``value``."""
    from torch.distributed.checkpoint.stateful import Stateful

    is_own = isinstance(value, Stateful) and not isinstance(value, (torch.nn.Module, Optimizer))
    return value.state_dict() if is_own else value


def _make_load(checkpoints: _Checkpoints, original: Callable[..., Any]) -> Callable[..., Any]:
    files, planner = CheckpointFiles(checkpoints.session), _part_planner()

    @functools.wraps(original)
    def load(state_dict: Any, **given: Any) -> Any:
        if not checkpoints.streams(given):
            return original(state_dict, **given)
        with files.reading(given), checkpoints.states(state_dict) as (states, lazy):
            outlines = {key: value for key, value in states.items() if value is not state_dict[key]}
            original(states, planner=planner(lazy), **_but_planner(given))
            for key in states:
                if key in outlines:
                    _set_rest(state_dict[key], states[key], checkpoints, lazy)
                elif states[key] is not state_dict[key]:
                    state_dict[key] = states[key]
        return None

    return load


def _part_planner() -> Callable[[_LazyTensors], Any]:
    """Return the class of planners for ``load``; a function, since it imports torch's class."""
    from torch.distributed.checkpoint import DefaultLoadPlanner

    class PartPlanner(DefaultLoadPlanner):
        """Reads a tensor of an optimizer whole, and keeps this rank's part of it."""

        def __init__(self, lazy: _LazyTensors) -> None:
            super().__init__()
            self._lazy = lazy
            self._reading: dict[str, tuple[torch.Tensor, int]] = {}
            """Tensors that are being read, with the number of elements that are missing, by name."""

        def lookup_tensor(self, index: Any) -> torch.Tensor:
            stand_in: torch.Tensor = super().lookup_tensor(index)
            if self._lazy.place(stand_in) is None:
                return stand_in
            if index.fqn not in self._reading:
                self._reading[index.fqn] = torch.empty(stand_in.shape, dtype=stand_in.dtype), stand_in.numel()
            return self._reading[index.fqn][0]

        def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
            super().commit_tensor(read_item, tensor)
            name = read_item.dest_index.fqn
            if name not in self._reading:
                return
            whole, missing = self._reading[name]
            self._reading[name] = whole, missing - tensor.numel()
            if missing <= tensor.numel():
                del self._reading[name]
                place = self._lazy.place(self.state_dict[name])
                assert place is not None
                sharded, number, entry = place
                sharded.set_entry(number, entry, whole)

    return PartPlanner


def _set_rest(optimizer: Optimizer, state: Mapping[str, Any], checkpoints: _Checkpoints, lazy: _LazyTensors) -> None:
    """Give an optimizer the loaded settings of its groups, and the values of its state that are no shards."""
    for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
        group.update({name: value for name, value in saved.items() if name != "params"})
    sharded = checkpoints.optimizers.sharded(optimizer)
    assert sharded is not None
    parameters = list(dict.fromkeys(p for group in optimizer.param_groups for p in group["params"]))
    number = {id(p): i for i, p in enumerate(sharded.parameters)}
    for index, p in enumerate(parameters):
        for name, value in state["state"].get(index, {}).items():
            if id(p) in number and lazy.place(value) is None:
                sharded.set_entry(number[id(p)], name, value)


def _but_planner(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name != "planner"}


# Note [Streamed checkpoints]
#
# A checkpoint in the format of torch.distributed.checkpoint (DCP) is a folder with tensors one after the other, and
# their places. torch writes a tensor when it has asked a planner for it. The planner here gathers the tensor only then:
# a parameter (zero_lvl=3), or what an optimizer keeps for one parameter. So no rank ever has more than one such tensor
# beside its shards. Rank 0 writes, to the disk that it sees; the other ranks answer its requests (Note [Asking] in
# exchange/requests.py) until it has ended. The files are those of one process, and plain torch loads them.
#
# The state of an optimizer is streamed if the program gives the optimizer itself, as torch's ``Stateful`` objects are
# given: ``save({"model": model, "optimizer": optimizer}, checkpoint_id=path)``. ``optimizer.state_dict()`` has gathered
# the whole state before ``save`` is called.
#
# Each rank loads rank 0's files (checkpoint_files.py). Tensors of an optimizer are read one by one, and the rank keeps
# its part of each.
