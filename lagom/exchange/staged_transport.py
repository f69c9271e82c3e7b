"""``StagedTransport``: exchanges tensors on accelerators by way of copies on the CPU, for ranks that share one."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from lagom.exchange.background import DONE
from lagom.exchange.transport import Transport

if TYPE_CHECKING:
    from collections.abc import Callable

    from lagom.exchange.background import Work


class StagedTransport(Transport):
    """Carries tensors on any device. See Note [Ranks that share an accelerator].

    Args:
        choose: returns the transport for an operation on a CPU tensor, with a reduction or "".
    """

    def __init__(self, choose: Callable[[str, torch.Tensor, str], Transport]) -> None:
        self._choose = choose

    def all_reduce(self, tensor: torch.Tensor, reduction: str = "sum") -> Work:
        copy = tensor.cpu()
        self._choose("all_reduce", copy, reduction).all_reduce(copy, reduction).wait()
        tensor.copy_(copy)
        return DONE

    def broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        copy = tensor.cpu()
        self._choose("broadcast", copy, "").broadcast(copy, root).wait()
        tensor.copy_(copy)
        return DONE

    def all_gather(self, whole: torch.Tensor, part: torch.Tensor) -> Work:
        sent = part.cpu()
        return self._fill(whole, self._choose("all_gather", sent, "").all_gather, sent)

    def reduce_scatter(self, out: torch.Tensor, given: torch.Tensor, reduction: str = "sum") -> Work:
        sent = given.cpu()
        exchange = self._choose("reduce_scatter", sent, reduction).reduce_scatter
        return self._fill(out, partial(exchange, reduction=reduction), sent)

    def all_to_all_rows(self, out: torch.Tensor, given: torch.Tensor) -> Work:
        sent = given.cpu()
        return self._fill(out, self._choose("all_to_all_rows", sent, "").all_to_all_rows, sent)

    def _fill(
        self, out: torch.Tensor, exchange: Callable[[torch.Tensor, torch.Tensor], Work], sent: torch.Tensor
    ) -> Work:
        """Exchange ``sent``, and copy the result into ``out``."""
        found = torch.empty_like(out, device="cpu")
        exchange(found, sent).wait()
        out.copy_(found)
        return DONE


# Note [Ranks that share an accelerator]
#
# NCCL refuses two ranks on one GPU, and a process sees only one instance of a GPU that is divided by MIG. gloo accepts
# tensors on NVIDIA's GPUs, but not in every operation, and accepts connections without proof. A kind of accelerator may
# also have no backend in torch.distributed. So tensors of ranks that share an accelerator, or whose kind has no
# backend, are copied to the CPU and exchanged like CPU tensors: through shared memory on one host, and over lagom's own
# connections between hosts. ``Tensor.cpu`` and ``copy_`` return when the copy is complete, on any kind.
