"""``TorchTransport``: exchanges over a process group of torch, gloo or NCCL."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lagom.collectives.background import DONE
from lagom.collectives.transport import Transport

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch.distributed as dist

    from lagom.collectives.background import Work


class TorchTransport(Transport):
    """Carries tensors of any type on any device that ``group`` serves."""

    is_asynchronous = True

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group: Any = group  # torch's own types lack some of its methods

    def carries(self, operation: str, tensors: Sequence[torch.Tensor], reduction: str | None = "") -> bool:
        """Return whether the reduction, if any, is a sum."""
        return reduction in ("", "sum")

    def all_reduce(self, tensor: torch.Tensor, reduction: str = "sum") -> Work:
        work: Work = self._group.allreduce([tensor])
        return work

    def broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        work: Work = self._group.broadcast(tensor, root)
        return work

    def all_gather(self, whole: torch.Tensor, part: torch.Tensor) -> Work:
        if not part.numel():  # gloo cuts the empty whole into a single part
            return DONE
        work: Work = self._group._allgather_base(whole.view(-1), part.view(-1))
        return work

    def reduce_scatter(self, out: torch.Tensor, given: torch.Tensor, reduction: str = "sum") -> Work:
        work: Work = self._group._reduce_scatter_base(out.view(-1), given.view(-1))
        return work

    def all_to_all_rows(self, out: torch.Tensor, given: torch.Tensor) -> Work:
        """Begin to exchange rows, on the CPU as bytes: gloo has this for few types."""
        rows = len(given)
        found, sent = (one.view(torch.uint8).view(rows, -1) for one in (out, given))
        work: Work = self._group.alltoall_base(found, sent, [], [])
        return work
