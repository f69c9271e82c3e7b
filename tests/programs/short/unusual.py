"""Modules that are called, built or changed in unusual ways."""

from __future__ import annotations

import copy
import dataclasses
import functools
import os
import random
from collections import OrderedDict
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


def _data(num_samples: int = 43) -> tuple[Tensor, Tensor, DataLoader[Any]]:
    x = torch.randn(num_samples, 6)
    y = x[:, :3].argmax(1)
    return x, y, DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)


def _fit(model: Any, call: Any = None) -> dict[str, Any]:
    _, _, loader = _data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for inputs, labels in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy((call or model)(inputs), labels)
        loss.backward()
        optimizer.step()
        print(f"{loss.item():.10f}")
    return {"weights": model.state_dict()}


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 16), nn.Linear(16, 3)


def forward_called_directly() -> dict[str, Any]:
    """model.forward(x) instead of model(x), and forward replaced by another function on the instance."""
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    first = _fit(model, lambda x: model.forward(x))
    original = model.forward
    model.forward = lambda x: original(x) * 2 - original(x.flip(0)).mean(0)
    return first | {"again": _fit(model)}


def patched_in_mid_training() -> dict[str, Any]:
    """The method of a class is replaced while training goes on, by one that couples the rows."""

    class Changing(_Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.two(self.one(x).tanh())

    model = Changing()
    first = _fit(model)

    def coupled(self: Any, x: Tensor) -> Tensor:
        hidden = self.one(x).tanh()
        return self.two(hidden - hidden.mean(0))

    Changing.forward = coupled
    return first | {"again": _fit(model)}


def layers_replaced() -> dict[str, Any]:
    """Layers swapped, widened and appended between epochs; weights copied into the wider one."""
    model = nn.Sequential(OrderedDict(one=nn.Linear(6, 8), act=nn.Tanh(), two=nn.Linear(8, 3)))
    _fit(model)
    wide, head = nn.Linear(6, 12), nn.Linear(12, 3)
    with torch.no_grad():
        wide.weight[:8], wide.bias[:8] = model.one.weight, model.one.bias
    model.one, model.two, model.act = wide, head, nn.BatchNorm1d(12)
    _fit(model)
    model.add_module("last", nn.Softshrink(0.01))
    return _fit(model)


def skipped_at_random() -> dict[str, Any]:
    """Stochastic depth by Python's generator, by numpy's, and by torch's for each sample; layer drop in a list."""

    class Skipping(_Net):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(16, 16) for _ in range(3)])

        def forward(self, x: Tensor) -> Tensor:
            x = self.one(x)
            for block in self.blocks:
                if self.training and random.random() < 0.3:
                    continue
                if self.training and np.random.rand() < 0.2:
                    x = x + block(x)
                else:
                    keep = (torch.rand(len(x), 1) < 0.8).double() / 0.8 if self.training else 1.0
                    x = x + keep * torch.tanh(block(x))
            return self.two(x)

    return _fit(Skipping())


def depends_on_the_size_of_the_batch() -> dict[str, Any]:
    """A forward that divides by the number of rows, and one that builds a range as long as the batch."""

    class Sized(_Net):
        def forward(self, x: Tensor) -> Tensor:
            places = torch.arange(len(x)).double()[:, None] / len(x)
            return self.two(self.one(x).tanh() * places) / len(x) * 8

    return _fit(Sized())


def global_switches() -> dict[str, Any]:
    """A forward that looks at a global variable, at an attribute of its class and at a default of a function."""
    return _fit(_Switched()) | {"seen": _Switched.seen}


_SETTINGS = {"scale": 1.0}


class _Switched(_Net):
    seen = 0

    def forward(self, x: Tensor) -> Tensor:
        type(self).seen += 1
        _SETTINGS["scale"] = 1.0 + 0.1 * (type(self).seen % 3)
        return self.two(self.one(x).tanh()) * _SETTINGS["scale"]


