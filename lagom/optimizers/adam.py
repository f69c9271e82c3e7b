"""``Adam``: the arithmetic of a step of torch's Adam or AdamW, of all parameters at once and with the same bits."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _len_torch_dispatch_stack

from lagom.collectives.native import native

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

_LARGE = 1 << 16
"""Numbers, from which on more than ``_THREADS`` threads are faster than one that goes through memory once."""
_THREADS = 2
ROOM = 1 << 16
"""Bytes of numbers whose roots are taken in one call; with all that belongs to them they fit into a cache."""
_MANY = 64
"""Settings whose arithmetic has been tried, at most."""
_TYPES = (torch.float32, torch.float64)
_PLAIN = (torch.nn.Parameter, torch.Tensor)
_SETTINGS = ("beta1", "beta2", "eps", "weight_decay", "decoupled_weight_decay", "maximize")
_OFF = ("amsgrad", "has_complex", "capturable", "differentiable", "grad_scale", "found_inf")
_NUM_STEPS = 3
_SIZES = (1, 7, 33, 130, 3001)


class Adam:
    """Steps as torch's function does, or calls it. See Note [Adam at once].

    Args:
        torchs: ``torch.optim.adam._single_tensor_adam``.
    """

    def __init__(self, torchs: Callable[..., None]) -> None:
        self._torchs = torchs
        self._tried: dict[tuple[Any, ...], bool | None] = {}
        """By type and settings: whether products and sums are rounded once; None where the bits are not torch's."""
        room = torch.empty(ROOM, dtype=torch.uint8, device="cpu")
        self._turn = threading.Lock()
        self._rooms = {dtype: room.view(dtype) for dtype in _TYPES}

    def step(
        self,
        params: list[Tensor],
        grads: list[Tensor],
        exp_avgs: list[Tensor],
        exp_avg_sqs: list[Tensor],
        max_exp_avg_sqs: list[Tensor],
        state_steps: list[Tensor],
        *args: Any,
        **options: Any,
    ) -> None:
        """As torch's function, with its arguments."""
        if args or max_exp_avg_sqs or not self._stepped(params, grads, exp_avgs, exp_avg_sqs, state_steps, options):
            self._torchs(params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps, *args, **options)

    def _stepped(
        self,
        params: list[Tensor],
        grads: list[Tensor],
        averages: list[Tensor],
        squares: list[Tensor],
        steps: list[Tensor],
        options: dict[str, Any],
    ) -> bool:
        if not params or not _is_ordinary(options):
            return False
        dtype, counts = params[0].dtype, steps[0].dtype
        if dtype not in _TYPES or counts not in _TYPES:
            return False
        entries: list[int] = []
        size = 0
        for p, g, m, v, s in zip(params, grads, averages, squares, steps, strict=True):
            shape = p.shape
            for one in (p, g, m, v):
                if one.dtype is not dtype or one.shape != shape or not _lies_plainly(one):
                    return False
            if s.dtype is not counts or s.numel() != 1 or not _lies_plainly(s):
                return False
            count = p.numel()
            entries += (p.data_ptr(), g.data_ptr(), m.data_ptr(), v.data_ptr(), s.data_ptr(), count)
            size += count
        if size >= _LARGE and torch.get_num_threads() > _THREADS:
            return False
        key = (dtype, counts, *[options[name] for name in _SETTINGS])
        if not self._turn.acquire(blocking=False):
            return False  # another thread steps another optimizer, in the same room
        try:
            if key not in self._tried:
                if len(self._tried) == _MANY:
                    self._tried.clear()
                self._tried[key] = self._trial(dtype, counts, options)
            fused = self._tried[key]
            if fused is None:
                return False
            return self._step(entries, dtype, counts, options, fused, [*params, *averages, *squares, *steps])
        finally:
            self._turn.release()

    def _step(
        self,
        entries: list[int],
        dtype: torch.dtype,
        counts: torch.dtype,
        options: dict[str, Any],
        fused: bool,
        changed: Sequence[Tensor],
    ) -> bool:
        """Step; False where memory overlaps, and nothing has changed."""
        room = self._rooms[dtype]
        step = native().AdamStep(
            entries,
            dtype is torch.float64,
            counts is torch.float64,
            options["beta1"],
            options["beta2"],
            options["lr"],
            options["eps"],
            options["weight_decay"],
            options["decoupled_weight_decay"],
            options["maximize"],
            fused,
        )
        if not step.lies_apart():
            return False
        torch.autograd.graph.increment_version(changed)
        place, most = room.data_ptr(), len(room)
        while count := step.averages(place, most):
            torch.sqrt_(room if count == most else room[:count])
            step.changes(place)
        return True

    def _trial(self, dtype: torch.dtype, counts: torch.dtype, options: dict[str, Any]) -> bool | None:
        """In which of two ways the bits are torch's."""
        return next((fused for fused in (True, False) if self._has_torchs_bits(dtype, counts, options, fused)), None)

    def _has_torchs_bits(self, dtype: torch.dtype, counts: torch.dtype, options: dict[str, Any], fused: bool) -> bool:
        options = {**options, "lr": 0.03}
        mine, torchs = ([_state(size, dtype, counts) for size in _SIZES] for _ in range(2))
        for number in range(_NUM_STEPS):
            grads = [_numbers(size, dtype, 2 + number) * 10.0 ** (1 - 2 * number) for size in _SIZES]
            columns = [list(column) for column in zip(*torchs, strict=True)]
            self._torchs(columns[0], grads, columns[1], columns[2], [], columns[3], **options)
            entries: list[int] = []
            for (p, m, v, s), g in zip(mine, grads, strict=True):
                entries += (p.data_ptr(), g.data_ptr(), m.data_ptr(), v.data_ptr(), s.data_ptr(), len(p))
            if not self._step(entries, dtype, counts, options, fused, []):
                return False
        return all(torch.equal(a, b) for x, y in zip(mine, torchs, strict=True) for a, b in zip(x, y, strict=True))


