"""Forwards that mix rows only later: by a flag, a number or a tensor that was zero before."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.session.models.odd import Around
from tests.session.models.training import model, trained

FLAGS = {"mix": 0}


@model
def mode_of_one_layer_changes() -> Any:
    class Mixing(Around):
        """Mixes rows from its fifth call on, by a flag that the loop sets."""

        def __init__(self) -> None:
            super().__init__()
            self.config = {"mix": False}

        def forward(self, x: Tensor) -> Any:
            out = self.body(x)
            return out - out.mean(0) if self.config["mix"] else out

    net = Mixing().double()
    steps = [0]

    def loss(x: Tensor, y: Tensor) -> Any:
        steps[0] += 1
        net.config["mix"] = steps[0] > 3
        return F.mse_loss(net(x), y)

    return trained(loss, net, epochs=3)


@model
def flag_among_the_globals() -> Any:
    FLAGS["mix"] = 0

    class Mixing(Around):
        def forward(self, x: Tensor) -> Any:
            out = self.body(x)
            return out - out.mean(0) if FLAGS["mix"] else out

    net = Mixing().double()
    steps = [0]

    def loss(x: Tensor, y: Tensor) -> Any:
        steps[0] += 1
        FLAGS["mix"] = int(steps[0] > 3)
        return F.mse_loss(net(x), y)

    return trained(loss, net, epochs=3)


@model
def flag_of_an_object() -> Any:
    class Options:
        mix = False

    class Mixing(Around):
        def __init__(self) -> None:
            super().__init__()
            self.options = Options()

        def forward(self, x: Tensor) -> Any:
            out = self.body(x)
            return out - out.mean(0) if self.options.mix else out

    net = Mixing().double()
    steps = [0]

    def loss(x: Tensor, y: Tensor) -> Any:
        steps[0] += 1
        net.options.mix = steps[0] > 3
        return F.mse_loss(net(x), y)

    return trained(loss, net, epochs=3)


@model
def number_handed_in() -> Any:
    class Scaled(Around):
        def forward(self, x: Tensor, temperature: float, step: int) -> Any:
            out = self.body(x) * temperature
            return out - out.mean(0) if step > 3 else out

    net = Scaled().double()
    steps = [0]

    def loss(x: Tensor, y: Tensor) -> Any:
        steps[0] += 1
        return F.mse_loss(net(x, 1 / steps[0], steps[0]), y)

    return trained(loss, net, epochs=3)


@model
def float_handed_in_that_decides() -> Any:
    class Scaled(Around):
        def forward(self, x: Tensor, alpha: float) -> Any:
            out = self.body(x)
            return out - alpha * out.mean(0) if alpha > 0 else out

    net = Scaled().double()
    steps = [0]

    def loss(x: Tensor, y: Tensor) -> Any:
        steps[0] += 1
        return F.mse_loss(net(x, max(0.0, (steps[0] - 3) / 10)), y)

    return trained(loss, net, epochs=3)


@model
def tensor_handed_in_that_couples() -> Any:
    """As a gradient-reversal network's strength, it is zero at first."""

    class Coupled(Around):
        def forward(self, x: Tensor, alpha: Tensor) -> Any:
            out = self.body(x)
            return out - alpha * out.mean(0)

    net = Coupled().double()
    steps = [0]

    def loss(x: Tensor, y: Tensor) -> Any:
        steps[0] += 1
        return F.mse_loss(net(x, torch.tensor(max(0.0, (steps[0] - 3) / 10), dtype=x.dtype)), y)

    return trained(loss, net, epochs=3)


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
    steps = [0]

    def loss(x: Tensor, y: Tensor) -> Any:
        steps[0] += 1
        net.strength.fill_(max(0.0, (steps[0] - 3) / 10))
        return F.mse_loss(net(x), y)

    return trained(loss, net, epochs=3)
