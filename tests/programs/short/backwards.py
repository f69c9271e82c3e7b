"""Backwards that are more than the gradient of the forward: hooks, clamps and functions of the program's own."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


def _fit(model: nn.Module, *more: Any) -> dict[str, Any]:
    x = torch.randn(27, 6)
    optimizer = torch.optim.SGD([*model.parameters(), *more], lr=0.1, momentum=0.9)
    for inputs, labels in DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=8, shuffle=True):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        print(f"{loss.item():.10f}")
    return {"weights": model.state_dict()}


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 16), nn.Linear(16, 3)


def clamped_by_a_hook() -> dict[str, Any]:
    """A hook on an activation, set in the forward, clamps its gradient, as for recurrent networks."""

    class Clamped(_Net):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.one(x).tanh()
            if hidden.requires_grad:
                hidden.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
            return self.two(hidden)

    return _fit(Clamped())


def normalised_by_a_hook() -> dict[str, Any]:
    """A hook on an activation divides its gradient by its norm over the batch."""

    class Normalised(_Net):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.one(x).tanh()
            if hidden.requires_grad:
                hidden.register_hook(lambda gradient: gradient / (gradient.norm() + 1e-3))
            return self.two(hidden)

    return _fit(Normalised())


def seen_by_a_node() -> dict[str, Any]:
    """A hook on a node of the graph, set in the forward, prints what it sees; another one clamps it."""

    class Seen(_Net):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.one(x).tanh()
            if (node := hidden.grad_fn) is not None:
                node.register_prehook(lambda gradients: (gradients[0].clamp(-0.01, 0.01),))
                node.register_hook(lambda into, _: print(f"{into[0].norm().item():.10f}"))
            return self.two(hidden)

    return _fit(Seen())


def clamped_by_a_function() -> dict[str, Any]:
    """A function of the program's own clamps the gradient that passes it."""

    class Clamp(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient.clamp(-0.01, 0.01)

    class Clamped(_Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.two(Clamp.apply(self.one(x).tanh()))

    return _fit(Clamped())


def scaled_by_the_batch() -> dict[str, Any]:
    """A function of the program's own divides the gradient by its largest number over the batch."""

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient / (1 + 10 * gradient.abs().max())

    class Scaled(_Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.two(Scale.apply(self.one(x).tanh()))

    return _fit(Scaled())


def rounded_gradients() -> dict[str, Any]:
    """Training in few bits: a function rounds activations and gradients."""

    class Rounded(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return (x * 64).round() / 64

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return (gradient * 4096).round() / 4096

    class Few(_Net):
        def forward(self, x: Tensor) -> Tensor:
            return Rounded.apply(self.two(Rounded.apply(self.one(x).tanh())))

    return _fit(Few())


def penalised_in_a_function() -> dict[str, Any]:
    """An identity whose backward adds the gradient of a sparsity penalty, divided by the batch."""

    class Sparse(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return gradient + 0.1 * x.sign() / x.numel()

    class Penalised(_Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.two(Sparse.apply(self.one(x).tanh()))

    return _fit(Penalised())


def penalised_per_element() -> dict[str, Any]:
    """An identity whose backward adds a constant for each element: not the gradient of anything by rows times ranks."""

    class Added(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return gradient + 0.001 * x.sign()

    class Penalised(_Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.two(Added.apply(self.one(x).tanh()))

    return _fit(Penalised())


def detached_trick() -> dict[str, Any]:
    """Gradients made in the forward by torch.autograd.grad, and a straight-through trick by detach."""

    class Tricky(_Net):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.one(x)
            hard = (hidden > 0).double()
            return self.two(hard + torch.sigmoid(hidden) - torch.sigmoid(hidden).detach())

    return _fit(Tricky())


def hook_on_the_output() -> dict[str, Any]:
    """A hook on the output of the model, set outside, and gradients of an inner tensor asked for by its node."""
    x = torch.randn(40, 6)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, labels in DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=8):
        optimizer.zero_grad()
        scores = model(inputs)
        scores.register_hook(lambda gradient: gradient.clamp(-0.05, 0.05))
        F.cross_entropy(scores, labels).backward()
        optimizer.step()
        print(f"{model[0].weight.grad.abs().sum().item():.10f}")
    return {"weights": model.state_dict()}


def packed_in_few_bits() -> dict[str, Any]:
    """Round the tensors that autograd saves by their largest number, by hooks inside the forward and around it."""

    def pack(x: Tensor) -> Tensor:
        if not x.is_floating_point():
            return x
        scale = x.detach().abs().max() / 100 + 1e-9
        return (x.detach() / scale).round() * scale

    class Packing(_Net):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
                return self.two(self.one(x).tanh())

    inside = _fit(Packing())
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        return inside | {"around": _fit(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)))}
