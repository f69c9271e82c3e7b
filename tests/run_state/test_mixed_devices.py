"""``lagom.run_state.mixed_devices``: with the device "meta" in the place of a GPU; tests/gpu has the rest."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lagom.run_state.cuda_device import move_to_device
from lagom.run_state.mixed_devices import meet_on

META = torch.device("meta")


@pytest.fixture
def there() -> Iterator[Tensor]:
    """A tensor that has been moved."""
    with meet_on(META):
        yield torch.ones(4, 3, device=META)


MEETINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "operators": lambda x: x * torch.ones(3),
    "the other way round": lambda x: torch.ones(4, 3) @ x.T,
    "numbers without a dimension": lambda x: torch.stack([torch.tensor(1.0), x.sum()]),
    "a loss with weights": lambda x: F.cross_entropy(x, torch.zeros(4).long(), weight=torch.ones(3)),
    "a list": lambda x: torch.cat([torch.zeros(2, 3), x]),
    "a condition": lambda x: torch.where(torch.ones(4, 1) > 0, x, 0.0),
    "an index": lambda x: x[torch.tensor([0, 1])],
    "an index among others": lambda x: x[:, torch.tensor([0, 1])],
    "a layer on the CPU": lambda x: nn.Linear(3, 2)(x),
    "rows for a layer that was moved": lambda x: nn.Linear(3, 2, device=META)(torch.ones(5, 3)),
    "a hidden state": lambda x: nn.LSTM(3, 2, device=META)(x, (torch.zeros(1, 2), torch.zeros(1, 2)))[0],
    "in place": lambda x: x.add_(torch.ones(3)),
    "assignment": lambda x: _assigned(x, torch.ones(3)),
    "a distribution": lambda x: torch.distributions.Normal(torch.zeros(3), x, validate_args=False).mean,
    "out": lambda x: torch.add(torch.ones(3), 1, out=torch.empty(3, device=META)),
}


def _assigned(x: Tensor, row: Tensor) -> Tensor:
    x[0] = row
    return x


@pytest.mark.parametrize("meeting", MEETINGS.values(), ids=MEETINGS)
def test_tensors_meet_there(meeting: Callable[[Tensor], Tensor], there: Tensor) -> None:
    assert meeting(there).device == META


def test_what_takes_both_devices_gets_both(there: Tensor) -> None:
    here = torch.zeros(4, 3)
    assert there.copy_(here).device == META
    assert here.to(there).device == META
    assert here.type_as(there).device == META


def test_tensors_of_one_device_stay_there(there: Tensor) -> None:
    assert (torch.ones(3) + 1).device.type == "cpu"
    assert torch.tensor([1.0, 2.0]).numpy().tolist() == [1, 2]
    padded = nn.utils.rnn.pack_padded_sequence(torch.ones(2, 3, 1), torch.tensor([3, 2]), batch_first=True)
    found, _ = nn.LSTM(1, 2)(padded)
    assert nn.utils.rnn.pad_packed_sequence(found)[0].device.type == "cpu"


def test_what_is_saved_loads_on_the_cpu(there: Tensor) -> None:
    file = io.BytesIO()
    torch.save({"x": torch.ones(2)}, file)
    assert torch.serialization.location_tag(torch.ones(1).untyped_storage()) == "cpu"
    file.seek(0)
    assert torch.load(file)["x"].tolist() == [1, 1]


def test_outside_nothing_is_moved() -> None:
    with meet_on(META):
        pass
    with pytest.raises((RuntimeError, NotImplementedError)):
        F.linear(torch.ones(2, 3, device=META), torch.ones(2, 3)).tolist()


def test_containers_and_what_can_move_itself_are_moved() -> None:
    class Batch:
        device = "cpu"

        def to(self, device: torch.device) -> Batch:
            self.device = device.type
            return self

    packed = nn.utils.rnn.pack_padded_sequence(torch.ones(2, 3, 1), torch.tensor([3, 2]), batch_first=True)
    state = nn.Linear(2, 1).state_dict()
    moved: Any = move_to_device({"batch": Batch(), "packed": packed, "state": state, "name": "x"}, META)
    assert moved["batch"].device == "meta"
    assert (moved["packed"].data.device, moved["packed"].batch_sizes.device.type) == (META, "cpu")
    assert {value.device for value in moved["state"].values()} == {META}
    assert type(moved["state"]) is type(state)
    assert moved["state"]._metadata == state._metadata  # type: ignore[attr-defined]
    assert state["weight"].device.type == "cpu"
    assert moved["name"] == "x"
