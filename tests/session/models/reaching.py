"""Forwards with state besides parameters and buffers (generators, counters, lists), or that leave torch for numbers."""

from __future__ import annotations

import collections
import itertools
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.session.models.training import Around, around, model, trained_on_pairs

CALLS = {"number": 0}
RNG = np.random.default_rng(0)
TORCH_RNG = torch.Generator()
PYTHON_RNG = random.Random(0)
NUM_CALLS = 0


@model
def generator_of_torchs_as_an_attribute() -> Any:
    def forward(self: Any, x: Tensor) -> Any:
        return self.body(x + 0.1 * torch.randn(x.shape, generator=self.rng, dtype=x.dtype))

    return trained_on_pairs(around(forward, rng=torch.Generator().manual_seed(5)))


@model
def generator_of_torchs_among_the_globals() -> Any:
    TORCH_RNG.manual_seed(7)

    def forward(self: Any, x: Tensor) -> Any:
        return self.body(x) + 0.1 * torch.rand(1, generator=TORCH_RNG, dtype=x.dtype)

    return trained_on_pairs(around(forward))


@model
def generator_of_numpys_as_an_attribute() -> Any:
    def forward(self: Any, x: Tensor) -> Any:
        return self.body(x) * float(self.rng.random())

    return trained_on_pairs(around(forward, rng=np.random.default_rng(3)))


@model
def generator_of_numpys_among_the_globals() -> Any:
    RNG.bit_generator.state = np.random.default_rng(4).bit_generator.state

    def forward(self: Any, x: Tensor) -> Any:
        return self.body(x + torch.from_numpy(RNG.normal(size=tuple(x.shape))) * 0.1)

    return trained_on_pairs(around(forward))


@model
def generator_of_pythons_in_a_closure() -> Any:
    rng = random.Random(5)

    def forward(self: Any, x: Tensor) -> Any:
        return self.body(x) * rng.uniform(0.5, 1.5)

    return trained_on_pairs(around(forward))


@model
def common_generators_of_numpy_and_python() -> Any:
    random.seed(0)
    np.random.seed(0)

    def forward(self: Any, x: Tensor) -> Any:
        if random.random() < 0.3:
            x = x * 0.5
        return self.body(x + 0.1 * torch.from_numpy(np.random.randn(*x.shape)))

    return trained_on_pairs(around(forward))


@model
def iterator_as_an_attribute() -> Any:
    def forward(self: Any, x: Tensor) -> Any:
        return self.body(x) * next(self.scales)

    return trained_on_pairs(around(forward, scales=itertools.cycle([0.5, 1.0, 1.5])))


@model
def counter_among_the_globals() -> Any:
    global NUM_CALLS
    NUM_CALLS = 0

    def forward(self: Any, x: Tensor) -> Any:
        global NUM_CALLS
        NUM_CALLS += 1
        return self.body(x)

    return [*trained_on_pairs(around(forward)), NUM_CALLS]


@model
def counter_in_a_dict_of_the_globals() -> Any:
    CALLS["number"] = 0

    def forward(self: Any, x: Tensor) -> Any:
        CALLS["number"] += 1
        return self.body(x) / CALLS["number"]

    return [*trained_on_pairs(around(forward)), CALLS["number"]]


@model
def counter_in_an_object() -> Any:
    class Clock:
        def __init__(self) -> None:
            self.ticks = 0

        def tick(self) -> int:
            self.ticks += 1
            return self.ticks

    def forward(self: Any, x: Tensor) -> Any:
        return self.body(x) / self.clock.tick()

    net = around(forward, clock=Clock())
    return [*trained_on_pairs(net), net.clock.ticks]


@model
def counter_in_a_closure() -> Any:
    calls = [0]

    def forward(self: Any, x: Tensor) -> Any:
        calls[0] += 1
        return self.body(x) / calls[0]

    return [*trained_on_pairs(around(forward)), calls[0]]


@model
def counter_in_an_array() -> Any:
    def forward(self: Any, x: Tensor) -> Any:
        self.counts[1] += 1
        return self.body(x) / self.counts[1]

    net = around(forward, counts=np.zeros(3))
    return [*trained_on_pairs(net), list(net.counts)]


@model
def counter_in_a_tensor_that_is_no_buffer() -> Any:
    def forward(self: Any, x: Tensor) -> Any:
        self.count += 1
        return self.body(x) / self.count.item()

    net = around(forward, count=torch.zeros(()))
    return [*trained_on_pairs(net), net.count]


@model
def counter_of_the_class() -> Any:
    class Counting(Around):
        calls = 0

        def forward(self, x: Tensor) -> Any:
            type(self).calls += 1
            return self.body(x) / type(self).calls

    return [*trained_on_pairs(Counting()), Counting.calls]


@model
def shapes_kept_in_a_deque() -> Any:
    def forward(self: Any, x: Tensor) -> Any:
        self.shapes.append(x.shape[0])
        return self.body(x)

    net = around(forward, shapes=collections.deque(maxlen=50))
    return [*trained_on_pairs(net), list(net.shapes)]


@model
def shapes_kept_in_a_list_of_the_globals() -> Any:
    shapes: list[int] = []

    def note(x: Tensor) -> Tensor:
        shapes.append(len(x))
        return x

    def forward(self: Any, x: Tensor) -> Any:
        return self.body(note(x))

    return [*trained_on_pairs(around(forward)), shapes]


@model
def decision_by_numpy() -> Any:
    def forward(self: Any, x: Tensor) -> Any:
        return self.body(x * 2 if x.detach().numpy().max() > 1.9 else x)

    return trained_on_pairs(around(forward))


@model
def decision_by_a_list() -> Any:
    def forward(self: Any, x: Tensor) -> Any:
        return self.body(x * 2 if max(x[:, 0].tolist()) > 1.5 else x)

    return trained_on_pairs(around(forward))


@model
def decision_by_an_array_of_labels() -> Any:
    def forward(self: Any, x: Tensor) -> Any:
        signs = np.asarray((x[:, 0] > 0).int())
        return self.body(x) * (1.5 if signs.sum() > 4 else 1.0)

    return trained_on_pairs(around(forward))


class Lazy(dict[str, Any]):
    """Makes what it is asked for, which takes long."""

    def __getitem__(self, key: str) -> Any:
        raise AssertionError("asked for an item")

    get = values = items = keys = __iter__ = __getitem__  # type: ignore[assignment]


class Unloaded:
    """Stands for something that is loaded when it is used."""

    __class__ = property(lambda self: 1 / 0)

    def __getattr__(self, name: str) -> Any:
        raise AssertionError("asked for an attribute")


@model
def attributes_that_must_not_be_asked() -> Any:
    class Holding(Around):
        def __init__(self) -> None:
            super().__init__()
            self.__dict__.update(lazy=Lazy(a=1), unloaded=Unloaded(), listed=[Lazy(b=2), Unloaded()])

        def forward(self, x: Tensor) -> Any:
            return self.body(x)

    return trained_on_pairs(Holding())
