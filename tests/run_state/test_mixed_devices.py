"""``lagom.run_state.mixed_devices``: with the device "meta" in the place of a GPU; tests/gpu has the rest."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lagom.run_state.device_moves import TrainedModules, move_to_device
from lagom.run_state.mixed_devices import meet_on

META = torch.device("meta")


@pytest.fixture
def there() -> Iterator[Tensor]:
    """A tensor that has been moved."""
    with meet_on(META, list, lambda: True):
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


@contextmanager
def trained(*modules: nn.Module, may_move: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Context manager in which those of ``modules`` that get an optimizer move."""
    with TrainedModules(lambda: modules, META, may_move).moved():
        yield


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.ones(4, 3)), batch_size=2)


def test_modules_that_are_trained_move_before_the_first_batch() -> None:
    inside, frozen, of_data = nn.Linear(3, 2), nn.BatchNorm1d(2, affine=False), nn.Linear(3, 2)
    model = nn.Sequential(inside, frozen)
    with trained(inside, model, of_data):
        torch.optim.SGD([*inside.parameters(), nn.Parameter(torch.ones(2))], lr=0.1)
        assert inside.weight.device.type == "cpu"
        batches = iter(loader())
        assert {value.device for value in model.state_dict().values()} == {META}
        assert of_data.weight.device.type == "cpu"
        torch.optim.SGD(of_data.parameters(), lr=0.1)
        next(batches)
        assert of_data.weight.device == META


@pytest.mark.parametrize(
    "again", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))], ids=["copy", "pickle"]
)
def test_optimizers_that_are_copied_or_unpickled_count_too(again: Callable[[Any], Any]) -> None:
    found: list[nn.Module] = []
    with TrainedModules(lambda: found, META, lambda: True).moved():
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        iter(loader())
        another, its_optimizer = again((model, optimizer))
        found.append(another)
        assert its_optimizer.param_groups[0]["params"][0] is another.weight
        iter(loader())
        assert another.weight.device == META
        assert model.weight.device.type == "cpu"


def test_modules_stay_in_processes_and_threads_without_patches() -> None:
    acts = False
    model = nn.Linear(3, 2)
    with trained(model, may_move=lambda: acts):
        torch.optim.SGD(model.parameters(), lr=0.1)
        batches = iter(loader())
        next(batches)
        assert model.weight.device.type == "cpu"
        acts = True
        with torch.inference_mode():
            next(batches)
        assert model.weight.device == META
        assert not model.weight.is_inference()


def test_the_state_that_an_optimizer_has_loaded_moves_to_its_parameters() -> None:
    # A GPU keeps a module's Parameter objects, and "meta" does not: so one parameter is there from the beginning.
    moved = nn.Parameter(torch.ones(2, device=META))
    with trained():
        first, second = (torch.optim.Adam([nn.Parameter(torch.ones(2)), moved]) for _ in range(2))
        for optimizer in (first, second):
            optimizer.state[moved] = {"step": torch.tensor(3.0), "exp_avg": torch.ones(2), "old": [torch.ones(2)]}
        next(iter(loader()))
        for optimizer in (first, second):
            state = optimizer.state[moved]
            assert state["exp_avg"].device == state["old"][0].device == META
            assert state["step"].device.type == "cpu"


def test_gradients_that_a_program_sets_or_gives_are_on_the_device_of_their_tensors(there: Tensor) -> None:
    leaf, moved = torch.zeros(3, requires_grad=True), torch.zeros(3, device=META, requires_grad=True)
    moved.grad = torch.ones(3)
    assert moved.grad.device == META
    loss = moved * 2
    loss.backward(torch.ones(3), retain_graph=True)
    loss.backward(gradient=torch.ones(3), retain_graph=True)
    torch.autograd.backward([loss, leaf * 2], [torch.ones(3), torch.ones(3)], retain_graph=True)
    (found,) = torch.autograd.grad(loss, moved, torch.ones(3), retain_graph=True)
    (again,) = torch.autograd.grad([loss], [moved], grad_outputs=[torch.ones(3)])
    assert found.device == again.device == moved.grad.device == META
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [2, 2, 2]


class Masked(torch.autograd.Function):
    """The identity, whose gradient is multiplied by a mask on the CPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        found: Tensor = gradient * torch.ones(3)
        return found


def test_hooks_and_backward_functions_mix_devices(there: Tensor) -> None:
    weight = torch.zeros(3, device=META, requires_grad=True)
    weight.register_hook(lambda gradient: gradient * torch.ones(3))
    (Masked.apply(weight) * there).sum().backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None
    assert weight.grad.device == META


def test_outside_nothing_is_moved() -> None:
    with meet_on(META, list, lambda: True):
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
