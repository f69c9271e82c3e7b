"""Forwards that mix rows only later: by a flag, a number or a tensor that was zero before."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.session.models.training import Around, around, model, trained_by_step

FLAGS = {"mix": 0}


@model
def flag_among_the_globals() -> Any:
    FLAGS["mix"] = 0

    def forward(self: Any, x: Tensor) -> Any:
        out = self.body(x)
        return out - out.mean(0) if FLAGS["mix"] else out

    net = around(forward)

    def loss(step: int, x: Tensor, y: Tensor) -> Any:
        FLAGS["mix"] = int(step > 3)
        return F.mse_loss(net(x), y)

    return trained_by_step(loss, net)


@model
def flag_of_an_object() -> Any:
    class Options:
        mix = False

    def forward(self: Any, x: Tensor) -> Any:
        out = self.body(x)
        return out - out.mean(0) if self.options.mix else out

    net = around(forward, options=Options())

    def loss(step: int, x: Tensor, y: Tensor) -> Any:
        net.options.mix = step > 3
        return F.mse_loss(net(x), y)

    return trained_by_step(loss, net)


@model
def number_handed_in() -> Any:
    def forward(self: Any, x: Tensor, temperature: float, step: int) -> Any:
        out = self.body(x) * temperature
        return out - out.mean(0) if step > 3 else out

    net = around(forward)

    def loss(step: int, x: Tensor, y: Tensor) -> Any:
        return F.mse_loss(net(x, 1 / step, step), y)

    return trained_by_step(loss, net)


@model
def float_handed_in_that_decides() -> Any:
    def forward(self: Any, x: Tensor, alpha: float) -> Any:
        out = self.body(x)
        return out - alpha * out.mean(0) if alpha > 0 else out

    net = around(forward)

    def loss(step: int, x: Tensor, y: Tensor) -> Any:
        return F.mse_loss(net(x, max(0.0, (step - 3) / 10)), y)

    return trained_by_step(loss, net)


@model
def tensor_handed_in_that_couples() -> Any:
    """As a gradient-reversal network's strength, it is zero at first."""

    def forward(self: Any, x: Tensor, alpha: Tensor) -> Any:
        out = self.body(x)
        return out - alpha * out.mean(0)

    net = around(forward)

    def loss(step: int, x: Tensor, y: Tensor) -> Any:
        return F.mse_loss(net(x, torch.tensor(max(0.0, (step - 3) / 10), dtype=x.dtype)), y)

    return trained_by_step(loss, net)


@model
def buffer_that_couples() -> Any:
    class Coupled(Around):
        strength: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("strength", torch.zeros(()))

        def forward(self, x: Tensor) -> Any:
            out = self.body(x)
            return out - self.strength * out.mean(0)

    net = Coupled().double()

    def loss(step: int, x: Tensor, y: Tensor) -> Any:
        net.strength.fill_(max(0.0, (step - 3) / 10))
        return F.mse_loss(net(x), y)

    return trained_by_step(loss, net)
