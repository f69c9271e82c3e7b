"""``SharedProcessGroup``: the backend "lagom" for ranks on one host, which exchange through shared memory."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from lagom.collectives.tensor_ops import TensorCollectives, ordered, put_back
from lagom.collectives.torch_backend.arguments import handed_on, listed, nested, reduction_of, root_of
from lagom.collectives.torch_backend.works import SharedWork, WorkThread, finished
from lagom.monitor.spans import COLLECTIVE, current_spans

if TYPE_CHECKING:
    from lagom.collectives.native import Communicator

BACKEND = "lagom"
"""Name of the backend in torch."""
_Base: Any = dist.ProcessGroup  # its methods have overloads of many kinds


class SharedProcessGroup(_Base):  # type: ignore[misc]
    """Exchanges dense CPU tensors through shared memory; other tensors and other reductions go through gloo.

    See Note [Order of collectives].

    Raises:
        RuntimeError: from every method or its work, when the exchange fails; all later ones fail as well.
    """

    def __init__(self, gloo: Any, moves: TensorCollectives, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = gloo
        self._moves = moves
        self._rank = rank
        self._timeout = timeout
        self._name = ""
        self._lanes: dict[object, WorkThread] = {}
        self._lock = threading.Lock()
        _all.add(self)

    def getBackendName(self) -> str:
        """Return the backend's name, for torch."""
        return BACKEND

    def name(self) -> str:
        """Return the backend's name, for torch."""
        return BACKEND

    @property
    def group_name(self) -> str:
        """Torch's name of the group; the base class knows it only for groups that torch makes itself."""
        return self._name

    def _set_group_name(self, name: str) -> None:
        """Set the name, which torch also reads after it has forgotten the group: `destroy_process_group(group)`."""
        self._name = name
        super()._set_group_name(name)

    @property
    def _device_types(self) -> list[torch.device]:
        """Device types, which torch's checkpoints read."""
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> Any:
        """Return this group as the backend of every device."""
        return self

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Any:
        """Reduce each tensor by itself, in place."""
        moves, given, reduction = self._moves, listed(tensors), reduction_of(opts)
        if reduction is None or not moves.reduces(given, reduction):
            gloos = self._gloo.allreduce
            return self._by_gloo("all_reduce", lambda one: gloos([one], *handed_on(opts)), opts, given)

        def run() -> None:
            for tensor in given:
                moves.all_reduce(tensor, reduction)

        return self._collective(run, opts, given)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        """Reduce as ``allreduce``."""
        single = dist.AllreduceOptions()  # gloo expects these options
        single.reduceOp = getattr(opts, "reduceOp", single.reduceOp)
        single.timeout = getattr(opts, "timeout", single.timeout)
        single.asyncOp = getattr(opts, "asyncOp", True)
        return self.allreduce(tensors, single)

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Any:
        """Broadcast in place; ``opts`` has the root, or is the root."""
        moves, given, root = self._moves, listed(tensors), root_of(opts)
        if not moves.carries(given):
            gloos = self._gloo.broadcast
            return self._by_gloo("broadcast", lambda one: gloos([one], *handed_on(opts)), opts, given)

        def run() -> None:
            for tensor in given:
                moves.broadcast(tensor, root)

        return self._collective(run, opts, given)

    def reduce(self, tensors: Any, opts: Any = None, op: Any = None, timeout: Any = None) -> Any:
        """Reduce into the root's tensors."""
        moves, given, root = self._moves, listed(tensors), root_of(opts)
        reduction = reduction_of(op if isinstance(opts, int) else opts)
        if reduction is None or not moves.reduces(given, reduction):
            others = (*handed_on(opts), *handed_on(op))
            return self._by_gloo("reduce", lambda one: self._gloo.reduce([one], *others), opts, given)

        def run() -> None:
            for tensor in given:
                moves.reduce(tensor, reduction, root)

        return self._collective(run, opts, given)

    def allgather(self, output_lists: Any, inputs: Any, opts: Any = None) -> Any:
        """Gather each input into one list of outputs."""
        outs, given = nested(output_lists), listed(inputs)
        moves = self._moves
        if not moves.carries([*given, *chain.from_iterable(outs)]):
            gloos = self._gloo.allgather
            return self._by_gloo(
                "all_gather", lambda out, one: gloos([out], [one], *handed_on(opts)), opts, outs, given
            )

        def run() -> None:
            for out, tensor in zip(outs, given, strict=True):
                moves.all_gather_list(out, tensor)

        return self._collective(run, opts, outs[0])

    def allgather_coalesced(self, output_lists: Any, inputs: Any, opts: Any = None) -> Any:
        """Gather into ``output_lists``, which has a list for each rank, with an output for each input."""
        outs = nested(output_lists)
        return self.allgather([list(one) for one in zip(*outs, strict=True)], inputs, opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        """Fill ``output`` with all inputs, one behind the other."""
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Gather several tensors, each as ``all_gather_single``."""
        moves = self._moves
        outs, given = listed(outputs), listed(inputs)
        if not moves.carries([*given, *outs]):
            gloos = self._gloo._allgather_base
            return self._by_gloo("all_gather", lambda out, one: gloos(out, one, *handed_on(opts)), opts, outs, given)

        def run() -> None:
            for out, tensor in zip(outs, given, strict=True):
                moves.all_gather(out, tensor)

        return self._collective(run, opts, outs)

    def reduce_scatter(self, outputs: Any, input_lists: Any, opts: Any = None) -> Any:
        """Reduce one list of inputs into each output."""
        moves, outs, given, reduction = self._moves, listed(outputs), nested(input_lists), reduction_of(opts)
        if reduction is None or not moves.reduces([*outs, *chain.from_iterable(given)], reduction):
            gloos = self._gloo.reduce_scatter
            return self._by_gloo(
                "reduce_scatter", lambda out, one: gloos([out], [one], *handed_on(opts)), opts, outs, given
            )

        def run() -> None:
            for out, parts in zip(outs, given, strict=True):
                moves.reduce_scatter_list(out, parts, reduction)

        return self._collective(run, opts, outs)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        """Fill ``output`` with this rank's part of the reduced ``input``."""
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Reduce several tensors, each as ``reduce_scatter_single``."""
        moves, outs, given, reduction = self._moves, listed(outputs), listed(inputs), reduction_of(opts)
        if reduction is None or not moves.reduces([*outs, *given], reduction):
            gloos = self._gloo._reduce_scatter_base
            return self._by_gloo(
                "reduce_scatter", lambda out, one: gloos(out, one, *handed_on(opts)), opts, outs, given
            )

        def run() -> None:
            for out, tensor in zip(outs, given, strict=True):
                moves.reduce_scatter(out, tensor, reduction)

        return self._collective(run, opts, outs)

    def gather(self, output_lists: Any, inputs: Any, opts: Any = None) -> Any:
        """Gather the inputs of all ranks into the root's lists."""
        moves, outs, given, root = self._moves, nested(output_lists), listed(inputs), root_of(opts)
        if not moves.carries([*given, *chain.from_iterable(outs)]):
            gloos, rows = self._gloo.gather, outs[:1] or [[]]
            return self._by_gloo(
                "gather", lambda to, one: gloos([to][: len(outs)], [one], *handed_on(opts)), opts, rows, given
            )
        return self._collective(lambda: moves.gather(outs[0] if outs else [], given[0], root), opts, given)

    def scatter(self, outputs: Any, input_lists: Any, opts: Any = None) -> Any:
        """Fill each rank's output from its place in the root's list."""
        moves, outs, given, root = self._moves, listed(outputs), nested(input_lists), root_of(opts)
        if not moves.carries([*outs, *chain.from_iterable(given)]):
            gloos, rows = self._gloo.scatter, given[:1] or [[]]
            return self._by_gloo(
                "scatter", lambda to, one: gloos([to], [one][: len(given)], *handed_on(opts)), opts, outs, rows
            )
        return self._collective(lambda: moves.scatter(outs[0], given[0] if given else [], root), opts, outs)

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Send one tensor to each rank and receive one from each, of any shapes."""
        moves, outs, given = self._moves, listed(outputs), listed(inputs)
        if not moves.carries([*outs, *given]):
            gloos = self._gloo.alltoall
            return self._by_gloo("all_to_all", lambda to, one: gloos(to, one, *handed_on(opts)), opts, [outs], [given])
        return self._collective(lambda: moves.all_to_all(outs, given), opts, outs)

    def all_to_all_single(self, output: Tensor, input: Tensor, out_sizes: Any, in_sizes: Any, opts: Any = None) -> Any:
        """Send rows of ``input`` to each rank, in equal parts unless sizes are given."""
        moves = self._moves
        if not moves.carries([output, input]):
            others = (out_sizes, in_sizes, *handed_on(opts))
            gloos = self._gloo.alltoall_base
            return self._by_gloo("all_to_all_single", lambda to, one: gloos(to, one, *others), opts, [output], [input])
        return self._collective(lambda: moves.all_to_all_single(output, input, out_sizes, in_sizes), opts, [output])

    def barrier(self, opts: Any = None) -> Any:
        """Begin a barrier; all ranks have come when the work is done."""
        moves = self._moves
        return self._collective(moves.barrier, opts, [])

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks within ``timeout``; the error names a rank that did not come."""
        moves = self._moves

        def run() -> None:
            moves.near.set_timeout((timeout or self._timeout).total_seconds())
            moves.barrier()
            moves.near.set_timeout(self._timeout.total_seconds())

        self._collective(run, None, []).wait()

    def send(self, tensors: Any, dst: int, tag: int = 0) -> Any:
        """Send to one rank. Messages arrive in the order of their sends, and must be received with their tags."""
        moves, (tensor,) = self._moves, listed(tensors)
        if not moves.carries([tensor]):
            return self._gloo.send([tensor], dst, tag)
        return self._lane(("send", dst)).later(lambda: moves.send(tensor, dst, tag), [tensor])

    def recv(self, tensors: Any, src: int, tag: int = 0) -> Any:
        """Receive from one rank; see ``send``."""
        moves, (tensor,) = self._moves, listed(tensors)
        if not moves.carries([tensor]):
            return self._gloo.recv([tensor], src, tag)
        return self._lane(("receive", src)).later(lambda: moves.receive(tensor, src, tag), [tensor], source=src)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        """Receive from the rank that sends next. No other receive may be under way."""
        moves, (tensor,) = self._moves, listed(tensors)
        if not moves.carries([tensor]):
            return self._gloo.recv_anysource([tensor], tag)
        work: SharedWork

        def run() -> None:
            work.source = moves.sender()
            moves.receive(tensor, work.source, tag)

        work = self._lane("any").prepare(run, [tensor])
        self._lane("any").start(work)
        return work

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long exchanges wait for a rank from now on."""
        self._timeout = timeout
        self._moves.near.set_timeout(timeout.total_seconds())

    def shutdown(self) -> None:
        """Close the connections, after the collectives that were called are done or have failed."""
        self._close_lanes()
        self._moves.near.close()

    def _close_lanes(self, *, waits: bool = True) -> None:
        for lane in self._lanes.values():
            lane.close()
        if waits and "collective" in self._lanes:
            self._lanes["collective"].wait()
        self._lanes.clear()

    def abort(self) -> None:
        """Fail the exchanges under way, on all ranks."""
        self._moves.near.abort(f"rank {self._rank} aborted its process group")
        self.shutdown()

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: exchanges are numbered anyway."""

    def _collective(self, run: Callable[[], object], opts: Any, result: Sequence[Tensor]) -> Any:
        if (spans := current_spans()) is not None:
            # The name of the method that made it.
            name = getattr(run, "__qualname__", "").partition(".<locals>")[0].rpartition(".")[2]
            run = spans.timed(COLLECTIVE, name, run, sum(one.nbytes for one in result), f"group {self._name}")
        lane = self._lane("collective")
        if getattr(opts, "asyncOp", True):
            return lane.later(run, result)
        if lane.is_idle:
            run()
            return finished(result)
        work = lane.later(run, result)
        work.wait()
        return work

    def _by_gloo(self, name: str, call: Callable[..., Any], opts: Any, *tensors: Sequence[Any]) -> Any:
        """Run a collective that memory does not carry over gloo, for one of each of ``tensors`` at a time.

        gloo would add up tensors that are given together. Ranks agree first: a rank whose tensors memory carries would
        wait there for the others, in vain.
        """
        moves = self._moves

        def run() -> None:
            moves.agree(f"{name} over gloo")
            for given in zip(*tensors, strict=True):
                in_order = [ordered(one) for one in given]  # gloo takes memory as it lies, gaps included
                call(*in_order).wait()
                put_back(given[0], in_order[0])

        result = tensors[0]
        return self._collective(run, opts, result[0] if result and isinstance(result[0], list) else result)

    def _lane(self, key: object) -> WorkThread:
        with self._lock:
            if key not in self._lanes:
                self._lanes[key] = WorkThread(f"lagom-{key}")
            return self._lanes[key]

    # Names that older versions of torch use.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


_all: weakref.WeakSet[SharedProcessGroup] = weakref.WeakSet()


def whole_groups(world_size: int) -> list[Communicator]:
    """Return the communicators of groups of all ranks."""
    return [one._moves.near for one in list(_all) if one.size() == world_size and type(one._moves) is TensorCollectives]


def _forget() -> None:
    for group in list(_all):
        group._lanes = {}  # their threads belong to the parent process


os.register_at_fork(after_in_child=_forget)


# Note [Order of collectives]
#
# Collectives of a group run one after the other, in the order in which they were called. A collective whose caller
# waits at once runs in the caller's thread, others in a thread of the group. To hand an exchange to a thread and to be
# woken by it costs ten times as much as a small exchange. A caller may run its own only when none is waiting or under
# way.
#
# Messages between two ranks have a thread for each direction, so that a send does not wait for a receive.
