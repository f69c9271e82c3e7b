"""Forwards that mix rows only later: by a flag, a number or a tensor that was zero before."""

from __future__ import annotations

import argparse
import os
import random
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.session.models.training import Around, around, model, module, noised, normed, trained, trained_by_step

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


def flag_by(options: Any, turn: Callable[[bool], None], is_on: Callable[[Any], bool]) -> Any:
    """Train a network that mixes its rows while ``options``, an attribute of it, say so."""

    def forward(self: Any, x: Tensor) -> Any:
        out = self.body(x)
        return out - out.mean(0) if is_on(self.options) else out

    net = around(forward, options=options)

    def loss(step: int, x: Tensor, y: Tensor) -> Any:
        turn(step > 3)
        return F.mse_loss(net(x), y)

    return trained_by_step(loss, net)


@model
def flag_of_a_namespace() -> Any:
    options = argparse.Namespace(model=types.SimpleNamespace(mix=False))
    return flag_by(options, lambda on: setattr(options.model, "mix", on), lambda options: options.model.mix)


@model
def flag_in_a_list() -> Any:
    options = {"layers": ["a", False]}
    return flag_by(options, lambda on: options["layers"].__setitem__(1, on), lambda options: options["layers"][1])


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
    """The tensor is zero at first, like the strength of a gradient-reversal network."""

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


def random_layers(chance: Any) -> Any:
    """Train a network that skips attention, with dropout inside, or mixes its rows, by ``chance``."""

    def forward(self: Any, x: Tensor) -> Any:
        x = self.norm(self.into(x)).unsqueeze(1).expand(-1, 3, -1)
        if chance() < 0.4:
            x = x + self.attend(x, x, x)[0]
        if chance() < 0.4:
            x = x + x.flip(0)
        return self.out(x.mean(1))

    random.seed(0)
    np.random.seed(0)
    net = module(
        forward,
        into=nn.Linear(6, 8),
        norm=nn.BatchNorm1d(8),
        attend=nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True),
        out=nn.Linear(8, 1),
    )
    return trained(lambda x, y: F.mse_loss(net(x) - net(noised(x)), y), net, epochs=5)


@model
def layers_skipped_by_torchs_chance() -> Any:
    return random_layers(lambda: torch.rand(()))


@model
def layers_skipped_by_torchs_chance_as_a_float() -> Any:
    return random_layers(lambda: torch.rand(1).item())


@model
def layers_skipped_by_pythons_chance() -> Any:
    return random_layers(random.random)


@model
def layers_skipped_by_numpys_chance() -> Any:
    return random_layers(np.random.rand)


@model
def buffer_that_decides() -> Any:
    class Coupled(Around):
        mixes: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mixes", torch.zeros((), dtype=torch.bool))

        def forward(self, x: Tensor) -> Any:
            out = self.body(x)
            return out - out.mean(0) if self.mixes else out

    net = Coupled().double()

    def loss(step: int, x: Tensor, y: Tensor) -> Any:
        net.mixes.fill_(step > 3)
        return F.mse_loss(net(x), y)

    return trained_by_step(loss, net)


@model
def dropout_that_begins_later() -> Any:
    """Nothing that lagom compares tells when it begins, but BatchNorm has seen the rows before it does."""

    def forward(self: Any, x: Tensor) -> Any:
        x = self.body(x)
        return self.out(F.dropout(x, 0.3) if "LATER" in os.environ else x)

    net = module(forward, body=normed(last=4), out=nn.Linear(4, 1))

    def loss(step: int, x: Tensor, y: Tensor) -> Any:
        os.environ.pop("LATER", None)
        if step > 3:
            os.environ["LATER"] = "1"
        return F.mse_loss(net(x), y)

    try:
        return trained_by_step(loss, net)
    finally:
        os.environ.pop("LATER", None)
