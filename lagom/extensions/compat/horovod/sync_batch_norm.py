"""``SyncBatchNorm``: BatchNorm with the statistics of all ranks' batches, on the CPU too."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lagom.extensions.compat.horovod import topology
from lagom.extensions.compat.horovod.asynchronous import Sum
from lagom.extensions.compat.horovod.differentiable import allgather, allreduce_
from lagom.forward.batchnorm_arithmetic import (
    COUNTED,
    ELEMENTS,
    MEANS,
    BatchNormCall,
    NormaliseFunction,
    local_moments,
    merge_moments,
    moments_of,
)


class SyncBatchNorm(nn.modules.batchnorm._BatchNorm):
    """Like ``torch.nn.BatchNorm1d`` to ``3d``; training uses the samples of all ranks, which may differ in number.

    Gradients of weight and bias stay the rank's own, for the optimizer to reduce.
    """

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"SyncBatchNorm of an input with {input.dim()} dimensions; want samples, channels, ...")

    def forward(self, input: Tensor) -> Tensor:
        """Normalize ``input``, shaped (samples, channels, ...)."""
        self._check_input_dim(input)
        if not (self.training or self.running_mean is None) or topology.size() == 1:
            return super().forward(input)
        with torch.no_grad():
            count, mean, var, _ = moments_of(merge_moments(allgather(_local_statistics(input.detach()))))
            self._update_running(mean, var * (count / (count - 1).clamp(min=1)))
        dtype = torch.promote_types(input.dtype, torch.float32)
        call = BatchNormCall(_sum_over_ranks, self.eps, True, count)
        given = (input, self.weight, self.bias, mean.to(dtype), var.to(dtype), call)
        output: Tensor = NormaliseFunction.apply(*given)  # type: ignore[no-untyped-call]
        return output

    def _update_running(self, mean: Tensor, unbiased_var: Tensor) -> None:
        if not (self.training and self.track_running_stats) or self.running_mean is None:
            return
        assert self.num_batches_tracked is not None
        assert self.running_var is not None
        self.num_batches_tracked += 1
        share = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(unbiased_var.to(self.running_var.dtype), share)


def _sum_over_ranks(numbers: Tensor) -> None:
    allreduce_(numbers, op=Sum)


def _local_statistics(input: Tensor) -> Tensor:
    """Return one row for ``merge_moments``; every element counts."""
    channels = input.shape[1]
    row = torch.zeros(1, MEANS + 2 * channels, dtype=torch.float64, device=input.device)
    if input.numel():
        mean, var = local_moments(input)
        for column in (ELEMENTS, COUNTED):
            row[0, column].fill_(input.numel() // channels)
        row[0, MEANS : MEANS + channels] = mean
        row[0, MEANS + channels :] = var
    return row
