"""What forwards keep for later ones, or for the program."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.session.models.training import WIDTH, model, module, noised, normed, trained, trained_on_pairs


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
def codebook() -> Any:
    class Book(nn.Module):
        codes: Tensor
        counts: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.encode, self.decode = normed(last=3), nn.Linear(3, WIDTH)
            self.register_buffer("codes", torch.randn(5, 3))
            self.register_buffer("counts", torch.ones(5))

        def forward(self, x: Tensor) -> Any:
            z = self.encode(x)
            nearest = torch.cdist(z, self.codes).argmin(1)
            found = self.codes[nearest]
            if self.training:
                with torch.no_grad():
                    hot = F.one_hot(nearest, 5).to(z)
                    self.counts.mul_(0.9).add_(hot.sum(0), alpha=0.1)
                    self.codes.mul_(0.9).add_(hot.T @ z / self.counts[:, None], alpha=0.1)
            return self.decode(z + (found - z).detach()), F.mse_loss(z, found.detach(), reduction="none").sum(1)

    net = Book().double()

    def loss(x: Tensor, _: Tensor) -> Any:
        out, commitment = net(x)
        return F.mse_loss(out, x) + commitment.mean()

    return trained(loss, net)


@model
def average_of_outputs() -> Any:
    class Centred(nn.Module):
        """As DINO centres its outputs by those of earlier batches."""

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


@model
def counting_calls() -> Any:
    class Annealed(nn.Module):
        steps: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.body = normed()
            self.register_buffer("steps", torch.zeros((), dtype=torch.long))

        def forward(self, x: Tensor) -> Any:
            self.steps += 1
            return self.body(x) / self.steps.clamp(max=4)

    net = Annealed().double()
    return trained_on_pairs(net)


@model
def hidden_state_that_is_carried() -> Any:
    def forward(self: Any, x: Tensor) -> Any:
        before = None if self.hidden is None else self.hidden[: len(x)]
        if before is not None and len(before) < len(x):
            before = None
        hidden = self.cell(x, before)
        self.hidden = hidden.detach()
        return self.out(hidden)

    net = module(forward, cell=nn.GRUCell(WIDTH, 7), out=nn.Linear(7, 1), hidden=None)
    return trained(lambda x, y: F.mse_loss(net(x), y), net)


@model
def loss_kept_as_an_attribute() -> Any:
    def forward(self: Any, x: Tensor) -> Any:
        out = self.body(x)
        self.auxiliary = out.square().mean()
        return out

    net = module(forward, body=normed(), auxiliary=torch.zeros(()))
    return trained(lambda x, y: F.mse_loss(net(x), y) + net.auxiliary, net)
