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
    """Every method is a collective of the ranks that ``near`` joins.

    Raises:
        ValueError: when tensors do not fit together on this rank.
        RuntimeError: when ranks differ, or one is gone.
    """

    def __init__(self, near: Communicator, rank: int, size: int) -> None:
        self.near = near
        self._rank = rank
        self._size = size

    def carries(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these can be moved: dense tensors on the CPU."""
        return all(t.device.type == "cpu" and t.layout == torch.strided and not t.is_quantized for t in tensors)

    def reduces(self, tensors: Sequence[Tensor], name: str) -> bool:
        """Whether these can be reduced by ``name`` as well."""
        return self.carries(tensors) and all(
            t.dtype in TYPES and native().has(TYPES[t.dtype], OPERATIONS[name]) for t in tensors
        )

    def all_reduce(self, tensor: Tensor, name: str) -> None:
        """In place."""
        flat = flat_of(tensor)
        self.near.all_reduce(flat.data_ptr(), flat.numel(), TYPES[flat.dtype], OPERATIONS[name])
        put(tensor, flat)

    def reduce(self, tensor: Tensor, name: str, root: int) -> None:
        """As ``all_reduce``, but only on ``root``."""
        if self._rank == root:
            self.all_reduce(tensor, name)
        else:
            self.all_reduce(tensor.clone(memory_format=torch.contiguous_format), name)

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """In place."""
        flat = flat_of(tensor)
        self.near.broadcast(flat.data_ptr(), flat.nbytes, root, _code(flat))
        put(tensor, flat)

    def all_gather(self, output: Tensor, tensor: Tensor) -> None:
        """``output`` gets the tensors of all ranks, one behind the other."""
        fit("all_gather", output.numel(), self._size * tensor.numel(), output, tensor)
        given, flat = flat_of(tensor), flat_of(output)
        self.near.all_gather(given.data_ptr(), flat.data_ptr(), given.nbytes, _code(given))
        put(output, flat)

    def all_gather_list(self, outputs: Sequence[Tensor], tensor: Tensor) -> None:
        """Each of ``outputs`` gets the tensor of a rank."""
        self._check_list("all_gather", outputs, tensor)
        together = tensor.new_empty((self._size, tensor.numel()))
        self.all_gather(together, tensor)
        _deal(outputs, together)

    def reduce_scatter(self, output: Tensor, tensor: Tensor, name: str) -> None:
        """``output`` gets this rank's part of what the tensors of all ranks are reduced to."""
        fit("reduce_scatter", tensor.numel(), self._size * output.numel(), output, tensor)
        given, flat = flat_of(tensor), flat_of(output)
        code, operation = TYPES[flat.dtype], OPERATIONS[name]
        self.near.reduce_scatter(given.data_ptr(), flat.data_ptr(), flat.numel(), code, operation)
        put(output, flat)

    def reduce_scatter_list(self, output: Tensor, tensors: Sequence[Tensor], name: str) -> None:
        """``output`` gets what the tensors in its rank's place of each list, of any sizes, are reduced to."""
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
        """Each of rank ``root``'s ``outputs`` gets the tensor of a rank."""
        given = flat_of(tensor)
        if self._rank != root:
            self.near.gather(given.data_ptr(), 0, given.nbytes, root, _code(given))
            return
        self._check_list("gather", outputs, tensor)
        together = tensor.new_empty((self._size, tensor.numel()))
        self.near.gather(given.data_ptr(), together.data_ptr(), given.nbytes, root, _code(given))
        _deal(outputs, together)

    def scatter(self, output: Tensor, tensors: Sequence[Tensor], root: int) -> None:
        """``output`` gets this rank's of ``root``'s ``tensors``."""
        flat = flat_of(output)
        if self._rank == root:
            self._check_list("scatter", tensors, output)
            together = torch.cat([tensor.reshape(-1) for tensor in tensors])
            self.near.scatter(together.data_ptr(), flat.data_ptr(), flat.nbytes, root, _code(flat))
        else:
            self.near.scatter(0, flat.data_ptr(), flat.nbytes, root, _code(flat))
        put(output, flat)

    def all_to_all(self, outputs: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
        """A tensor to each rank, one from each."""
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
        """Rows to each rank, rows from each; even parts where sizes are empty."""
        fit("all_to_all_single", 0, 0, output, tensor)
        given, flat = flat_of(tensor), flat_of(output)
        to, back = self._split(given, to_all), self._split(flat, to_here)
        self.near.all_to_all(given.data_ptr(), to, flat.data_ptr(), back, _code(flat))
        put(output, flat)

    def barrier(self) -> None:
        """Wait for all."""
        self.near.barrier()

    def agree(self, what: str) -> None:
        """Make sure that all ranks call the same, where ``near`` does not compare it."""
        called = [bytes(row).decode() for row in self.near.exchange(what.encode(), None)]
        for rank, other in enumerate(called):
            if other != called[0]:
                why = f"the ranks call different things: rank 0 {called[0]}, rank {rank} {other}"
                self.near.abort(why)
                raise RuntimeError(why)

    def send(self, tensor: Tensor, to: int, tag: int) -> None:
        """Not a collective: ``to`` receives it."""
        given = flat_of(tensor)
        self.near.send(given.data_ptr(), given.nbytes, _code(given), to, tag)

    def receive(self, tensor: Tensor, sender: int, tag: int) -> None:
        """Not a collective: ``sender`` sends it."""
        flat = flat_of(tensor)
        self.near.receive(flat.data_ptr(), flat.nbytes, _code(flat), sender, tag)
        put(tensor, flat)

    def sender(self) -> int:
        """The next rank that has sent something."""
        return self.near.sender()

    def _split(self, tensor: Tensor, sizes: Sequence[int]) -> list[int]:
        """Bytes of each rank's part."""
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
    """Make sure that two tensors of a collective have the sizes they should, and one type."""
    if found != wanted or one.dtype != other.dtype:
        raise ValueError(
            f"{what} of tensors that do not fit: {tuple(one.shape)} of {one.dtype} and {tuple(other.shape)} of "
            f"{other.dtype}"
        )


def flat_of(tensor: Tensor) -> Tensor:
    """``tensor`` where its numbers lie in order and as they are, or a copy of which that is true."""
    found = tensor.contiguous()
    return found.resolve_neg().resolve_conj() if found.is_neg() or found.is_conj() else found


def ordered(given: Any) -> Any:
    """A tensor, or a list of them, by ``flat_of``; as it is where it is not dense."""
    if isinstance(given, list):
        return [ordered(one) for one in given]
    return flat_of(given) if given.layout == torch.strided and not given.is_quantized else given


def put_back(given: Any, in_order: Any) -> None:
    """Have what was given to ``ordered`` be what came of it."""
    if isinstance(given, list):
        for one, other in zip(given, in_order, strict=True):
            put_back(one, other)
    elif in_order is not given:
        put(given, in_order)


def put(tensor: Tensor, flat: Tensor) -> None:
    """Have ``tensor`` be ``flat``, which ``flat_of`` made of it."""
    if flat.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(flat)  # also into a parameter, as over gloo


def _code(tensor: Tensor) -> int:
    """What ranks compare of the type of what is moved."""
    return TYPES.get(tensor.dtype, _U8)


def _deal(outputs: Sequence[Tensor], together: Tensor) -> None:
    for one, row in zip(outputs, together, strict=True):
        one.detach().copy_(row.view(one.shape))


def bytes_of(tensor: Tensor) -> Tensor:
    """Those of a contiguous tensor. One of a single number may have any stride."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