def cached_results() -> dict[str, Any]:
    """A forward whose positions are cached by lru_cache, and one that keeps the mean of its last output."""

    @functools.cache
    def positions(width: int) -> Tensor:
        return torch.sin(torch.arange(width).double())

    class Cached(_Net):
        def __init__(self) -> None:
            super().__init__()
            self.last: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            scores = self.two((self.one(x) + positions(16)).tanh())
            if self.last is not None:
                scores = scores + 0.1 * self.last
            self.last = scores.detach().mean(0)
            return scores

    return _fit(Cached())


@dataclasses.dataclass
class _Found:
    scores: Tensor
    features: Tensor
    note: str


def results_of_other_kinds() -> dict[str, Any]:
    """Outputs as a dataclass, as a generator, as nested lists with None, and as a dict with a number."""

    class Kinds(_Net):
        def __init__(self, kind: str) -> None:
            super().__init__()
            self.kind = kind

        def forward(self, x: Tensor) -> Any:
            hidden = self.one(x).tanh()
            scores = self.two(hidden)
            if self.kind == "dataclass":
                return _Found(scores, hidden, "a note")
            if self.kind == "generator":
                return (part for part in (scores, hidden))
            if self.kind == "nested":
                return [scores, [None, (hidden, [])], {"rows": len(x)}]
            return {"scores": scores, "loss": scores.pow(2).mean(), "rows": len(x)}

    reads = {
        "dataclass": lambda found: found.scores,
        "generator": lambda found: next(found),
        "nested": lambda found: found[0] + 0.1 * found[1][1][0].mean(1, keepdim=True) * found[2]["rows"],
        "dict": lambda found: found["scores"] * (1 + 0.01 * found["loss"]) * found["rows"] / 8,
    }
    results = {}
    for kind, read in reads.items():
        model = Kinds(kind)
        results[kind] = _fit(model, lambda x, model=model, read=read: read(model(x)))
    return results


def called_by_keyword() -> dict[str, Any]:
    """Inputs by keyword, optional ones, numbers and lists of tensors of other lengths besides."""

    class Many(_Net):
        def forward(self, *, inputs: Tensor, scale: float = 1.0, extra: list[Tensor] | None = None) -> Tensor:
            hidden = self.one(inputs).tanh() * scale
            for one in extra or []:
                hidden = hidden + one.mean()
            return self.two(hidden)

    model = Many()
    first = _fit(model, lambda x: model(inputs=x))
    second = _fit(model, lambda x: model(inputs=x, scale=random.random(), extra=[torch.ones(3), x, torch.randn(8, 2)]))
    return first | second


def same_module_many_times() -> dict[str, Any]:
    """One module called on views, halves, a repeated batch and its own output before one backward."""
    model = nn.Linear(6, 6)
    head = nn.Linear(6, 3)
    both = nn.ModuleList([model, head])

    def call(x: Tensor) -> Tensor:
        halves = torch.cat([model(part) for part in x.tensor_split(2)])
        again = model(model(x)).tanh() + model(x.repeat(2, 1))[: len(x)] + halves
        return head(again + model(x.T.contiguous()[:6, :6]).mean() if x.shape[0] >= 6 else again)

    return _fit(both, call)


def two_models_with_one_body() -> dict[str, Any]:
    """A body in two models that train in turns, frozen in some steps; a deep copy in between."""
    body = nn.Linear(6, 8)
    one, other = nn.Sequential(body, nn.Tanh(), nn.Linear(8, 3)), nn.Sequential(body, nn.ReLU(), nn.Linear(8, 3))
    _, _, loader = _data()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (one, other)]
    for step, (inputs, labels) in enumerate(loader):
        model, optimizer = ((one, optimizers[0]), (other, optimizers[1]))[step % 2]
        if step == 3:
            other[2] = copy.deepcopy(one[2])
        body.requires_grad_(step % 3 != 2)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        print(f"{loss.item():.10f}", body.weight.grad is not None)
    return {"one": one.state_dict(), "other": other.state_dict()}


