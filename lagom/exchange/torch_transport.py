"""``TorchTransport``: exchanges over a process group of torch: gloo, NCCL, or another accelerator's backend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch

from lagom.errors import CollectiveError
from lagom.exchange.background import DONE
from lagom.exchange.native import native, reason_without_native
from lagom.exchange.transport import Transport

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch.distributed as dist

    from lagom.exchange.background import Work


def refuse_gloo() -> NoReturn:
    """Raise a CollectiveError: gloo, which cannot encrypt, is needed in a run that encrypts between hosts."""
    if native() is None:
        needs = f"lagom was installed without its compiled part ({reason_without_native()}), so tensors go over gloo"
        remedy = "install that part (`lagom doctor` says more)"
    else:
        needs = (
            "the program asks for gloo by name, or for an exchange that needs it: all-to-all, gather, scatter, "
            "messages between two ranks, reductions other than sums and averages, or tensors that are not plain numbers"
        )
        remedy = "name no backend in init_process_group() and new_group(), and avoid these exchanges"
    raise CollectiveError(
        f"Spark encrypts what it sends, the ranks are on several hosts, and gloo sends in clear: {needs}. Have all "
        f"ranks on one host; or {remedy}; or, where that network may carry it (it is private, or encrypted itself), "
        "set allow_unencrypted_collectives=True"
    )


class TorchTransport(Transport):
    """Carries tensors of any type on any device that ``group`` serves."""

    is_asynchronous = True

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group: Any = group  # torch's type stubs lack some of the methods

    @property
    def group_class(self) -> str:
        """Name of the process group's class."""
        return type(self._group).__name__

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
        if not part.numel():  # gloo would split the empty ``whole`` into a single part
            return DONE
        work: Work = self._group._allgather_base(whole.view(-1), part.view(-1))
        return work

    def reduce_scatter(self, out: torch.Tensor, given: torch.Tensor, reduction: str = "sum") -> Work:
        work: Work = self._group._reduce_scatter_base(out.view(-1), given.view(-1))
        return work

    def all_to_all_rows(self, out: torch.Tensor, given: torch.Tensor) -> Work:
        """Begin to exchange rows, viewed as bytes, since gloo's all-to-all takes few types."""
        rows = len(given)
        found, sent = (one.view(torch.uint8).view(rows, -1) for one in (out, given))
        work: Work = self._group.alltoall_base(found, sent, [], [])
        return work
