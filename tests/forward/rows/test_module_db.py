"""torch's own modules, called as its tests do, on ranks that split each forward by rows: the numbers of one process.

The inputs are those of ``module_db``, with which PyTorch tests its modules. One launch carries all modules.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from lagom.run_state.random_streams import seed_everything
from lagom.session.session import Session
from tests.ranks import alone, run_ranks

SAMPLE = (
    *("nn.BatchNorm1d", "nn.Bilinear", "nn.Conv2d", "nn.CrossEntropyLoss", "nn.Embedding", "nn.FractionalMaxPool2d"),
    *("nn.GroupNorm", "nn.LazyConv1d", "nn.Linear", "nn.LSTM", "nn.MultiheadAttention", "nn.TransformerEncoderLayer"),
)
NUM_OF_SAMPLE = 2
"""Inputs of each module of the sample, in training and in evaluation."""
TOLERANCE = 1e-10


NUM_LAUNCHES = 16
"""Launches among which all cases are dealt: ranks of a test end after two minutes."""


def module_inputs(names: tuple[str, ...] | int, most: int | None) -> Iterator[tuple[str, Any, Any]]:
    """Return each input of ``module_db`` as the name of its case, its module (a class) and the arguments.

    Args:
        names: names of the modules, or the number of a launch, for its part of the inputs of all modules.
        most: most inputs of each module, in training and in evaluation.
    """
    if isinstance(names, int):
        # By inputs, not by modules: one module (LinearCrossEntropyLoss) has half of all inputs.
        return itertools.islice(_inputs(None, most), names, None, NUM_LAUNCHES)
    return _inputs(names, most)


def _inputs(names: tuple[str, ...] | None, most: int | None) -> Iterator[tuple[str, Any, Any]]:
    from torch.testing._internal.common_modules import module_db

    for info in module_db:
        if names is not None and info.name not in names:
            continue
        for training in (True, False):
            given = {"device": "cpu", "dtype": torch.float64, "requires_grad": True, "training": training}
            for index, arguments in enumerate(itertools.islice(info.module_inputs_func(info, **given), most)):
                yield f"{info.name} {'training' if training else 'evaluation'} {index}", info.module_cls, arguments


class Scaled(nn.Module):
    """A module without parameters, and a factor to train: alone it would be a loss or an activation to lagom."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.factor = inner, nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return tree_map_only(Tensor, self._scale, self.inner(*args, **kwargs))

    def _scale(self, output: Tensor) -> Tensor:
        return output * self.factor if output.is_floating_point() else output


def run_case(module_class: type[nn.Module], arguments: Any, training: bool) -> list[Any]:
    """Call a module twice, train it in between, and return outputs, gradients and state; the text of an error."""
    construct, forward = arguments.constructor_input, arguments.forward_input
    # Some inputs are computed from others, by a graph that only one backward can use.
    its_args, its_kwargs = tree_map_only(Tensor, _as_leaf, (forward.args, forward.kwargs))
    module = module_class(*construct.args, **construct.kwargs).to(torch.float64)
    module = (module if next(module.parameters(), None) is not None else Scaled(module)).train(training)
    found: list[Any] = []
    for _ in range(3):
        try:
            outputs = module(*its_args, **its_kwargs)
        except Exception as error:
            return [*found, type(error).__name__]
        outputs = [one for one in tree_leaves(outputs) if isinstance(one, Tensor)]
        found += [one.detach().clone() for one in outputs]
        roots = [one for one in outputs if one.requires_grad]
        if not roots:
            continue
        torch.stack([(one * torch.arange(one.numel()).view(one.shape).cos()).sum() for one in roots]).sum().backward()
        leaves = [one for one in tree_leaves((its_args, its_kwargs)) if isinstance(one, Tensor)]
        for leaf in (*leaves, *module.parameters()):
            found.append(None if leaf.grad is None else leaf.grad.to_dense().clone())
            leaf.grad = None
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(0.9)
    return [*found, *(value.clone() for value in module.state_dict().values())]


def _as_leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def run_all(session: Session, names: tuple[str, ...] | int, most: int | None) -> dict[str, Any]:
    """Run the cases; return for each its numbers, whether its rows were split, and why not."""
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        seed_everything(0)
        for name, module_class, arguments in module_inputs(names, most):
            session.said.clear()
            session.forwards.has_sliced = False
            given = tree_leaves((arguments.forward_input.args, arguments.forward_input.kwargs))
            numbers = run_case(module_class, arguments, " training " in name)
            reasons = [text.partition(": it ")[2] or text for text in sorted(session.said) if "runs whole" in text]
            rows = [one for one in given if isinstance(one, Tensor) and one.dim() and len(one) >= session.world_size]
            if not rows:
                reasons.append("has fewer rows than ranks")
            elif all(bool((one == one[:1]).all()) for one in rows):
                reasons.append("has rows that are all alike, which show nothing")
            found[name] = numbers, session.forwards.has_sliced, reasons
    return found


def differing(found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """Return a line for each case whose numbers are not those of one process."""
    assert found.keys() == wanted.keys()
    return [f"{name}: {text}" for name in wanted if (text := difference(found[name][0], wanted[name][0]))]


def difference(found: list[Any], wanted: list[Any]) -> str:
    if len(found) != len(wanted):
        return f"{len(found)} results, not {len(wanted)}: {found[-1]}, not {wanted[-1]}"
    try:
        for mine, other in zip(found, wanted, strict=True):
            if isinstance(mine, Tensor) and isinstance(other, Tensor):
                torch.testing.assert_close(mine, other, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)
            else:
                assert mine is other or mine == other, f"{mine}, not {other}"
    except AssertionError as error:
        return " ".join(str(error).split())[:200]
    return ""


def check(world_size: int, names: tuple[str, ...] | int, most: int | None = None) -> None:
    run = partial(run_all, names=names, most=most)
    wanted = alone(run)
    ranks = run_ranks(world_size, run, batches="whole")
    assert [differing(found, wanted) for found in ranks] == [[] for _ in ranks]
    for found in ranks:
        told = {name.partition(" ")[0] for name, (_, is_split, reasons) in found.items() if is_split or reasons}
        every = {name.partition(" ")[0] for name in found}
        assert every - told == set(), "neither split nor told why not"


def test_some_modules_of_torch_are_those_of_one_process() -> None:
    check(2, SAMPLE, NUM_OF_SAMPLE)


@pytest.mark.soak
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("launch", range(NUM_LAUNCHES))
def test_all_modules_of_torch_are_those_of_one_process(launch: int, world_size: int) -> None:
    check(world_size, launch)
