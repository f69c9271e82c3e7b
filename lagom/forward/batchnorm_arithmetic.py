"""BatchNorm's arithmetic over ranks that each have a share of the batch. See Note [BatchNorm]."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from lagom.run_state.loss_terms import ExchangeFunction

if TYPE_CHECKING:
    from torch import Tensor

ELEMENTS, COUNTED, COMPLETE, SAME, MEANS = range(5)
"""Columns of a row of statistics; MEANS is the first of the channels' columns. See ``merge_moments``."""


@dataclass(eq=False)
class BatchNormCall:
    """Facts of one forward that its backward needs."""

    sum_in_place: Callable[[Tensor], None]
    """Sums a float64 tensor over the ranks, in place."""
    eps: float
    counted: bool
    """Whether the rank's input is part of the batch; False for the copied sample that a rank without one runs."""
    count: Tensor
    """Elements per channel, over all ranks."""

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of ``values`` over the ranks."""
        total = values.to(torch.float64, copy=True).contiguous()
        self.sum_in_place(total)
        return total


def local_moments(input: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance per channel, in float32 or the type of ``input`` if that is wider."""
    x = input.to(torch.promote_types(input.dtype, torch.float32))
    if x.device.type == "cpu":  # torch's own kernel is 3 times as fast as var_mean
        mean, var = torch.batch_norm_update_stats(x, None, None, 0.0)
    else:
        var, mean = torch.var_mean(x, [i for i in range(x.dim()) if i != 1], correction=0)
    return mean, var


def merge_moments(rows: Tensor) -> Tensor:
    """Merge ``rows`` of statistics into one row, for all ranks together.

    Args:
        rows: a row of float64 for each rank, or for each group of ranks that was merged before. ELEMENTS is the
            elements per channel of the (first) rank. COUNTED is how many elements are part of the batch: all or, on a
            rank that runs a copy, 0. COMPLETE is 1 if each input has as many rows as its rank's share. SAME is 1 if all
            ranks have the same statistics. From MEANS on: the mean of each channel, then the biased variance of each.

    From means m_r, variances v_r and counts n_r: m = sum n_r m_r / n and v = sum n_r (v_r + (m_r - m)^2) / n (Chan,
    Golub and LeVeque, 1979).
    """
    channels = (rows.shape[1] - MEANS) // 2
    weights = rows[:, COUNTED, None]
    means, variances = rows[:, MEANS : MEANS + channels], rows[:, MEANS + channels :]
    count = weights.sum().clamp(min=1)
    mean = (means * weights).sum(0) / count
    var = ((variances + (means - mean).square()) * weights).sum(0) / count
    same = (rows[:, SAME:] == rows[:1, SAME:]).all() & (rows[:, ELEMENTS] == rows[0, ELEMENTS]).all()
    same = same & rows[0, SAME].bool()
    merged = torch.where(same, rows[0], torch.cat([rows.new_zeros(MEANS), mean, var]))
    merged[ELEMENTS] = rows[0, ELEMENTS]
    merged[COUNTED] = weights.sum()
    merged[COMPLETE] = rows[:, COMPLETE].amin()
    return merged


