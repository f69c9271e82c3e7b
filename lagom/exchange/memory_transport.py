"""``MemoryTransport``: exchanges through memory that all ranks share. See Note [Shared memory]."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from lagom.exchange.background import DONE
from lagom.exchange.native import OPERATIONS, TYPES, native
from lagom.exchange.transport import Transport, are_dense

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lagom.exchange.background import Done
    from lagom.exchange.native import Communicator

_U8 = TYPES[torch.uint8]


class MemoryTransport(Transport):
    """Passes the addresses of tensors to the communicator ``memory``; an exchange is done when its method returns."""

    memory: Communicator

    def __init__(self, memory: Communicator) -> None:
        self.memory = memory

    def carries(self, operation: str, tensors: Sequence[torch.Tensor], reduction: str | None = "") -> bool:
        """Return whether the tensors are dense, on the CPU, and, in a reduction, of types that C++ reduces."""
        return are_dense(tensors) and (reduction == "" or _reduced(reduction).issuperset([t.dtype for t in tensors]))

    def all_reduce(self, tensor: torch.Tensor, reduction: str = "sum") -> Done:
        self.memory.all_reduce(tensor.data_ptr(), tensor.numel(), TYPES[tensor.dtype], OPERATIONS[reduction])
        return DONE

    def broadcast(self, tensor: torch.Tensor, root: int) -> Done:
        self.memory.broadcast(tensor.data_ptr(), tensor.nbytes, root, type_code(tensor))
        return DONE

    def all_gather(self, whole: torch.Tensor, part: torch.Tensor) -> Done:
        self.memory.all_gather(part.data_ptr(), whole.data_ptr(), part.nbytes, type_code(part))
        return DONE

    def reduce_scatter(self, out: torch.Tensor, given: torch.Tensor, reduction: str = "sum") -> Done:
        code, operation = TYPES[out.dtype], OPERATIONS[reduction]
        self.memory.reduce_scatter(given.data_ptr(), out.data_ptr(), out.numel(), code, operation)
        return DONE

    def all_to_all_rows(self, out: torch.Tensor, given: torch.Tensor) -> Done:
        sizes = [given.nbytes // len(given)] * len(given)
        self.memory.all_to_all(given.data_ptr(), sizes, out.data_ptr(), sizes, type_code(given))
        return DONE

    def set_timeout(self, timeout_s: float) -> None:
        self.memory.set_timeout(timeout_s)

    def abort(self, rank: int) -> None:
        self.memory.abort(f"rank {rank} aborted its process group")

    def close(self) -> None:
        self.memory.close()


def type_code(tensor: torch.Tensor) -> int:
    """Return the code of the tensor's type, which the ranks compare; the code of uint8 for types without a code."""
    return TYPES.get(tensor.dtype, _U8)


@functools.cache
def _reduced(reduction: str | None) -> frozenset[torch.dtype]:
    """Return the types that C++ can reduce by ``reduction``; none if it is None."""
    if reduction is None:
        return frozenset()
    return frozenset(dtype for dtype, code in TYPES.items() if native().has(code, OPERATIONS[reduction]))


# Note [Shared memory]
#
# When all ranks are processes of one host, CPU tensors go through memory that they share; see csrc/communicator.hpp.
# The first exchange finds out, on all ranks together, whether this is possible: if one rank lacks the compiled part, no
# rank uses shared memory. When ranks are on several hosts, ``HostTransport`` and ``HostMessages`` use the shared memory
# of each host; see Note [Several hosts] in hosts.py. ``all_reduce_aside``, whose order is independent of other
# exchanges, has a memory and a thread of its own.
