"""``Entry``, one requested exchange, and ``Ranks``, which does the exchanges of matched entries."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lagom.accelerators import in_stream, make_stream, record_event, wait_event
from lagom.exchange.device_backend import is_served
from lagom.extensions.compat.horovod.exceptions import WrongArguments
from lagom.extensions.compat.horovod.matching import Match, Request
from lagom.gradients.reduction.buckets import Bucket
from lagom.gradients.reduction.sliced import Adasum
from lagom.watch.spans import activity

_OPS = {
    "average": dist.ReduceOp.SUM,
    "sum": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}


class Entry:
    """One exchange that the program has asked for.

    Args:
        tensor: this rank's input.
        in_place: write the result into ``tensor``, and not into a new tensor.
    """

    def __init__(self, request: Request, tensor: Tensor, in_place: bool = False) -> None:
        self.request = request
        self.tensor = tensor
        self.result: Tensor | None = None
        self.received: list[int] = []
        """Number of rows from each rank, after an alltoall."""
        self.error: BaseException | None = None
        self.done = threading.Event()
        self._in_place = in_place
        self.input_ready: Any = record_event(tensor)
        """Event of the accelerator after which ``tensor`` may be read; None on the CPU, as ``result_ready`` is."""
        self.result_ready: Any = None
        # Horovod's timeline has a row for each tensor, with these words.
        self._negotiation = activity(request.name, f"NEGOTIATE_{request.kind.upper()}")
        self._negotiation.__enter__()

    def end_negotiation(self) -> None:
        """Note in the timeline that all ranks have asked for the exchange."""
        self._negotiation.__exit__(None, None, None)

    def fill(self, result: Tensor) -> None:
        """Set the result."""
        if self._in_place:
            # Through .data, as Horovod writes: autograd does not notice.
            self.tensor.data.copy_(result)
            self.result = self.tensor
        else:
            self.result = result.to(self.tensor.device)

    def settle(self) -> None:
        """Make the program's stream on the accelerator wait for the result."""
        if self.result_ready is not None:
            wait_event(self.result_ready, self.tensor, self.result)


