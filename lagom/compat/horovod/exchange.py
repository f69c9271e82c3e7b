"""The exchanges themselves: one batch of matches at a time, by all ranks of a set in the same order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lagom.compat.horovod.adasum import adasum
from lagom.compat.horovod.entry import Entry
from lagom.compat.horovod.matching import Match, Request
from lagom.monitor.spans import activity

_OPS = {
    "average": dist.ReduceOp.SUM,
    "sum": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}


class Ranks:
    """The ranks of a process set, with the group that they exchange over.

    Args:
        members: their global ranks, in order.
        rank: this process's place among them.
        group: torch's; None for a single rank.
    """

    def __init__(self, members: Sequence[int], rank: int, group: Any) -> None:
        self.members = tuple(members)
        self.rank = rank
        self.size = len(self.members)
        self.group = group
        self._streams: dict[int, Any] = {}

    def perform(self, batch: Sequence[Match], entries: Mapping[str, Entry]) -> None:
        """Do the exchange of ``batch``; this rank's ``entries``, by name, get their results, or what was raised."""
        mine = [entries.get(match.first.name) for match in batch]
        given = [entry for entry in mine if entry is not None]
        for entry in given:
            entry.negotiated()
        try:
            if batch[0].complaint:
                raise RuntimeError(batch[0].complaint)
            with torch.no_grad(), ExitStack() as stack:
                for match in batch:
                    stack.enter_context(activity(match.first.name, match.first.kind.upper(), match.first.num_bytes))
                stack.enter_context(self._stream(batch[0].first.device, given))
                _KINDS[batch[0].first.kind](self, batch, mine)
        except Exception as error:
            for entry in given:
                entry.error = error
        for entry in given:
            entry.done.set()

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Tensors of one shape, of all ranks."""
        if self.size == 1:
            return [tensor]
        outputs = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(outputs, tensor, group=self.group)
        return outputs

    def _all_reduce(self, batch: Sequence[Match], entries: Sequence[Entry | None]) -> None:
        request = batch[0].first
        given = [
            entry.tensor if entry is not None else _zeros(match.first)
            for match, entry in zip(batch, entries, strict=True)
        ]
        flat = self._here(torch.cat([tensor.flatten() for tensor in given]))
        _scale(flat, request.prescale)
        if request.op == "adasum":
            parts = list(flat.split([tensor.numel() for tensor in given]))
            flat = torch.cat([part.flatten() for part in adasum(parts, self.rank, self.size, self._swapped)])
        elif self.size > 1:
            dist.all_reduce(flat, _OPS[request.op], group=self.group)
        _scale(flat, request.postscale, self.size if request.op == "average" else 1)
        for entry, tensor, part in zip(entries, given, flat.split([one.numel() for one in given]), strict=True):
            if entry is not None:
                entry.fill(part.reshape(tensor.shape))

    def _all_gather(self, batch: Sequence[Match], entries: Sequence[Entry | None]) -> None:
        (match,), (entry,) = batch, entries
        assert entry is not None
        sizes = [one.shape[0] for one in match.requests if one is not None]
        tensor = self._here(entry.tensor)
        padded = tensor.new_zeros(max(sizes), *tensor.shape[1:])
        padded[: len(tensor)] = tensor
        parts = self.all_gather(padded) if padded.numel() else [padded] * self.size
        entry.fill(torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)]))

    def _broadcast(self, batch: Sequence[Match], entries: Sequence[Entry | None]) -> None:
        (match,), (entry,) = batch, entries
        assert entry is not None
        tensor = self._here(entry.tensor).clone(memory_format=torch.contiguous_format)
        if self.size > 1:
            dist.broadcast(tensor, match.first.root, group=self.group)
        entry.fill(tensor)

    def _all_to_all(self, batch: Sequence[Match], entries: Sequence[Entry | None]) -> None:
        (match,), (entry,) = batch, entries
        assert entry is not None
        tensor = self._here(entry.tensor).contiguous()
        requests = [one for one in match.requests if one is not None]
        splits = [list(one.splits) or [one.shape[0] // self.size] * self.size for one in requests]
        received = [each[self.rank] for each in splits]
        output = tensor.new_empty(sum(received), *tensor.shape[1:])
        if self.size > 1:
            dist.all_to_all_single(output, tensor, received, splits[self.rank], group=self.group)
        else:
            output.copy_(tensor)
        entry.received = received
        entry.fill(output)

    def _reduce_scatter(self, batch: Sequence[Match], entries: Sequence[Entry | None]) -> None:
        (match,), (entry,) = batch, entries
        assert entry is not None
        request = match.first
        tensor = self._here(entry.tensor).clone(memory_format=torch.contiguous_format)
        _scale(tensor, request.prescale)
        if self.size > 1:
            dist.all_reduce(tensor, _OPS[request.op], group=self.group)
        rows, more = divmod(len(tensor), self.size)  # the first ranks get what does not divide
        start = self.rank * rows + min(self.rank, more)
        part = tensor[start : start + rows + (self.rank < more)].clone()
        _scale(part, request.postscale, self.size if request.op == "average" else 1)
        entry.fill(part)

    def _barrier(self, batch: Sequence[Match], entries: Sequence[Entry | None]) -> None:
        """That all have asked for it is all that there is to it."""

    def _swapped(self, tensor: Tensor, other: int) -> Tensor:
        theirs = torch.empty_like(tensor)
        peer = self.members[other]
        operations = [
            dist.P2POp(dist.isend, tensor.contiguous(), peer, self.group),
            dist.P2POp(dist.irecv, theirs, peer, self.group),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return theirs

    def _here(self, tensor: Tensor) -> Tensor:
        """Where the group can exchange it."""
        tensor = tensor.detach()
        if tensor.is_cuda and self.size > 1 and "cuda:nccl" not in dist.get_backend_config(self.group):
            return tensor.cpu()
        return tensor

    def _stream(self, device: str, entries: Sequence[Entry]) -> AbstractContextManager[Any]:
        """On GPUs, a stream of this thread's own, which waits for what the program has computed."""
        if device != "cuda":
            return nullcontext()
        index = entries[0].tensor.device.index if entries else torch.cuda.current_device()
        if index not in self._streams:
            self._streams[index] = torch.cuda.Stream(index)
        return _OnStream(self._streams[index], entries)


class _OnStream:
    def __init__(self, stream: Any, entries: Sequence[Entry]) -> None:
        self._stream = stream
        self._entries = entries
        self._context = torch.cuda.stream(stream)

    def __enter__(self) -> None:
        self._context.__enter__()
        for entry in self._entries:
            if entry.given is not None:
                self._stream.wait_event(entry.given)
            entry.tensor.record_stream(self._stream)

    def __exit__(self, *error: object) -> None:
        for entry in self._entries:
            entry.taken = self._stream.record_event()
        self._context.__exit__(*error)


def _zeros(request: Request) -> Tensor:
    """What a rank that has joined has of it."""
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
        tensor.copy_((tensor.double() * factor / divisor).to(tensor.dtype))  # towards zero, as C does


_Kind = Callable[[Ranks, Sequence[Match], Sequence[Entry | None]], None]
_KINDS: dict[str, _Kind] = {
    "allreduce": Ranks._all_reduce,
    "allgather": Ranks._all_gather,
    "broadcast": Ranks._broadcast,
    "alltoall": Ranks._all_to_all,
    "reducescatter": Ranks._reduce_scatter,
    "barrier": Ranks._barrier,
}
