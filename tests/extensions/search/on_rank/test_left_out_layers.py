"""Layers left out of models: judged by models that were changed by hand."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lagom.errors import AblationError
from lagom.extensions.search.on_rank.left_out_layers import leave_out, without_layers


class Net(nn.Module):
    """Two hidden layers of equal width, BatchNorm and dropout."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.first = nn.Linear(4, width)
        self.middle = nn.Sequential(nn.Linear(width, width), nn.ReLU(inplace=True), nn.BatchNorm1d(width))
        self.drop = nn.Dropout(0.5)
        self.last = nn.Linear(width, 1)

    def forward(self, x: Any) -> Any:
        """Return numbers of shape (B, 1)."""
        return self.last(self.drop(self.middle(self.first(x))))


class Special(Net):
    """A subclass with one more layer."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Linear(1, 1)


class Blocks(nn.Module):
    """A transformer of torch's, which reads attributes of its first layer."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3)

    def forward(self, x: Any) -> Any:
        """Return a tensor of the shape of ``x``."""
        return self.encoder(x)


def steps(model: nn.Module) -> list[Any]:
    """Train for three steps; return the losses, the weights and the state of the generator."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    x, losses = torch.randn(16, 4, generator=torch.Generator().manual_seed(3)), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return [losses, model.state_dict(), torch.get_rng_state()]


def by_hand(*names: str) -> Any:
    """Return a whole model with ``nn.Identity`` in the places of ``names``."""
    model = Net()
    for name in names:
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, nn.Identity())
    return model


def run(module: Any, *names: str, replacement: Any = None) -> Any:
    """Train a model that a program makes by ``module()``, without ``names``."""

    def train(module: Callable[[], nn.Module]) -> Any:
        return steps(module())

    torch.manual_seed(7)
    function, found = without_layers(train, module, names, replacement)
    return function(found)


@pytest.mark.parametrize("names", [("middle",), ("drop",), ("middle.0",), ("middle.2",), ("drop", "middle.1")])
@pytest.mark.parametrize("module", [Net, lambda: Net()], ids=["class", "factory"])
def test_a_layer_is_left_out_as_by_hand(module: Any, names: tuple[str, ...]) -> None:
    found = run(module, *names)
    torch.manual_seed(7)
    expected = steps(by_hand(*names))
    assert found[0] == expected[0]
    assert list(found[1]) == list(expected[1])
    assert all(torch.equal(found[1][name], value) for name, value in expected[1].items())
    assert torch.equal(found[2], expected[2])


def test_the_other_layers_begin_with_the_weights_of_the_base() -> None:
    torch.manual_seed(0)
    base = Net().state_dict()
    torch.manual_seed(0)
    model = Net()
    leave_out(model, ["middle.0"], None)
    own = model.state_dict()
    assert set(base) - set(own) == {"middle.0.weight", "middle.0.bias"}
    assert all(torch.equal(value, base[name]) for name, value in own.items())


def test_a_class_stays_the_class_and_is_restored() -> None:
    def train(module: Any) -> Any:
        model, other = module(width=5), Special()
        clone = pickle.loads(pickle.dumps(copy.deepcopy(model)))
        return type(model) is module is Net, model.first.out_features, len(list(clone.parameters())), len(other.middle)

    construct = Net.__init__
    function, module = without_layers(train, Net, ["middle"], None)
    assert function(module) == (True, 5, 4, 3)
    assert Net.__init__ is construct
    assert len(Net().middle) == 3


def test_a_replacement_stands_in_the_place_and_draws_no_numbers_of_the_programs() -> None:
    def thinner(layer: nn.Module) -> nn.Module:
        assert isinstance(layer, nn.Sequential)
        return nn.Linear(6, 6)

    def train(module: Any) -> Any:
        return [list(module().state_dict()), torch.rand(3)]

    torch.manual_seed(0)
    names, drawn = without_layers(train, Net, ["middle"], thinner)[0](Net)
    assert names == ["first.weight", "first.bias", "middle.weight", "middle.bias", "last.weight", "last.bias"]
    torch.manual_seed(0)
    Net()
    assert torch.equal(drawn, torch.rand(3))


def test_a_layer_of_other_shapes_is_named_with_its_shapes_and_the_way_out() -> None:
    with pytest.raises(AblationError, match=r"first \(Linear\) cannot be left out.*\(16, 6\).*\(16, 4\).*replacement="):
        run(Net, "first")


def test_the_input_of_a_layer_that_writes_into_it_is_kept() -> None:
    model = Net()
    leave_out(model, ["middle.1"], None)
    x = torch.randn(8, 6)
    before = x.clone()
    assert model.middle[1](x) is x
    assert torch.equal(x, before)


def test_layers_of_a_transformer_are_left_out_with_the_first_among_them() -> None:
    torch.manual_seed(0)
    model = Blocks().eval()
    leave_out(model, ["encoder.layers.0", "encoder.layers.2"], None)
    torch.manual_seed(0)
    whole = Blocks().eval()
    x = torch.randn(2, 5, 8)
    assert torch.equal(model(x), whole.encoder.layers[1](x))
    assert model.encoder.layers[0].linear1.in_features == 8
    assert {name.split(".")[2] for name in model.state_dict()} == {"1"}


def test_a_layer_that_is_left_out_has_its_attributes_and_no_weights() -> None:
    model = Blocks()
    leave_out(model, ["encoder.layers.0"], None)
    layer = model.encoder.layers[0]
    assert layer.linear1.in_features == 8
    assert layer.self_attn.batch_first is True
    assert not hasattr(layer.linear1, "weight")
    with pytest.raises(AttributeError, match=r"linear1 is left out of this trial, and so is its weight"):
        nn.functional.linear(torch.ones(2, 8), layer.linear1.weight)


@pytest.mark.parametrize("names", [["blocks.1"], ["blocks.0", "blocks.2"], ["blocks.1.0"]])
def test_a_block_in_several_places_is_left_out_in_one(names: list[str]) -> None:
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            block = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
            self.blocks = nn.ModuleList([block] * 3)

        def forward(self, x: Any) -> Any:
            for block in self.blocks:
                x = block(x)
            return x

    torch.manual_seed(0)
    model, expected = Stack(), Stack()
    expected.load_state_dict(model.state_dict())
    leave_out(model, names, None)
    for name in names:
        parent, _, last = name.rpartition(".")
        setattr(expected.get_submodule(parent), last, nn.Identity())
    x = torch.randn(8, 4)
    for _ in range(2):
        assert torch.equal(model(x), expected(x))
    assert [value.tolist() for value in model.state_dict().values()] == [
        value.tolist() for value in expected.state_dict().values()
    ]


def test_a_list_of_layers_is_left_empty() -> None:
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
            self.heads = nn.ModuleDict({"a": nn.Linear(2, 2)})

        def forward(self, x: Any) -> Any:
            for layer in (*self.layers, *self.heads.values()):
                x = layer(x)
            return x

    model = Stack()
    leave_out(model, ["layers", "heads"], None)
    assert list(model.state_dict()) == []
    x = torch.ones(1, 2)
    assert model(x) is x


@pytest.mark.parametrize("module", [Net, lambda: Net()], ids=["class", "factory"])
def test_a_function_that_makes_no_model_of_the_module_is_told(module: Any) -> None:
    function, found = without_layers(lambda module: Special(), module, ["drop"], None)
    with pytest.raises(AblationError, match="drop cannot be left out: the function has not made a model"):
        function(found)


def test_a_layer_follows_the_model_to_another_type() -> None:
    model = Net().double()
    leave_out(model, ["middle"], None)
    found = model.to(torch.bfloat16)(torch.ones(4, 4, dtype=torch.bfloat16))
    assert found.dtype == torch.bfloat16


def test_an_unknown_layer_is_named_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"Net has no layer 'midle'; did you mean 'middle'\?"):
        run(Net, "midle")


def test_layers_of_several_modules_are_named_by_their_place() -> None:
    def train(module: Any) -> Any:
        return [len(list(make().parameters())) for make in module]

    function, module = without_layers(train, [Net, lambda: Net(3)], ["1.middle", "0.drop"], None)
    assert function(module) == [8, 4]
    with pytest.raises(ValueError, match=r"'0\.NAME'"):
        without_layers(train, [Net], ["middle"], None)


def test_a_replacement_that_is_no_module_is_an_error() -> None:
    with pytest.raises(ValueError, match="the replacement for drop is a int; want a torch"):
        run(Net, "drop", replacement=lambda layer: 3)