def moments_of(merged: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return count, mean and biased variance over all ranks, and the count that one process would have.

    Args:
        merged: the row of ``merge_moments``.
    """
    mean, var = merged[MEANS:].chunk(2)
    count = merged[COUNTED].clamp(min=1)
    replicated = merged[SAME].bool() & ~merged[COMPLETE].bool()
    return count, mean, var, torch.where(replicated, merged[ELEMENTS], count)


class NormaliseFunction(ExchangeFunction):
    """Normalises by given statistics, with gradients as if these were computed from the inputs of all ranks.

    See Note [BatchNorm] for the formula.
    """

    gives_whole = False

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        var: Tensor,
        call: BatchNormCall,
    ) -> Tensor:
        ctx.save_for_backward(input, weight, bias, mean, var)
        ctx.call = call
        if weight is not None or bias is not None:
            weight = torch.ones_like(mean) if weight is None else weight.to(mean.dtype)
            bias = torch.zeros_like(mean) if bias is None else bias.to(mean.dtype)
        return _normalise_fixed(input, mean, var, weight, bias, call.eps)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, var = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True
            return (*_differentiable_gradients(ctx, dy), None, None, None)
        call = ctx.call
        kind = mean.dtype
        scale = torch.ones_like(mean) if weight is None else weight.to(kind)
        own_kind, x, dy = x.dtype, x.to(kind), dy.to(kind)
        dx, weight_gradient, bias_gradient = _fixed_gradients(dy, x, scale, mean, var, call.eps)
        if ctx.needs_input_grad[0]:
            sums = torch.stack([bias_gradient, weight_gradient])
            total = call.sum(sums if call.counted else torch.zeros_like(sums)) / call.count
            if call.counted:
                total = total.to(kind) * (scale * torch.rsqrt(var + call.eps))
                dx = dx.sub_(_normalise_fixed(x, mean, var, total[1], total[0], call.eps))
        return (
            dx.to(own_kind) if ctx.needs_input_grad[0] else None,
            weight_gradient.to(weight.dtype) if ctx.needs_input_grad[1] else None,
            bias_gradient.to(bias.dtype) if ctx.needs_input_grad[2] else None,
            None,
            None,
            None,
        )


def _normalise_fixed(
    x: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    if x.numel() == 0:  # torch's kernels would divide by zero, and kill the process
        return torch.empty_like(x)
    return torch.batch_norm(x, weight, bias, mean, var, False, 0.0, eps, torch.backends.cudnn.enabled)


def _fixed_gradients(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, var: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return w / s dy, sum(dy x') and sum(dy) of this rank, computed in one pass."""
    if x.numel() == 0:
        return torch.zeros_like(x), torch.zeros_like(mean), torch.zeros_like(mean)
    # Some kernels of GPUs use the running mean and variance, others the saved ones, so both are passed.
    saved = (None, None) if x.is_cpu else (mean, torch.rsqrt(var + eps))
    gradients: tuple[Tensor, Tensor, Tensor] = torch.ops.aten.native_batch_norm_backward(
        dy, x, weight, mean, var, *saved, False, eps, [True, True, True]
    )
    return gradients


def _differentiable_gradients(ctx: Any, dy: Tensor) -> list[Tensor | None]:
    given, weight, bias, mean, _ = ctx.saved_tensors
    call, needed = ctx.call, ctx.needs_input_grad
    x = given.to(mean.dtype)
    dims = [i for i in range(x.dim()) if i != 1]
    shape = [-1 if i == 1 else 1 for i in range(x.dim())]

    def average(values: Tensor) -> Tensor:
        summed: Tensor = _SumFunction.apply(values.sum(dims) * call.counted, call)  # type: ignore[no-untyped-call]
        result = summed.div(call.count.to(mean.dtype)).view(shape)
        # A copy has no influence on the statistics. Its rank must take part in the exchange of the backward, so the sum
        # stays in the graph, with a factor of 0.
        return result if call.counted else result.detach() + 0 * result

    centred = x - average(x)
    output = centred * torch.rsqrt(average(centred.square()) + call.eps)
    if weight is not None:
        output = output * weight.view(shape)
    if bias is not None:
        output = output + bias.view(shape)
    wanted = [leaf for leaf, needs in zip((given, weight, bias), needed, strict=False) if needs]
    gradients = iter(torch.autograd.grad(output, wanted, dy.to(output.dtype), create_graph=True))
    return [next(gradients) if needs else None for needs in needed[:3]]


class _SumFunction(ExchangeFunction):
    """Sums over the ranks; the gradient is the sum of the ranks' gradients."""

    gives_whole = False

    @staticmethod
    def forward(ctx: Any, values: Tensor, call: BatchNormCall) -> Tensor:
        ctx.call = call
        return call.sum(values).to(values.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        summed: Tensor = _SumFunction.apply(gradient, ctx.call)  # type: ignore[no-untyped-call]
        return summed, None


# Note [BatchNorm]
#
# One process computes y = w x' + b with x' = (x - m) / s, s^2 = v + eps, from the mean m and the biased variance v of
# all n elements of a channel, and (Ioffe and Szegedy, 2015)
#
#     dx = w / s (dy - sum(dy) / n - x' sum(dy x') / n),   dw = sum(dy x'),   db = sum(dy)
#
# with sums over all n. Here, rank r holds n_r of the elements. The root of each rank's backward is multiplied by
# R n_r / n, and the loss of one process is sum (n_r / n) L_r, so dy on every rank is R times the dy of one
# process: the same factor everywhere. The formula is linear in dy. So with its sums taken over the ranks, dx is R times
# the dx of one process too. Each rank keeps its own part of dw and db; the averages of these parts over the R ranks are
# the dw and db of one process.
#
# A rank without a sample runs a copy of one, which has no weight: its n_r is 0, its dy is 0, and m and v do not depend
# on its x, so dx = w / s dy there.
#
# All ranks take part in each exchange, so no rank may decide by its own input that there is nothing to exchange. Ranks
# decide by the gathered statistics. When all ranks have the same statistics, and not as many rows as their shares, the
# input is no share of the batch but data that each rank holds whole (a memory bank). Mean and variance are equal
# whether the data counts once or R times; only the unbiased variance of the running statistics needs the count of one
# process. The gradients may stay those of a batch of R copies: the average over the ranks is the same. In any other
# case the counts are used unchanged, also for inputs of [batch * time] rows.
