"""``TensorCollectives``: collectives on tensors of any memory layout, over a communicator of raw addresses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lagom.collectives.native import OPERATIONS, TYPES, native

if TYPE_CHECKING:
    from lagom.collectives.native import Communicator

_U8 = TYPES[torch.uint8]


class TensorCollectives:
    """Collectives of the ranks that ``near`` joins, one a method.

    Raises:
        ValueError: when tensors do not fit together on this rank.
        RuntimeError: when ranks differ, or one is gone.
    """

    def __init__(self, near: Communicator, rank: int, size: int) -> None:
        self.near = near
        self._rank = rank
        self._size = size

    def carries(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether shared memory carries these tensors: dense ones on the CPU."""
        return all(t.device.type == "cpu" and t.layout == torch.strided and not t.is_quantized for t in tensors)

    def reduces(self, tensors: Sequence[Tensor], name: str) -> bool:
        """Return whether shared memory carries these tensors and reduces them by ``name``."""
        return self.carries(tensors) and all(
            t.dtype in TYPES and native().has(TYPES[t.dtype], OPERATIONS[name]) for t in tensors
        )

    def all_reduce(self, tensor: Tensor, name: str) -> None:
        """Reduce in place."""
        flat = flat_of(tensor)
        self.near.all_reduce(flat.data_ptr(), flat.numel(), TYPES[flat.dtype], OPERATIONS[name])
        put(tensor, flat)

    def reduce(self, tensor: Tensor, name: str, root: int) -> None:
        """Reduce as ``all_reduce`` does, in place only on ``root``."""
        if self._rank == root:
            self.all_reduce(tensor, name)
        else:
            self.all_reduce(tensor.clone(memory_format=torch.contiguous_format), name)

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Overwrite ``tensor`` with the one of rank ``root``."""
        flat = flat_of(tensor)
        self.near.broadcast(flat.data_ptr(), flat.nbytes, root, _code(flat))
        put(tensor, flat)

    def all_gather(self, output: Tensor, tensor: Tensor) -> None:
        """Fill ``output`` with the tensors of all ranks, one behind the other."""
        fit("all_gather", output.numel(), self._size * tensor.numel(), output, tensor)
        given, flat = flat_of(tensor), flat_of(output)
        self.near.all_gather(given.data_ptr(), flat.data_ptr(), given.nbytes, _code(given))
        put(output, flat)

    def all_gather_list(self, outputs: Sequence[Tensor], tensor: Tensor) -> None:
        """Fill each of ``outputs`` with the tensor of one rank."""
        self._check_list("all_gather", outputs, tensor)
        together = tensor.new_empty((self._size, tensor.numel()))
        self.all_gather(together, tensor)
        _deal(outputs, together)

    def reduce_scatter(self, output: Tensor, tensor: Tensor, name: str) -> None:
        """Fill ``output`` with this rank's part of the reduction of all ranks' tensors."""
        fit("reduce_scatter", tensor.numel(), self._size * output.numel(), output, tensor)
        given, flat = flat_of(tensor), flat_of(output)
        code, operation = TYPES[flat.dtype], OPERATIONS[name]
        self.near.reduce_scatter(given.data_ptr(), flat.data_ptr(), flat.numel(), code, operation)
        put(output, flat)

    def reduce_scatter_list(self, output: Tensor, tensors: Sequence[Tensor], name: str) -> None:
        """Fill ``output`` with the reduction of every rank's tensor for this rank; sizes may differ between ranks."""
        self._check_length("reduce_scatter", tensors)
        fit("reduce_scatter", tensors[self._rank].numel(), output.numel(), tensors[self._rank], output)
        given = torch.cat([tensor.reshape(-1) for tensor in tensors])
        counts = [tensor.numel() for tensor in tensors]
        if len(set(counts)) == 1:
            self.reduce_scatter(output, given, name)
            return
        self.agree(f"reduce_scatter ({name}) of {counts} {given.dtype}")
        flat = flat_of(output)
        self.near.reduce_parts(given.data_ptr(), counts, flat.data_ptr(), TYPES[flat.dtype], OPERATIONS[name])
        put(output, flat)

    def gather(self, outputs: Sequence[Tensor], tensor: Tensor, root: int) -> None:
        """Fill each of rank ``root``'s ``outputs`` with the tensor of one rank."""
        given = flat_of(tensor)
        if self._rank != root:
            self.near.gather(given.data_ptr(), 0, given.nbytes, root, _code(given))
            return
        self._check_list("gather", outputs, tensor)
        together = tensor.new_empty((self._size, tensor.numel()))
        self.near.gather(given.data_ptr(), together.data_ptr(), given.nbytes, root, _code(given))
        _deal(outputs, together)

    def scatter(self, output: Tensor, tensors: Sequence[Tensor], root: int) -> None:
        """Fill ``output`` with this rank's tensor of ``root``'s ``tensors``."""
        flat = flat_of(output)
        if self._rank == root:
            self._check_list("scatter", tensors, output)
            together = torch.cat([tensor.reshape(-1) for tensor in tensors])
            self.near.scatter(together.data_ptr(), flat.data_ptr(), flat.nbytes, root, _code(flat))
        else:
            self.near.scatter(0, flat.data_ptr(), flat.nbytes, root, _code(flat))
        put(output, flat)

    def all_to_all(self, outputs: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
        """Send one tensor to each rank, and receive one from each."""
        for what, found in (("outputs", outputs), ("inputs", tensors)):
            if len(found) != self._size:
                raise ValueError(f"all_to_all has {len(found)} {what}, but there are {self._size} ranks")
        given = torch.cat([bytes_of(flat_of(tensor)) for tensor in tensors])
        out = torch.empty(sum(one.nbytes for one in outputs), dtype=torch.uint8)
        back = [one.nbytes for one in outputs]
        to = [one.nbytes for one in tensors]
        self.near.all_to_all(given.data_ptr(), to, out.data_ptr(), back, _code(tensors[0]))
        for one, part in zip(outputs, out.split(back), strict=True):
            one.detach().copy_(part.clone().view(one.dtype).view(one.shape))

    def all_to_all_single(self, output: Tensor, tensor: Tensor, to_here: Sequence[int], to_all: Sequence[int]) -> None:
        """Send rows to each rank, and receive rows from each; equal parts if the sizes are empty."""
        fit("all_to_all_single", 0, 0, output, tensor)
        given, flat = flat_of(tensor), flat_of(output)
        to, back = self._split(given, to_all), self._split(flat, to_here)
        self.near.all_to_all(given.data_ptr(), to, flat.data_ptr(), back, _code(flat))
        put(output, flat)

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.near.barrier()

    def agree(self, what: str) -> None:
        """Check that all ranks make the same call, where ``near`` does not compare it."""
        called = [bytes(row).decode() for row in self.near.exchange(what.encode(), None)]
        for rank, other in enumerate(called):
            if other != called[0]:
                why = f"the ranks call different things: rank 0 {called[0]}, rank {rank} {other}"
                self.near.abort(why)
                raise RuntimeError(why)

    def send(self, tensor: Tensor, to: int, tag: int) -> None:
        """Send to rank ``to``, which must receive; no collective."""
        given = flat_of(tensor)
        self.near.send(given.data_ptr(), given.nbytes, _code(given), to, tag)

    def receive(self, tensor: Tensor, sender: int, tag: int) -> None:
        """Receive from rank ``sender``, which must send; no collective."""
        flat = flat_of(tensor)
        self.near.receive(flat.data_ptr(), flat.nbytes, _code(flat), sender, tag)
        put(tensor, flat)

    def sender(self) -> int:
        """Return the next rank that has sent something."""
        return self.near.sender()

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
    """Check that two tensors of a collective have the sizes they should have, and one type."""
    if found != wanted or one.dtype != other.dtype:
        raise ValueError(
            f"{what} of tensors that do not fit: {tuple(one.shape)} of {one.dtype} and {tuple(other.shape)} of "
            f"{other.dtype}"
        )


def flat_of(tensor: Tensor) -> Tensor:
    """Return ``tensor`` if it is contiguous and not lazily negated or conjugated; else a copy that is."""
    found = tensor.contiguous()
    return found.resolve_neg().resolve_conj() if found.is_neg() or found.is_conj() else found


def ordered(given: Any) -> Any:
    """Return ``flat_of`` a tensor, or of each in a list; tensors that are not dense stay as they are."""
    if isinstance(given, list):
        return [ordered(one) for one in given]
    return flat_of(given) if given.layout == torch.strided and not given.is_quantized else given


def put_back(given: Any, in_order: Any) -> None:
    """Copy the results in ``in_order``, which ``ordered`` returned, into the tensors that it was given."""
    if isinstance(given, list):
        for one, other in zip(given, in_order, strict=True):
            put_back(one, other)
    elif in_order is not given:
        put(given, in_order)


def put(tensor: Tensor, flat: Tensor) -> None:
    """Copy ``flat``, which ``flat_of`` returned, into ``tensor`` if it is a copy."""
    if flat.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(flat)  # also into a parameter, as over gloo


def _code(tensor: Tensor) -> int:
    """Return the code of the tensor's type, which the ranks compare; uint8 for types without one."""
    return TYPES.get(tensor.dtype, _U8)


def _deal(outputs: Sequence[Tensor], together: Tensor) -> None:
    for one, row in zip(outputs, together, strict=True):
        one.detach().copy_(row.view(one.shape))


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a contiguous tensor. A tensor of one number may have any stride."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