class Ranks:
    """The ranks of a process set and their process group.

    Args:
        members: global ranks, in order.
        rank: place of this process among them.
        group: torch's process group; None for a single rank.
    """

    def __init__(self, members: Sequence[int], rank: int, group: Any) -> None:
        self.members = tuple(members)
        self.rank = rank
        self.world_size = len(self.members)
        self.gpu_of_zeros = -1
        """Number of the GPU for zeros once this rank has joined; -1 for the current one of the negotiator's thread."""
        self._group = group
        self._streams: dict[int, Any] = {}

    def perform(self, batch: Sequence[Match], entries: Mapping[str, Entry]) -> None:
        """Do one batch of exchanges; set the result or the error of this rank's ``entries``, a mapping by name."""
        mine = [entries.get(match.first.name) for match in batch]
        present = [entry for entry in mine if entry is not None]
        for entry in present:
            entry.end_negotiation()
        try:
            if batch[0].problem:
                raise (WrongArguments if batch[0].is_wrong_argument else RuntimeError)(batch[0].problem)
            with torch.no_grad(), ExitStack() as stack:
                for match in batch:
                    stack.enter_context(activity(match.first.name, match.first.kind.upper(), match.first.num_bytes))
                stack.enter_context(self._own_stream(batch[0].first.device, present))
                if batch[0].first.kind == "allreduce":
                    self._all_reduce_batch(batch, mine)
                elif batch[0].first.kind != "barrier":  # a barrier is complete once all ranks have asked for it
                    # A single exchange, which every rank has asked for.
                    _SINGLE[batch[0].first.kind](self, batch[0].requests, present[0])
        except Exception as error:
            for entry in present:
                entry.error = error
        for entry in present:
            entry.done.set()

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, which have one shape."""
        if self.world_size == 1:
            return [tensor]
        outputs = [torch.empty_like(tensor) for _ in range(self.world_size)]
        dist.all_gather(outputs, tensor, group=self._group)
        return outputs

    def all_gather_into(self, whole: Tensor, part: Tensor) -> None:
        """Write the ``part`` of each rank into ``whole``, in rank order."""
        torch.cat(self.all_gather(part), out=whole)

    def all_to_all(self, rows: Tensor) -> Tensor:
        """Send row i to rank i; return the rows received, in rank order."""
        received = torch.empty_like(rows)
        dist.all_to_all_single(received.view(torch.uint8), rows.view(torch.uint8), group=self._group)
        return received

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum ``tensor`` over the ranks, in place."""
        dist.all_reduce(tensor, group=self._group)

    def _all_reduce_batch(self, batch: Sequence[Match], entries: Sequence[Entry | None]) -> None:
        inputs = [
            _zeros(match.first) if entry is None else entry.tensor for match, entry in zip(batch, entries, strict=True)
        ]
        sizes = [tensor.numel() for tensor in inputs]
        flat = self._movable(torch.cat([tensor.flatten() for tensor in inputs]))
        self._reduce(flat, batch[0].first, sizes)
        for entry, tensor, part in zip(entries, inputs, flat.split(sizes), strict=True):
            if entry is not None:
                entry.fill(part.reshape(tensor.shape))

    def _reduce(self, flat: Tensor, request: Request, sizes: Sequence[int]) -> None:
        """Reduce ``flat`` in place; Adasum works on each of its parts separately."""
        _scale(flat, request.prescale)
        if self.world_size > 1 and request.op == "adasum":
            Adasum(self, None).combine([Bucket(list(range(len(sizes))))], flat.split(list(sizes)))
        elif self.world_size > 1:
            dist.all_reduce(flat, _OPS[request.op], group=self._group)
        _scale(flat, request.postscale, self.world_size if request.op == "average" else 1)

    def _all_gather_rows(self, requests: Sequence[Any], entry: Entry) -> None:
        sizes = [one.shape[0] for one in requests]
        tensor = self._movable(entry.tensor)
        padded = tensor.new_zeros(max(sizes), *tensor.shape[1:])
        padded[: len(tensor)] = tensor
        parts = self.all_gather(padded) if padded.numel() else [padded] * self.world_size
        entry.fill(torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)]))

    def _broadcast(self, requests: Sequence[Any], entry: Entry) -> None:
        tensor = self._movable(entry.tensor).clone(memory_format=torch.contiguous_format)
        if self.world_size > 1:
            dist.broadcast(tensor, requests[0].root, group=self._group)
        entry.fill(tensor)

    def _all_to_all_rows(self, requests: Sequence[Any], entry: Entry) -> None:
        tensor = self._movable(entry.tensor).contiguous()
        splits = [list(one.splits) or [one.shape[0] // self.world_size] * self.world_size for one in requests]
        entry.received = [each[self.rank] for each in splits]
        output = tensor.new_empty(sum(entry.received), *tensor.shape[1:])
        if self.world_size > 1:
            dist.all_to_all_single(output, tensor, entry.received, splits[self.rank], group=self._group)
        else:
            output.copy_(tensor)
        entry.fill(output)

    def _reduce_scatter_rows(self, requests: Sequence[Any], entry: Entry) -> None:
        tensor = self._movable(entry.tensor).clone(memory_format=torch.contiguous_format)
        self._reduce(tensor, requests[0], [tensor.numel()])
        rows, extra = divmod(len(tensor), self.world_size)  # the first ranks get one row more
        start = self.rank * rows + min(self.rank, extra)
        entry.fill(tensor[start : start + rows + (self.rank < extra)].clone())

    def _movable(self, tensor: Tensor) -> Tensor:
        """Return ``tensor`` on a device that the group can exchange from."""
        tensor = tensor.detach()
        if tensor.is_cpu or self.world_size == 1 or is_served(self._group, tensor.device):
            return tensor
        return tensor.cpu()

    @contextmanager
    def _own_stream(self, device: str, entries: Sequence[Entry]) -> Iterator[None]:
        """Use a stream of this thread in the context, which waits for the inputs; on the CPU do nothing."""
        if device == "cpu":
            yield
            return
        index = entries[0].tensor.device.index if entries else self.gpu_of_zeros
        place = torch.device(device, index) if index >= 0 else torch.device(device)
        if index not in self._streams:
            self._streams[index] = make_stream(place)
        stream = self._streams[index]
        if stream is None:  # a kind of device without streams, whose work is in order
            yield
            return
        with in_stream(place, stream):
            for entry in entries:
                stream.wait_event(entry.input_ready)
                entry.tensor.record_stream(stream)
            yield
            for entry in entries:
                entry.result_ready = stream.record_event()


_SINGLE: dict[str, Callable[[Ranks, Sequence[Any], Entry], None]] = {
    "allgather": Ranks._all_gather_rows,
    "broadcast": Ranks._broadcast,
    "alltoall": Ranks._all_to_all_rows,
    "reducescatter": Ranks._reduce_scatter_rows,
}


def _zeros(request: Request) -> Tensor:
    """Return the contribution of a rank that has joined."""
    return torch.zeros(request.shape, dtype=getattr(torch, request.dtype), device=request.device)


def _scale(tensor: Tensor, factor: float, divisor: int = 1) -> None:
    if factor == 1.0 and divisor == 1:
        return
    if tensor.is_floating_point() or tensor.is_complex():
        if factor != 1.0:
            tensor.mul_(factor)
        if divisor != 1:
            tensor.div_(divisor)
    else:
        tensor.copy_((tensor.double() * factor / divisor).to(tensor.dtype))  # rounds towards zero, as C does
