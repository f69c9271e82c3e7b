"""Forwards that reach beyond their module: generators, counters and lists, and numbers out of torch."""

from __future__ import annotations

import collections
import itertools
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.session.models.odd import Around, of
from tests.session.models.training import model

CALLS = {"number": 0}
RNG = np.random.default_rng(0)
TORCH_RNG = torch.Generator()
PYTHON_RNG = random.Random(0)
NUM_CALLS = 0


@model
def generator_of_torchs_as_an_attribute() -> Any:
    class Noisy(Around):
        def __init__(self) -> None:
            super().__init__()
            self.rng = torch.Generator().manual_seed(5)

        def forward(self, x: Tensor) -> Any:
            return self.body(x + 0.1 * torch.randn(x.shape, generator=self.rng, dtype=x.dtype))

    return of(Noisy())


@model
def generator_of_torchs_among_the_globals() -> Any:
    TORCH_RNG.manual_seed(7)

    class Noisy(Around):
        def forward(self, x: Tensor) -> Any:
            return self.body(x) + 0.1 * torch.rand(1, generator=TORCH_RNG, dtype=x.dtype)

    return of(Noisy())


@model
def generator_of_numpys_as_an_attribute() -> Any:
    class Noisy(Around):
        def __init__(self) -> None:
            super().__init__()
            self.rng = np.random.default_rng(3)

        def forward(self, x: Tensor) -> Any:
            return self.body(x) * float(self.rng.random())

    return of(Noisy())


@model
def generator_of_numpys_among_the_globals() -> Any:
    RNG.bit_generator.state = np.random.default_rng(4).bit_generator.state

    class Noisy(Around):
        def forward(self, x: Tensor) -> Any:
            return self.body(x + torch.from_numpy(RNG.normal(size=tuple(x.shape))) * 0.1)

    return of(Noisy())


@model
def generator_of_pythons_in_a_closure() -> Any:
    rng = random.Random(5)

    class Noisy(Around):
        def forward(self, x: Tensor) -> Any:
            return self.body(x) * rng.uniform(0.5, 1.5)

    return of(Noisy())


@model
def common_generators_of_numpy_and_python() -> Any:
    random.seed(0)
    np.random.seed(0)

    class Noisy(Around):
        def forward(self, x: Tensor) -> Any:
            if random.random() < 0.3:
                x = x * 0.5
            return self.body(x + 0.1 * torch.from_numpy(np.random.randn(*x.shape)))

    return of(Noisy())


@model
def iterator_as_an_attribute() -> Any:
    class Scheduled(Around):
        def __init__(self) -> None:
            super().__init__()
            self.scales = itertools.cycle([0.5, 1.0, 1.5])

        def forward(self, x: Tensor) -> Any:
            return self.body(x) * next(self.scales)

    return of(Scheduled())


@model
def counter_among_the_globals() -> Any:
    global NUM_CALLS
    NUM_CALLS = 0

    class Counting(Around):
        def forward(self, x: Tensor) -> Any:
            global NUM_CALLS
            NUM_CALLS += 1
            return self.body(x)

    return [*of(Counting()), NUM_CALLS]


@model
def counter_in_a_dict_of_the_globals() -> Any:
    CALLS["number"] = 0

    class Counting(Around):
        def forward(self, x: Tensor) -> Any:
            CALLS["number"] += 1
            return self.body(x) / CALLS["number"]

    return [*of(Counting()), CALLS["number"]]


@model
def counter_in_an_object() -> Any:
    class Clock:
        def __init__(self) -> None:
            self.ticks = 0

        def tick(self) -> int:
            self.ticks += 1
            return self.ticks

    class Counting(Around):
        def __init__(self) -> None:
            super().__init__()
            self.clock = Clock()

        def forward(self, x: Tensor) -> Any:
            return self.body(x) / self.clock.tick()

    net = Counting()
    return [*of(net), net.clock.ticks]


@model
def counter_in_a_closure() -> Any:
    calls = [0]

    class Counting(Around):
        def forward(self, x: Tensor) -> Any:
            calls[0] += 1
            return self.body(x) / calls[0]

    return [*of(Counting()), calls[0]]


@model
def counter_in_an_array() -> Any:
    class Counting(Around):
        def __init__(self) -> None:
            super().__init__()
            self.counts = np.zeros(3)

        def forward(self, x: Tensor) -> Any:
            self.counts[1] += 1
            return self.body(x) / self.counts[1]

    net = Counting()
    return [*of(net), list(net.counts)]


@model
def counter_in_a_tensor_that_is_no_buffer() -> Any:
    class Counting(Around):
        def __init__(self) -> None:
            super().__init__()
            self.count = torch.zeros(())

        def forward(self, x: Tensor) -> Any:
            self.count += 1
            return self.body(x) / self.count.item()

    net = Counting()
    return [*of(net), net.count]


@model
def counter_of_the_class() -> Any:
    class Counting(Around):
        calls = 0

        def forward(self, x: Tensor) -> Any:
            type(self).calls += 1
            return self.body(x) / type(self).calls

    return [*of(Counting()), Counting.calls]


@model
def shapes_kept_in_a_deque() -> Any:
    class Noting(Around):
        def __init__(self) -> None:
            super().__init__()
            self.shapes: Any = collections.deque(maxlen=50)

        def forward(self, x: Tensor) -> Any:
            self.shapes.append(x.shape[0])
            return self.body(x)

    net = Noting()
    return [*of(net), list(net.shapes)]


@model
def shapes_kept_in_a_list_of_the_globals() -> Any:
    shapes: list[int] = []

    def note(x: Tensor) -> Tensor:
        shapes.append(len(x))
        return x

    class Noting(Around):
        def forward(self, x: Tensor) -> Any:
            return self.body(note(x))

    return [*of(Noting()), shapes]


@model
def decision_by_numpy() -> Any:
    class Deciding(Around):
        def forward(self, x: Tensor) -> Any:
            return self.body(x * 2 if x.detach().numpy().max() > 1.9 else x)

    return of(Deciding())


@model
def decision_by_a_list() -> Any:
    class Deciding(Around):
        def forward(self, x: Tensor) -> Any:
            return self.body(x * 2 if max(x[:, 0].tolist()) > 1.5 else x)

    return of(Deciding())


@model
def decision_by_an_array_of_labels() -> Any:
    class Deciding(Around):
        def forward(self, x: Tensor) -> Any:
            signs = np.asarray((x[:, 0] > 0).int())
            return self.body(x) * (1.5 if signs.sum() > 4 else 1.0)

    return of(Deciding())


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

    return of(Holding())