def _is_ordinary(options: dict[str, Any]) -> bool:
    """Whether an eager step, of numbers, is all that is asked for, and nobody looks at operations."""
    if len(options) != len(_SETTINGS) + len(_OFF) + 1 or any(options.get(name, True) for name in _OFF):
        return False
    if any(type(options.get(name)) is not float for name in ("beta1", "beta2", "eps")):
        return False
    if any(type(options.get(name)) not in (float, int) for name in ("lr", "weight_decay")):
        return False
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return False
    return not (
        _len_torch_dispatch_stack() or torch._C._len_torch_function_stack() or torch.autograd._profiler_enabled()
    )


def _lies_plainly(one: Tensor) -> bool:
    return (
        type(one) in _PLAIN and one.is_cpu and one.layout is torch.strided and one.is_contiguous() and not one.is_neg()
    )


def _state(size: int, dtype: torch.dtype, counts: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A parameter, its averages and its number of steps."""
    zeros = torch.zeros(size, dtype=dtype, device="cpu")
    return _numbers(size, dtype, 1), zeros, zeros.clone(), torch.zeros((), dtype=counts, device="cpu")


def _numbers(size: int, dtype: torch.dtype, number: int) -> Tensor:
    places = torch.arange(1, size + 1, dtype=dtype, device="cpu")
    return torch.sin(places * (1.3 + 0.7 * number)) * 1.7


# Note [Adam at once]
#
# Where parameters are small a step of torch's Adam is the calls of its operations: twelve for each parameter. What
# is computed goes by element, and operations follow IEEE 754, so that other loops give the same bits if they round
# where torch's do: products and sums once (fused) or twice, which depends on the processor and on how torch was
# compiled; and the square root, which torch has of MKL and which is not always rounded correctly, is torch's own, of
# many parameters in one call. None of it depends on where an element is in its tensor. Where parameters are large it
# saves memory's time: torch's operations go through all of it a dozen times.
#
# That is not believed but tried, for each type and setting, with a few steps of small parameters, when a step is to be
# made for the first time. Where bits differ, and where anything is not as usual (types, memory, tensors in place of
# numbers, modes that look at operations), it is torch's function that steps. All else of a step, state and hooks and
# gradients that are not there, is torch's anyway.
