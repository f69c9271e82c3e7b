"""``SharedProcessGroup``: the backend "lagom", a process group of torch over one of lagom's transports."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from lagom.exchange.torch_backend.arguments import flattened, handed_on, listed, nested, reduction_of, root_of
from lagom.exchange.torch_backend.gloo_fallback import run_by_gloo
from lagom.exchange.torch_backend.tensor_ops import TensorCollectives
from lagom.exchange.torch_backend.works import SharedWork, WorkThread, finished
from lagom.watch.spans import COLLECTIVE, current_spans

if TYPE_CHECKING:
    from lagom.exchange.native import Communicator
    from lagom.exchange.transport import Transport

BACKEND = "lagom"
"""Name of the backend in torch."""
_Base: Any = dist.ProcessGroup  # Any, since the methods of this class do not match torch's many overloads


class SharedProcessGroup(_Base):  # type: ignore[misc]
    """Exchanges tensors over ``transport``; gloo serves the tensors and reductions that the transport does not carry.

    See Note [Order of collectives].

    Raises:
        RuntimeError, OSError: from every method or its work, when the exchange fails; all later exchanges fail as well.
    """

    def __init__(self, gloo: Any, transport: Transport, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = gloo
        self._transport = transport
        self._moves = TensorCollectives(transport, rank, size)
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
        """Torch's name of the group, which the base class has only for groups that torch makes itself."""
        return self._name

    def _set_group_name(self, name: str) -> None:
        """Keep torch's name of the group: ``destroy_process_group(group)`` reads it after torch has forgotten it."""
        self._name = name
        super()._set_group_name(name)

    @property
    def _device_types(self) -> list[torch.device]:
        """Device types of the group, for torch's distributed checkpoints."""
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> Any:
        """Return this group as the backend of every device."""
        return self

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Any:
        """Reduce each tensor separately, in place."""
        return self._collective("all_reduce", [listed(tensors)], opts, reduction=reduction_of(opts))

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        """Reduce each tensor separately, in place, as ``allreduce``."""
        single = dist.AllreduceOptions()  # gloo expects these options
        single.reduceOp = getattr(opts, "reduceOp", single.reduceOp)
        single.timeout = getattr(opts, "timeout", single.timeout)
        single.asyncOp = getattr(opts, "asyncOp", True)
        return self.allreduce(tensors, single)

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Any:
        """Broadcast in place; ``opts`` is torch's options, or the root's number."""
        return self._collective("broadcast", [listed(tensors)], opts, root=root_of(opts))

    def reduce(self, tensors: Any, opts: Any = None, op: Any = None, timeout: Any = None) -> Any:
        """Reduce into the root's tensors."""
        reduction = reduction_of(op if isinstance(opts, int) else opts)
        return self._collective(
            "reduce", [listed(tensors)], opts, *handed_on(op), reduction=reduction, root=root_of(opts)
        )

    def allgather(self, output_lists: Any, inputs: Any, opts: Any = None) -> Any:
        """Gather input i of every rank into list i of the outputs."""
        return self._collective("all_gather_list", [nested(output_lists), listed(inputs)], opts)

    def allgather_coalesced(self, output_lists: Any, inputs: Any, opts: Any = None) -> Any:
        """Gather into ``output_lists``, which has a list for each rank, with an output for each input."""
        return self.allgather([list(one) for one in zip(*nested(output_lists), strict=True)], inputs, opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        """Fill ``output`` with the inputs of all ranks, concatenated in rank order."""
        return self._collective("all_gather", [[output], [input]], opts)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Gather several tensors, each as ``all_gather_single``."""
        return self._collective("all_gather", [listed(outputs), listed(inputs)], opts)

    def reduce_scatter(self, outputs: Any, input_lists: Any, opts: Any = None) -> Any:
        """Fill output i with this rank's part of the reduction of list i, which has one input for each rank."""
        tensors: list[list[Any]] = [listed(outputs), nested(input_lists)]
        return self._collective("reduce_scatter_list", tensors, opts, reduction=reduction_of(opts))

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        """Fill ``output`` with this rank's part of the reduced ``input``."""
        return self._collective("reduce_scatter", [[output], [input]], opts, reduction=reduction_of(opts))

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Reduce several tensors, each as ``reduce_scatter_single``."""
        tensors = [listed(outputs), listed(inputs)]
        return self._collective("reduce_scatter", tensors, opts, reduction=reduction_of(opts))

    def gather(self, output_lists: Any, inputs: Any, opts: Any = None) -> Any:
        """Gather the inputs of all ranks into the root's lists."""
        return self._collective("gather", [nested(output_lists) or [[]], listed(inputs)], opts, root=root_of(opts))

    def scatter(self, outputs: Any, input_lists: Any, opts: Any = None) -> Any:
        """Fill each rank's output with the input that the root's list has for the rank."""
        return self._collective("scatter", [listed(outputs), nested(input_lists) or [[]]], opts, root=root_of(opts))

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Send one tensor to each rank and receive one from each, of any shapes."""
        return self._collective("all_to_all", [[listed(outputs)], [listed(inputs)]], opts)

    def all_to_all_single(self, output: Tensor, input: Tensor, out_sizes: Any, in_sizes: Any, opts: Any = None) -> Any:
        """Send rows of ``input`` to each rank, and fill ``output`` with theirs; equal parts unless sizes are given."""
        return self._collective("all_to_all_single", [[output], [input]], opts, to_here=out_sizes, to_all=in_sizes)

    def barrier(self, opts: Any = None) -> Any:
        """Begin a barrier; its work is done when all ranks have called it."""
        return self._start("barrier", self._moves.barrier, opts)

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks within ``timeout``, over gloo with several hosts.

        The error names one missing rank; over gloo, all of them if ``wait_all_ranks``.
        """
        memory, limit, usual = self._transport.memory, timeout or self._timeout, self._timeout

        def run() -> None:
            if memory is None:
                self._gloo.monitored_barrier(limit, wait_all_ranks)
                return
            memory.set_timeout(limit.total_seconds())
            memory.barrier()
            memory.set_timeout(usual.total_seconds())  # after a failure all later exchanges fail

        self._start("barrier", run, None).wait()

    def send(self, tensors: Any, dst: int, tag: int = 0) -> Any:
        """Send to one rank. Messages arrive in the order of sending, and must be received with the sender's tags."""
        (tensor,) = listed(tensors)
        if not self._transport.carries("send", [tensor]):
            return self._gloo.send([tensor], dst, tag)
        return self._lane(("send", dst)).later(partial(self._moves.send, tensor, dst, tag), [tensor])

    def recv(self, tensors: Any, src: int, tag: int = 0) -> Any:
        """Receive from one rank; see ``send``."""
        (tensor,) = listed(tensors)
        if not self._transport.carries("receive", [tensor]):
            return self._gloo.recv([tensor], src, tag)
        return self._lane(("receive", src)).later(partial(self._moves.receive, tensor, src, tag), [tensor], source=src)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        """Receive from the first rank that sends. No other receive may be in progress."""
        moves, (tensor,) = self._moves, listed(tensors)
        if not self._transport.carries("receive", [tensor]):
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
        self._transport.set_timeout(timeout.total_seconds())

    def shutdown(self) -> None:
        """Wait until all collectives that were called are done or have failed, and close the connections."""
        self._close_lanes()
        self._transport.close()

    def _close_lanes(self, *, waits: bool = True) -> None:
        for lane in self._lanes.values():
            lane.close()
        if waits and "collective" in self._lanes:
            self._lanes["collective"].wait()
        self._lanes.clear()

    def abort(self) -> None:
        """Fail the exchanges in progress: on all ranks of one host; with several hosts, on the ranks of this host."""
        self._transport.abort(self._rank)
        # Do not wait for an exchange between hosts, which the abort does not end.
        self._close_lanes(waits=self._transport.memory is not None)
        self._transport.close()

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: lagom's exchanges have numbers of their own."""

    def _collective(self, name: str, tensors: Sequence[Sequence[Any]], opts: Any, *others: Any, **asked: Any) -> Any:
        """Run a collective over the transport if it carries ``tensors``, else over gloo.

        Args:
            name: name of the method of ``TensorCollectives``.
            tensors: one list for each argument of the method that is a tensor or a list of tensors, results first. Each
                list has one element for each call of the method.
            others: further arguments of gloo's method.
            asked: further arguments of the method of ``TensorCollectives``, such as the root.
        """
        every = tensors[0] if len(tensors) == 1 else flattened(tensors)
        if self._transport.carries(name, every, asked.get("reduction", "")):
            run = partial(_run, getattr(self._moves, name), tensors, asked)
        else:
            others = (*asked.values(), *handed_on(opts)) if name == "all_to_all_single" else (*handed_on(opts), *others)
            run = partial(run_by_gloo, self._gloo, self._moves, name, tensors, others)
        result = tensors[0]
        return self._start(name, run, opts, result[0] if result and isinstance(result[0], list) else result)

    def _start(self, name: str, run: Callable[[], object], opts: Any, result: Sequence[Tensor] = ()) -> Any:
        """Run the exchange ``name`` in its order: in this thread if the caller waits and all earlier ones are done."""
        if (spans := current_spans()) is not None:
            run = spans.timed(COLLECTIVE, name, run, sum(one.nbytes for one in result), f"group {self._name}")
        lane = self._lanes.get("collective") or self._lane("collective")
        if getattr(opts, "asyncOp", True):
            return lane.later(run, result)
        if lane.is_idle:
            run()
            return finished(result)
        work = lane.later(run, result)
        work.wait()
        return work

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


def _run(call: Callable[..., object], tensors: Sequence[Sequence[Any]], asked: dict[str, Any]) -> None:
    for given in zip(*tensors, strict=True):
        call(*given, **asked)


_all: weakref.WeakSet[SharedProcessGroup] = weakref.WeakSet()


def whole_groups(world_size: int) -> list[Communicator]:
    """Return the communicators of those groups that have ``world_size`` ranks, all ranks of the run."""
    found = [one._transport.memory for one in list(_all) if one.size() == world_size]
    return [memory for memory in found if memory is not None]


def _forget() -> None:
    for group in list(_all):
        group._lanes = {}  # a fork does not inherit their threads


os.register_at_fork(after_in_child=_forget)


# Note [Order of collectives]
#
# Collectives of a group run one after the other, in the order in which they were called. An asynchronous collective
# runs in a thread of the group. A synchronous collective runs in the caller's thread, unless earlier collectives are
# unfinished: to pass an exchange to a thread and to be woken by it takes ten times as long as a small exchange.
#
# Messages between two ranks have a thread for each direction, so that a send does not wait for a receive.
