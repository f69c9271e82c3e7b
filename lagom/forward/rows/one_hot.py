"""``read_no_classes``: patch ``one_hot``, which reads numbers of its input to check them."""

from __future__ import annotations

import functools
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

from lagom.patching.replace import replaced

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from lagom.session.session import Session


@contextmanager
def read_no_classes(session: Session) -> Iterator[None]:
    """Let ``one_hot`` in a forward that may be split do without reads of its input.

    torch reads the smallest and the largest class to compare them with the number of classes, which ``scatter_`` does
    as well. In a probe these reads would count as decisions by numbers that are others in each batch.
    """
    original = F.one_hot
    forwards = session.forwards

    def one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor:
        is_split = forwards.is_probing or forwards.sliced_forward is not None
        if is_split and num_classes > 0 and tensor.is_cpu and tensor.dtype is torch.int64 and tensor.numel():
            with suppress(RuntimeError):  # the original raises torch's own error
                return torch.zeros(*tensor.shape, num_classes, dtype=torch.int64, device=tensor.device).scatter_(
                    -1, tensor.unsqueeze(-1), 1
                )
        return original(tensor, num_classes)

    with replaced(F, "one_hot", functools.update_wrapper(one_hot, original)):
        yield
