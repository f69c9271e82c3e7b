"""``TensorCollectives``: collectives on tensors of any memory layout, over a transport of contiguous tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lagom.exchange.native import OPERATIONS, TYPES
from lagom.exchange.shared_memory import type_code
from lagom.exchange.transport import bytes_of

if TYPE_CHECKING:
    from lagom.exchange.native import Communicator
    from lagom.exchange.transport import Transport


class TensorCollectives:
    """Collectives over ``transport``, one method each, for tensors that the transport carries.

    Raises:
        ValueError: when sizes or types of this rank's tensors do not fit together.
        RuntimeError, OSError: when ranks make different calls, or a rank is gone.
    """

    def __init__(self, transport: Transport, rank: int, size: int) -> None:
        self._transport = transport
        self._rank = rank
        self._size = size

    @property
    def _memory(self) -> Communicator:
        """Communicator of all ranks; a transport without one does not carry the collectives that use this."""
        assert self._transport.memory is not None
        return self._transport.memory

    def all_reduce(self, tensor: Tensor, reduction: str) -> None:
        """Reduce in place."""
        flat = plain_contiguous(tensor)
        self._transport.all_reduce(flat, reduction).wait()
        put(tensor, flat)

    def reduce(self, tensor: Tensor, reduction: str, root: int) -> None:
        """Reduce as ``all_reduce`` does; only ``root`` receives the result, in place."""
        if self._rank == root:
            self.all_reduce(tensor, reduction)
        else:
            self.all_reduce(tensor.clone(memory_format=torch.contiguous_format), reduction)

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Overwrite ``tensor`` with the tensor of rank ``root``."""
        flat = plain_contiguous(tensor)
        self._transport.broadcast(flat, root).wait()
        put(tensor, flat)

    def all_gather(self, output: Tensor, tensor: Tensor) -> None:
        """Fill ``output`` with the tensors of all ranks, concatenated in rank order."""
        fit("all_gather", output.numel(), self._size * tensor.numel(), output, tensor)
        flat = plain_contiguous(output)
        self._transport.all_gather(flat, plain_contiguous(tensor)).wait()
        put(output, flat)

    def all_gather_list(self, outputs: Sequence[Tensor], tensor: Tensor) -> None:
        """Fill ``outputs[i]`` with the tensor of rank i."""
        self._check_list("all_gather", outputs, tensor)
        together = tensor.new_empty((self._size, tensor.numel()))
        self.all_gather(together, tensor)
        _deal(outputs, together)

    def reduce_scatter(self, output: Tensor, tensor: Tensor, reduction: str) -> None:
        """Fill ``output`` with this rank's part of the reduction of all ranks' tensors."""
        fit("reduce_scatter", tensor.numel(), self._size * output.numel(), output, tensor)
        flat = plain_contiguous(output)
        self._transport.reduce_scatter(flat, plain_contiguous(tensor), reduction).wait()
        put(output, flat)

    def reduce_scatter_list(self, output: Tensor, tensors: Sequence[Tensor], reduction: str) -> None:
        """Fill ``output`` with the reduction of ``tensors[i]`` of all ranks, i being this rank; sizes may differ."""
        self._check_length("reduce_scatter", tensors)
        fit("reduce_scatter", tensors[self._rank].numel(), output.numel(), tensors[self._rank], output)
        given = torch.cat([tensor.reshape(-1) for tensor in tensors])
        counts = [tensor.numel() for tensor in tensors]
        if len(set(counts)) == 1:
            self.reduce_scatter(output, given, reduction)
            return
        self.agree(f"reduce_scatter ({reduction}) of {counts} {given.dtype}")
        if self._transport.memory is None:
            self._transport.all_reduce(given, reduction).wait()
            output.detach().copy_(given.split(counts)[self._rank].view(output.shape))
            return
        flat = plain_contiguous(output)
        self._memory.reduce_parts(given.data_ptr(), counts, flat.data_ptr(), TYPES[flat.dtype], OPERATIONS[reduction])
        put(output, flat)

    def gather(self, outputs: Sequence[Tensor], tensor: Tensor, root: int) -> None:
        """Fill ``outputs[i]`` on rank ``root`` with the tensor of rank i."""
        given = plain_contiguous(tensor)
        if self._rank != root:
            self._memory.gather(given.data_ptr(), 0, given.nbytes, root, type_code(given))
            return
        self._check_list("gather", outputs, tensor)
        together = tensor.new_empty((self._size, tensor.numel()))
        self._memory.gather(given.data_ptr(), together.data_ptr(), given.nbytes, root, type_code(given))
        _deal(outputs, together)

    def scatter(self, output: Tensor, tensors: Sequence[Tensor], root: int) -> None:
        """Fill ``output`` on rank i with ``tensors[i]`` of rank ``root``."""
        flat = plain_contiguous(output)
        if self._rank == root:
            self._check_list("scatter", tensors, output)
            together = torch.cat([tensor.reshape(-1) for tensor in tensors])
            self._memory.scatter(together.data_ptr(), flat.data_ptr(), flat.nbytes, root, type_code(flat))
        else:
            self._memory.scatter(0, flat.data_ptr(), flat.nbytes, root, type_code(flat))
        put(output, flat)

    def all_to_all(self, outputs: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
        """Send one tensor to each rank, and receive one from each."""
        for what, found in (("outputs", outputs), ("inputs", tensors)):
            if len(found) != self._size:
                raise ValueError(f"all_to_all has {len(found)} {what}, but there are {self._size} ranks")
        given = torch.cat([bytes_of(plain_contiguous(tensor)) for tensor in tensors])
        out = torch.empty(sum(one.nbytes for one in outputs), dtype=torch.uint8, device="cpu")
        back = [one.nbytes for one in outputs]
        to = [one.nbytes for one in tensors]
        self._memory.all_to_all(given.data_ptr(), to, out.data_ptr(), back, type_code(tensors[0]))
        for one, part in zip(outputs, out.split(back), strict=True):
            one.detach().copy_(part.clone().view(one.dtype).view(one.shape))

    def all_to_all_single(self, output: Tensor, tensor: Tensor, to_here: Sequence[int], to_all: Sequence[int]) -> None:
        """Send ``to_all[i]`` rows to rank i, and receive ``to_here[i]`` from it; equal parts if the sizes are empty."""
        fit("all_to_all_single", 0, 0, output, tensor)
        given, flat = plain_contiguous(tensor), plain_contiguous(output)
        to, back = self._split(given, to_all), self._split(flat, to_here)
        self._memory.all_to_all(given.data_ptr(), to, flat.data_ptr(), back, type_code(flat))
        put(output, flat)

    def barrier(self) -> None:
        """Return when all ranks have called this."""
        if self._transport.memory is None:
            number = torch.zeros(1, dtype=torch.uint8, device="cpu")
            self._transport.all_reduce(number).wait()  # the sum needs the number of every rank
        else:
            self._memory.barrier()

    def agree(self, what: str) -> None:
        """Check that all ranks make the call ``what``, for calls that shared memory does not compare itself.

        Without memory of all ranks, do nothing.

        Raises:
            RuntimeError: on all ranks, when they make different calls.
        """
        memory = self._transport.memory
        if memory is None:
            return
        called = [bytes(row).decode() for row in memory.exchange(what.encode(), None)]
        for rank, other in enumerate(called):
            if other != called[0]:
                why = f"the ranks call different things: rank 0 {called[0]}, rank {rank} {other}"
                memory.abort(why)
                raise RuntimeError(why)

    def send(self, tensor: Tensor, to: int, tag: int) -> None:
        """Send to rank ``to``, which must receive; not a collective."""
        given = plain_contiguous(tensor)
        self._memory.send(given.data_ptr(), given.nbytes, type_code(given), to, tag)

    def receive(self, tensor: Tensor, sender: int, tag: int) -> None:
        """Receive from rank ``sender``, which must send; not a collective."""
        flat = plain_contiguous(tensor)
        self._memory.receive(flat.data_ptr(), flat.nbytes, type_code(flat), sender, tag)
        put(tensor, flat)

    def sender(self) -> int:
        """Wait until some rank has sent a message to this rank, and return its number."""
        return self._memory.sender()

    def _split(self, tensor: Tensor, sizes: Sequence[int]) -> list[int]:
        """Return the number of bytes of each rank's part."""
        rows = tensor.shape[0] if tensor.dim() else 1
        if not sizes:
            if rows % self._size:
                raise ValueError(f"all_to_all_single has {rows} rows, which {self._size} ranks do not share evenly")
            return [tensor.nbytes // self._size] * self._size
        if len(sizes) != self._size or sum(sizes) != rows or min(sizes) < 0:
            raise ValueError(f"all_to_all_single has sizes {list(sizes)} for {rows} rows and {self._size} ranks")
        width = tensor.nbytes // rows if rows else 0
        return [size * width for size in sizes]

    def _check_length(self, what: str, tensors: Sequence[Tensor]) -> None:
        if len(tensors) != self._size:
            raise ValueError(f"{what} has a list of {len(tensors)} tensors, but there are {self._size} ranks")

    def _check_list(self, what: str, tensors: Sequence[Tensor], like: Tensor) -> None:
        self._check_length(what, tensors)
        for one in tensors:
            fit(what, one.numel(), like.numel(), one, like)


def fit(what: str, found: int, wanted: int, one: Tensor, other: Tensor) -> None:
    """Raise ValueError if ``found`` is not the ``wanted`` number of elements, or two tensors differ in type."""
    if found != wanted or one.dtype != other.dtype:
        raise ValueError(
            f"{what} of tensors that do not fit: {tuple(one.shape)} of {one.dtype} and {tuple(other.shape)} of "
            f"{other.dtype}"
        )


def plain_contiguous(tensor: Tensor) -> Tensor:
    """Return ``tensor`` if it is contiguous and has no lazy negation or conjugation; else a copy without these."""
    found = tensor.contiguous()
    return found.resolve_neg().resolve_conj() if found.is_neg() or found.is_conj() else found


def put(tensor: Tensor, flat: Tensor) -> None:
    """Copy ``flat``, which ``plain_contiguous(tensor)`` returned, into ``tensor`` unless it has the same memory."""
    if flat is not tensor and flat.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(flat)  # ``detach`` allows a copy into a parameter, which gloo allows too


def _deal(outputs: Sequence[Tensor], together: Tensor) -> None:
    for one, row in zip(outputs, together, strict=True):
        one.detach().copy_(row.view(one.shape))