def errors_that_are_caught() -> dict[str, Any]:
    """A batch that the model refuses, caught and skipped; a loss that is no number, skipped; a KeyboardInterrupt."""

    class Strict(_Net):
        def forward(self, x: Tensor) -> Tensor:
            if x.abs().max() > 2.5:
                raise ValueError("too large")
            return self.two(self.one(x).tanh())

    model, skipped = Strict(), []
    _, _, loader = _data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        for step, (inputs, labels) in enumerate([*loader, *loader]):
            optimizer.zero_grad()
            try:
                loss = F.cross_entropy(model(inputs), labels)
            except ValueError as error:
                skipped.append((step, str(error)))
                continue
            if step % 5 == 4:
                loss = loss / 0.0 * 0.0
            if not torch.isfinite(loss):
                skipped.append((step, "no number"))
                continue
            loss.backward()
            optimizer.step()
            if step == 10:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        print("interrupted")
    print(skipped)
    return {"weights": model.state_dict(), "skipped": skipped}


def subclasses_of_tensors() -> dict[str, Any]:
    """Batches as a subclass of Tensor that carries a name, outputs that keep the subclass."""

    class Named(Tensor):
        name = "nobody"

    _, _, loader = _data()
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, labels in loader:
        optimizer.zero_grad()
        scores = model(inputs.as_subclass(Named))
        loss = F.cross_entropy(scores, labels)
        loss.backward()
        optimizer.step()
        print(type(scores).__name__, type(loss).__name__, f"{loss.item():.10f}")
    return {"weights": model.state_dict()}


def gradients_by_hand() -> dict[str, Any]:
    """Gradients set, scaled and exchanged between models by hand; a backward from the middle of a graph."""
    _, _, loader = _data()
    bottom, top = nn.Linear(6, 16), nn.Linear(16, 3)
    other = copy.deepcopy(top)
    optimizer = torch.optim.SGD([*bottom.parameters(), *top.parameters(), *other.parameters()], lr=0.1)
    for inputs, labels in loader:
        optimizer.zero_grad()
        hidden = bottom(inputs).tanh()
        cut = hidden.detach().requires_grad_()
        loss = F.cross_entropy(top(cut), labels)
        loss.backward()
        hidden.backward(0.5 * cut.grad)
        for mine, theirs in zip(other.parameters(), top.parameters(), strict=True):
            mine.grad = theirs.grad.clone() * 0.5
        optimizer.step()
        print(f"{loss.item():.10f} {cut.grad.norm().item():.10f}")
    return {"weights": [one.state_dict() for one in (bottom, top, other)]}


@dataclasses.dataclass
class _Settings:
    weight: float = 0.1


def mixes_past_a_threshold() -> dict[str, Any]:
    """Forwards that begin to mix rows once a number has passed a threshold, wherever that number is kept."""
    settings, levels, epochs = _Settings(), np.full(2, 0.1), {"now": 1.0}
    optimizers: list[torch.optim.Optimizer] = []

    def variable() -> float:
        return float(os.environ.get("LAGOM_TEST_WEIGHT", "0.1"))

    places = {
        "variable": variable,
        "array": lambda: float(levels[1]),
        "field": lambda: settings.weight,
        "closure": lambda: epochs["now"] - 1.5,
        "rate": lambda: 1 - 2 * optimizers[-1].param_groups[0]["lr"],
    }
    found = {}
    for name, weight in places.items():

        class Mixing(_Net):
            def forward(self, x: Tensor) -> Tensor:
                found = self.one(x).tanh()
                return self.two(found - found.mean(0) if weight() > 0.5 else found)  # noqa: B023

        model = Mixing()
        x, y, loader = _data(19)
        optimizers.append(torch.optim.SGD(model.parameters(), lr=0.4))
        for epoch in range(3):
            if epoch == 2:
                os.environ["LAGOM_TEST_WEIGHT"] = "0.9"
                levels[1] = settings.weight = 0.9
                epochs["now"] = 3.0
                optimizers[-1].param_groups[0]["lr"] = 0.1
            for inputs, labels in loader:
                optimizers[-1].zero_grad()
                loss = F.cross_entropy(model(inputs), labels)
                loss.backward()
                optimizers[-1].step()
            with torch.no_grad():
                print(f"{name} {epoch} {loss.item():.10f} {F.cross_entropy(model(x), y).item():.10f}")
        del os.environ["LAGOM_TEST_WEIGHT"]
        levels[1] = settings.weight = 0.1
        epochs["now"] = 1.0
        found[name] = model.state_dict()
    return found
