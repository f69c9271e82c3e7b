"""``SyncBatchNorm``: BatchNorm with the statistics of all ranks' batches, on the CPU too."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lagom.compat.horovod import world
from lagom.compat.horovod.asking import Sum
from lagom.compat.horovod.autograd import allgather, allreduce


class SyncBatchNorm(nn.modules.batchnorm._BatchNorm):
    """As ``torch.nn.BatchNorm1d`` to ``3d``; in training over the samples of all ranks, which may differ in number."""

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"SyncBatchNorm of an input with {input.dim()} dimensions; want samples, channels, ...")

    def forward(self, input: Tensor) -> Tensor:
        """Normalize ``input``, shaped (samples, channels, ...)."""
        self._check_input_dim(input)
        if not (self.training or self.running_mean is None) or world.size() == 1:
            return super().forward(input)
        (mean, squares), num = _statistics(input)
        if self.training and self.track_running_stats and self.running_mean is not None:
            assert self.num_batches_tracked is not None
            assert self.running_var is not None
            with torch.no_grad():
                self.num_batches_tracked += 1
                share = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
                self.running_var.lerp_((squares / max(num - 1, 1)).to(self.running_var.dtype), share)
        given = (input, self.weight, self.bias, mean, squares / num, float(self.eps), num)
        output: Tensor = _Normalize.apply(*given)  # type: ignore[no-untyped-call]
        return output


def _statistics(input: Tensor) -> tuple[tuple[Tensor, Tensor], float]:
    """Mean, sum of squared distances from it, and number of values, of each channel over all ranks.

    Of each rank's own mean first, as sums of squares alone would cancel (Chan et al., 1979).
    """
    with torch.no_grad():
        values = input.detach().transpose(0, 1).flatten(1)
        values = values.float() if values.dtype in (torch.float16, torch.bfloat16) else values
        mean = values.mean(1) if values.shape[1] else values.new_zeros(len(values))
        squares = (values - mean.unsqueeze(1)).square().sum(1)
        own = torch.cat([values.new_tensor([values.shape[1]]), mean, squares]).unsqueeze(0)
        nums, means, all_squares = allgather(own).split([1, len(mean), len(mean)], 1)
        num = nums.sum()
        common = (nums * means).sum(0) / num
        return (common, (all_squares + nums * (means - common).square()).sum(0)), float(num)


class _Normalize(torch.autograd.Function):
    """Of statistics that depend on the inputs of all ranks; gradients of weight and bias stay the rank's own."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Any, bias: Any, mean: Tensor, variance: Tensor, eps: float, num: float
    ) -> Tensor:
        ctx.save_for_backward(input, weight, mean, variance)
        ctx.eps, ctx.num, ctx.needs_bias = eps, num, bias is not None
        return functional.batch_norm(input, mean, variance, weight, bias, False, 0.0, eps)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        given, weight, mean, variance = ctx.saved_tensors
        shape = [1, -1] + [1] * (given.dim() - 2)
        over = [0, *range(2, given.dim())]
        scale = (variance + ctx.eps).rsqrt()
        normal = (given.to(mean.dtype) - mean.view(shape)) * scale.view(shape)
        grad = grads[0].to(mean.dtype)
        to_bias, to_weight = grad.sum(over), (grad * normal).sum(over)
        sums = allreduce(torch.stack([to_bias, to_weight]), op=Sum) / ctx.num
        inner = grad - sums[0].view(shape) - normal * sums[1].view(shape)
        factor = scale if weight is None else scale * weight.to(mean.dtype)
        to_input = (inner * factor.view(shape)).to(given.dtype)
        return (
            to_input,
            None if weight is None else to_weight,
            to_bias if ctx.needs_bias else None,
            None,
            None,
            None,
            None,
        )
