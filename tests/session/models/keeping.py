"""Models whose forwards keep values for later ones, or for the program."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.session.models.training import model, noised, normed, trained


@model
def queue() -> Any:
    class Queued(nn.Module):
        queue: Tensor
        place: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.body = normed(last=4)
            self.register_buffer("queue", F.normalize(torch.randn(16, 4), dim=1))
            self.register_buffer("place", torch.zeros((), dtype=torch.long))

        def forward(self, x: Tensor) -> Any:
            keys = F.normalize(self.body(x), dim=1)
            logits = keys @ self.queue.clone().T
            at = (self.place + torch.arange(len(x))) % 16
            self.queue[at] = keys.detach()
            self.place += len(x)
            return logits

    net = Queued().double()
    return trained(lambda x, _: net(x).logsumexp(1).mean() + net(noised(x)).square().mean(), net)


@model
def average_of_outputs() -> Any:
    class Centred(nn.Module):
        """Centres its outputs by those of earlier batches, as DINO does."""

        center: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.body = normed(last=4)
            self.register_buffer("center", torch.zeros(4))

        def forward(self, x: Tensor) -> Any:
            out = self.body(x)
            result = out - self.center
            if self.training:
                self.center = 0.9 * self.center + 0.1 * out.detach().mean(0)
            return result

    net = Centred().double()
    return trained(lambda x, y: F.mse_loss(net(x)[:, :1] - net(noised(x))[:, 1:2], y), net)
