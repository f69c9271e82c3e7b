"""``lagomccl``: a double of NCCL, which exchanges the test device's tensors and takes no liberty that NCCL forbids.

It goes over gloo underneath. See Note [A double of NCCL].
"""

from __future__ import annotations

import os
import queue
import socket
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tests.accelerator.device_build import MODULE

BACKEND, DEVICE = "lagomccl", "lagomtest"
_HEADER = 256
_SHUT_DOWN = "the process group has been shut down"
_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "SUM": lambda parts: parts.sum(dim=0, dtype=parts.dtype),
    "AVG": lambda parts: parts.sum(dim=0, dtype=parts.dtype) / len(parts),
    "MAX": lambda parts: parts.amax(dim=0),
    "MIN": lambda parts: parts.amin(dim=0),
    "PRODUCT": lambda parts: parts.prod(dim=0, dtype=parts.dtype),
}
_launched = Counter[int]()
"""Exchanges of this process, over all communicators of one number of ranks."""


def register() -> None:
    """Register the backend with torch, as the one for the test device."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, Communicator, devices=[DEVICE])
        # From torch 2.15 on, the flight recorder raises for process groups written in Python, unless this set has them.
        recorded: set[str] = getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
        recorded.add(BACKEND)


class _Call(NamedTuple):
    """One exchange, as all ranks have to make it."""

    operation: str
    sent: Tensor
    """This rank's bytes as they were at the call."""
    outputs: list[Tensor]
    finish: Callable[[list[Tensor]], Sequence[Tensor]]
    """Makes the outputs' values from the tensors that all ranks sent."""
    header: str
    uneven: bool
    """Whether ranks may send different numbers of elements."""


_Base: Any = dist.ProcessGroup  # Any, since the methods of this class do not match torch's many overloads


class Communicator(_Base):  # type: ignore[misc]
    """A communicator between ranks that have one test device each."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._store, self._rank, self._size, self._timeout = store, rank, size, timeout
        self._gloo: Any = None
        self.device: torch.device | None = None
        self._stream: torch.Stream | None = None
        self._calls: queue.SimpleQueue[DeviceWork | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._unfinished: list[DeviceWork] = []
        self._number = 0
        self._name = ""
        self.broken = ""
        """Why the communicator is of no use any more."""

    def getBackendName(self) -> str:
        return BACKEND

    def name(self) -> str:
        return BACKEND

    @property
    def group_name(self) -> str:
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(DEVICE)]

    def _get_backend(self, device: torch.device) -> Any:
        if device.type != DEVICE:
            raise RuntimeError(f"No backend type associated with device type {device.type}")
        return self

    def _set_sequence_number_for_group(self) -> None: ...

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    # The exchanges.

    def allreduce(self, tensors: Any, opts: Any = None) -> DeviceWork:
        (tensor,) = _listed(tensors)
        reduce = _REDUCTIONS[_reduction(opts)]
        return self._begin("ALLREDUCE", tensor, [tensor], lambda parts: [reduce(torch.stack(parts))], opts)

    def reduce(self, tensors: Any, opts: Any) -> DeviceWork:
        (tensor,) = _listed(tensors)
        reduce, root = _REDUCTIONS[_reduction(opts)], opts.rootRank
        outputs = [tensor] if self._rank == root else []
        return self._begin("REDUCE", tensor, outputs, lambda parts: [reduce(torch.stack(parts))], opts, root)

    def broadcast(self, tensors: Any, opts: Any) -> DeviceWork:
        (tensor,) = _listed(tensors)
        root = opts if isinstance(opts, int) else opts.rootRank
        outputs = [] if self._rank == root else [tensor]
        return self._begin("BROADCAST", tensor, outputs, lambda parts: [parts[root]], opts, root)

    def allgather(self, output_lists: Any, inputs: Any, opts: Any = None) -> DeviceWork:
        (outputs,), (tensor,) = output_lists, _listed(inputs)
        return self._begin("ALLGATHER", tensor, list(outputs), list, opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> DeviceWork:
        _require(output.numel() == input.numel() * self._size, "output tensor size is not world size times input's")
        return self._begin(
            "_ALLGATHER_BASE", input, [output], lambda parts: [torch.cat([p.flatten() for p in parts])], opts
        )

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> DeviceWork:
        _require(input.numel() == output.numel() * self._size, "input tensor size is not world size times output's")
        reduce = _REDUCTIONS[_reduction(opts)]

        def finish(parts: list[Tensor]) -> list[Tensor]:
            mine = [part.flatten().chunk(self._size)[self._rank] for part in parts]
            return [reduce(torch.stack(mine))]

        return self._begin("_REDUCE_SCATTER_BASE", input, [output], finish, opts)

    def reduce_scatter(self, outputs: Any, input_lists: Any, opts: Any = None) -> DeviceWork:
        (output,), (inputs,) = _listed(outputs), input_lists
        return self.reduce_scatter_single(output, torch.cat([one.flatten() for one in inputs]), opts)

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_sizes: Any, input_sizes: Any, opts: Any = None
    ) -> DeviceWork:
        _check([output])
        counts = list(input_sizes) or [len(input) // self._size] * self._size
        table = torch.tensor(counts, device=input.device)
        tables = torch.empty(self._size, self._size, dtype=table.dtype, device=input.device)
        self.all_gather_single(tables, table).wait()
        sizes = tables.tolist()

        def finish(parts: list[Tensor]) -> list[Tensor]:
            shape = (-1, *input.shape[1:])
            rows = [part.reshape(shape).split(sizes[r])[self._rank] for r, part in enumerate(parts)]
            return [torch.cat(rows)]

        return self._begin("ALLTOALL_BASE", input, [output], finish, opts, uneven=True)

    def barrier(self, opts: Any = None) -> DeviceWork:
        device = self.device or torch.device(DEVICE, sys.modules[MODULE].current_device())
        work = self.allreduce([torch.zeros(1, device=device)])
        work.wait_on_host()
        return work

    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single

    def shutdown(self) -> None:
        """Wait for the exchanges in progress, and end."""
        self._end(_SHUT_DOWN)
        if self._thread is not None:
            self._thread.join(self._timeout.total_seconds())

    def abort(self) -> None:
        """Give up the exchanges in progress."""
        self._end("the process group has been aborted")

    def forget(self, work: DeviceWork) -> None:
        """Let go of the memory of an exchange that has filled it."""
        self._unfinished = [one for one in self._unfinished if one is not work]

    def _end(self, why: str) -> None:
        self._calls.put(None)
        self.broken = self.broken or why

    def _begin(
        self,
        operation: str,
        tensor: Tensor,
        outputs: list[Tensor],
        finish: Callable[[list[Tensor]], Sequence[Tensor]],
        opts: Any = None,
        root: int = 0,
        uneven: bool = False,
    ) -> DeviceWork:
        _check([tensor, *outputs])
        if self.broken:
            raise dist.DistBackendError(_aborted(self._rank, self.broken))
        self._connect(tensor.device)
        assert self._stream is not None
        native = sys.modules[MODULE]
        for work in list(self._unfinished):  # one after the other on the communicator's own stream
            if work.touches([tensor, *outputs]):
                work.land()
        native.drain(*_key(torch.accelerator.current_stream(tensor.device)))
        self._number += 1
        _launched[self._size] += 1
        size = "" if uneven else tensor.numel()
        header = f"{operation} {tensor.dtype} {size} {_reduction(opts)} {root} {self._number} {_launched[self._size]}"
        with torch.no_grad():
            sent = torch.ops.lagomtest.host_view(tensor.detach()).clone()
            for output in outputs:
                _poison(torch.ops.lagomtest.host_view(output.detach()))
        work = DeviceWork(self, _Call(operation, sent, outputs, finish, header, uneven), self._number)
        self._unfinished = [one for one in self._unfinished if not one.has_landed] + [work]
        native.enqueue(*_key(self._stream), work.land)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="lagomccl", daemon=True)
            self._thread.start()
        self._calls.put(work)
        return work

    def _connect(self, device: torch.device) -> None:
        """Connect at the first exchange, as NCCL does, in the caller's thread."""
        if self.device is not None:
            _require(self.device == device, f"this communicator is for {self.device}, not {device}")
            return
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname="127.0.0.1")]
        options._timeout = self._timeout
        try:
            self._gloo = gloo(dist.PrefixStore("lagomccl", self._store), self._rank, self._size, options)
            devices = self._all_gather_text(_physical(device))
        except RuntimeError as error:
            self.broken = _remote_error(error)
            raise dist.DistBackendError(self.broken) from error
        for other, name in enumerate(devices):
            if other != self._rank and name == devices[self._rank]:
                self.broken = (
                    "NCCL error: invalid usage (run with NCCL_DEBUG=WARN for details). ncclInvalidUsage: This usually "
                    f"reflects invalid usage of NCCL library. Last error: Duplicate GPU detected : rank {self._rank} "
                    f"and rank {other} both on device {name}"
                )
                raise dist.DistBackendError(self.broken)
        self.device = device
        self._stream = torch.Stream(device)

    def _run(self) -> None:
        """Make the exchanges, one after the other, in the communicator's thread."""
        while (work := self._calls.get()) is not None:
            self._perform(work)

    def _perform(self, work: DeviceWork) -> None:
        try:
            if self.broken and self.broken != _SHUT_DOWN:
                raise dist.DistBackendError(_aborted(self._rank, self.broken))
            work.complete(self._exchange(work))
        except Exception as error:
            self.broken = self.broken or str(error)
            work.fail(error)

    def _exchange(self, work: DeviceWork) -> list[Tensor]:
        call = work.call
        try:
            headers = self._all_gather_text(call.header)
            if any(header != call.header for header in headers):
                threading.Event().wait(self._timeout.total_seconds())  # NCCL's kernels would wait for each other
                raise dist.DistBackendError(self._timed_out(work))
            parts = self._all_gather(call.sent.flatten(), call.uneven)
            parts = [part.reshape(call.sent.shape) if not call.uneven else part for part in parts]
            return list(call.finish(parts)) if call.outputs else []
        except RuntimeError as error:
            if isinstance(error, dist.DistBackendError):
                raise
            is_late = "imed out" in str(error)
            raise dist.DistBackendError(self._timed_out(work) if is_late else _remote_error(error)) from error

    def _all_gather(self, part: Tensor, uneven: bool) -> list[Tensor]:
        """Return the flat tensors of all ranks, exchanged as bytes."""
        own = part.contiguous().view(torch.uint8) if part.numel() else torch.empty(0, dtype=torch.uint8)
        lengths = [len(own)] * self._size
        if uneven:
            counts = [torch.zeros(1, dtype=torch.int64) for _ in range(self._size)]
            self._gather(counts, torch.tensor([len(own)]))
            lengths = [int(count) for count in counts]
        longest = max(lengths)
        if longest == 0:
            return [part] * self._size
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(own)] = own
        parts = [torch.empty(longest, dtype=torch.uint8) for _ in range(self._size)]
        self._gather(parts, padded)
        return [one[:length].clone().view(part.dtype) for one, length in zip(parts, lengths, strict=True)]

    def _all_gather_text(self, text: str) -> list[str]:
        own = torch.zeros(_HEADER, dtype=torch.uint8, device="cpu")
        data = text.encode()[:_HEADER]
        own[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        parts = [torch.empty(_HEADER, dtype=torch.uint8, device="cpu") for _ in range(self._size)]
        self._gather(parts, own)
        return [bytes(part.tolist()).rstrip(b"\0").decode() for part in parts]

    def _gather(self, parts: list[Tensor], own: Tensor) -> None:
        options = dist.distributed_c10d.AllgatherOptions()
        options.timeout = self._timeout
        self._gloo.allgather([parts], [own], options).wait()

    def _timed_out(self, work: DeviceWork) -> str:
        limit = int(self._timeout.total_seconds() * 1000)
        return (
            f"[Rank {self._rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={work.number}, "
            f"OpType={work.call.operation}, NumelIn={work.call.sent.numel()}, Timeout(ms)={limit}) ran for {limit} "
            "milliseconds before timing out."
        )


class DeviceWork(dist.Work):
    """Handle of an exchange. ``wait`` has the current stream wait, not the host."""

    def __init__(self, group: Communicator, call: _Call, number: int) -> None:
        super().__init__()
        self.call, self.number = call, number
        self._group = group
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._results: list[Tensor] = []
        self._error: Exception | None = None
        self._spans = [_span(tensor) for tensor in call.outputs]
        self.has_landed = False
        self._future: torch.futures.Future[Any] = torch.futures.Future()
        self._future.set_result(list(call.outputs))

    def complete(self, results: list[Tensor]) -> None:
        """Keep what the exchange has brought, for ``land``."""
        self._results = results
        self._done.set()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._done.set()

    def touches(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether the exchange fills memory of ``tensors``, and has not yet."""
        spans = [_span(tensor) for tensor in tensors]
        return not self.has_landed and any(a < d and c < b for a, b in self._spans for c, d in spans)

    def land(self) -> None:
        """Write the results to the outputs: a late task, which waits for the exchange."""
        self._done.wait()
        with self._lock:
            if self._error is not None:
                raise self._error
            if not self.has_landed:
                self.has_landed = True
                with torch.no_grad():
                    for output, value in zip(self.call.outputs, self._results, strict=True):
                        view = torch.ops.lagomtest.host_view(output.detach())
                        view.copy_(value.reshape(view.shape))
                self._results = []
                self._group.forget(self)

    def wait(self, timeout: Any = None) -> bool:
        """Have the current stream wait for the exchange."""
        device = self._group.device
        sys.modules[MODULE].enqueue(*_key(torch.accelerator.current_stream(device)), self.land)
        return True

    def wait_on_host(self) -> None:
        """Wait here, as NCCL's barrier does."""
        self.land()

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        """Return whether the exchange has ended; then its outputs may be read."""
        if not self._done.is_set():
            return False
        if self._error is None:
            self.land()
        return True

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> Any:
        return self._error

    def result(self) -> list[Tensor]:
        return list(self.call.outputs)

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future that is done, as NCCL's is for a program that orders by streams; this stream waits."""
        self.wait()
        return self._future

    getFuture = get_future


def _key(stream: torch.Stream) -> tuple[int, int]:
    return stream.device_index, stream.stream_id


def _span(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes


def _poison(tensor: Tensor) -> None:
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(torch.nan)
    elif tensor.dtype is not torch.bool:
        tensor.fill_(torch.iinfo(tensor.dtype).max)


def _listed(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _reduction(opts: Any) -> str:
    """Return the name of the reduction that ``opts`` ask for: the sum, if none."""
    asked = getattr(opts, "reduceOp", dist.ReduceOp.SUM)
    for name in _REDUCTIONS:
        if asked == getattr(dist.ReduceOp, name):
            return name
    raise ValueError(f"Cannot use {asked} with NCCL")


def _require(condition: bool, text: str) -> None:
    if not condition:
        raise ValueError(text)


def _check(tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        _require(tensor.device.type == DEVICE, f"Tensors must be {DEVICE} and dense, but one is on {tensor.device}")
        _require(tensor.is_contiguous(), "Tensors must be contiguous")


def _physical(device: torch.device) -> str:
    """Return the name of the device behind a number, which the mask may have changed."""
    mask = os.environ.get("LAGOMTEST_VISIBLE_DEVICES")
    number = mask.split(",")[device.index] if mask else device.index
    return f"{socket.gethostname()} {number}"


def _aborted(rank: int, why: str) -> str:
    return f"NCCL communicator was aborted on rank {rank}. Original reason for failure was: {why}"


def _remote_error(error: Exception) -> str:
    return (
        "NCCL error: remote process exited or there was a network error. ncclRemoteError: A call failed possibly due "
        f"to a network error or a remote process exiting prematurely. Last error: {error}"
    )


# Note [A double of NCCL]
#
# Like NCCL, and unlike gloo, this backend takes only the device's tensors, which must be contiguous; it connects at the
# first exchange; it refuses two ranks on one device; its exchanges run on another thread, in their order, and ``wait``
# orders streams and does not wait on the host.
#
# Where NCCL's result is undefined, the double's is wrong on purpose. An exchange takes the input as it is at the call,
# so that what is written later is not sent. Its outputs are NaN until a stream that waits for it comes to its next
# kernel; and they are filled then, whatever has been written to them in between.
#
# NCCL does not compare what ranks ask for: kernels that do not fit wait for each other until a time limit. All ranks
# here send a header before each exchange: operation, type, size, root, the number within the communicator, and the
# number over all communicators of as many ranks, since two communicators that are used in another order on one rank can
# block each other. With any difference the exchange lasts until the time limit, and fails with the text of NCCL's
# watchdog; all later exchanges of the communicator fail. An error is raised by the call that comes to need the result;
# NCCL's watchdog would end the process.
