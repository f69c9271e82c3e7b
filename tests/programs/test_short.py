"""Short programs, several in a file of ``short``: one plain process against ranks, in all that can be seen.

All programs of a file run one after another on the same ranks.
"""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import pytest
import torch

from tests.programs import judge

TOLERANCE = 1e-10
"""Tolerance for weights and returned numbers, relative to the larger of 1 and the number."""
SAID = {
    "architectures.attention_over_a_graph": "fails on a part of its batch",
    "architectures.early_exits": "takes decisions by the numbers of its input",
    "architectures.fixed_point": "takes decisions by the numbers of its input",
    "architectures.graphs_in_batches": "fails on a part of its batch",
    "architectures.routed_experts": "takes decisions by the numbers of its input",
    "backwards.clamped_by_a_function": "has a backward of its own that is not by rows",
    "backwards.clamped_by_a_hook": "sets a hook on a gradient",
    "backwards.normalised_by_a_hook": "sets a hook on a gradient",
    "backwards.packed_in_few_bits": "packs what autograd saves",
    "backwards.penalised_in_a_function": "has a backward of its own that is not by rows",
    "backwards.penalised_per_element": "has a backward of its own that is not by rows",
    "backwards.rounded_gradients": "has a backward of its own that is not by rows",
    "backwards.scaled_by_the_batch": "has a backward of its own that is not by rows",
    "backwards.seen_by_a_node": "sets a hook on a gradient",
    "generative.annealed_variational": "takes decisions by the numbers of its input",
    "generative.boltzmann_machine": "draws numbers that depend on its input",
    "generative.masked_patches": "does not compute the rows of its batch one by one",
    "generative.memory_bank": "changes numbers among its attributes",
    "loading.buckets_by_length": "takes decisions by the numbers of its input",
    "loading.hidden_state_over_batches": "gives an output of shape (1, 6, 8)",
    "records.features_and_neighbours": "has hooks, which would see a part of the batch",
    "records.logs_in_its_forward": "writes to a file or a log",
    "schedules.changed_gradients": "has hooks on gradients",
    "torch_features.adapters": "has hooks, which would see a part of the batch",
    "torch_features.attention_weights": "fails on a part of its batch",
    "torch_features.expanded_output": "gives tensors that share memory",
    "torch_features.output_that_is_the_input": "gives tensors that share memory",
    "torch_features.range_followed": "does not compute the rows of its batch one by one",
    "torch_features.scripted": "it is TorchScript, into which lagom does not look",
    "torch_features.sparse_embeddings": "fails on a part of its batch",
    "torch_features.traced": "it is TorchScript, into which lagom does not look",
    "unusual.cached_results": "keeps a tensor of its forward beside its output",
    "unusual.called_by_keyword": "does not compute the rows of its batch one by one",
    "unusual.depends_on_the_size_of_the_batch": "does not compute the rows of its batch one by one",
    "unusual.errors_that_are_caught": "takes decisions by the numbers of its input",
    "unusual.forward_called_directly": "does not compute the rows of its batch one by one",
    "unusual.global_switches": "changes numbers among its attributes, or what it can see",
    "unusual.mixes_past_a_threshold": "does not compute the rows of its batch one by one",
    "unusual.patched_in_mid_training": "does not compute the rows of its batch one by one",
    "unusual.results_of_other_kinds": "gives a _Found, of which it is unknown what is in it",
    "unusual.skipped_at_random": "draws from Python's or numpy's generator",
}
"""The line for each program of which some module runs whole on every rank; there is none for the others."""
NOTHING_SLICED = (
    *(
        "backwards.packed_in_few_bits",
        "generative.boltzmann_machine",
        "torch_features.functional",
        "torch_features.saved_tensors_packed",
    ),
    *("torch_features.scripted", "torch_features.vectorised_ensemble", "unusual.errors_that_are_caught"),
)
"""Programs without any sliced forward; in those of the table above that are not here, modules inside are sliced."""
Program = Callable[[], Any]


def _programs() -> dict[str, dict[str, Program]]:
    found: dict[str, dict[str, Program]] = {}
    for path in sorted((judge.HERE / "short").glob("*.py")):
        module = importlib.import_module(f"tests.programs.short.{path.stem}")
        found[path.stem] = {
            name: partial(in_float64, value)
            for name, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
        }
    return found


def in_float64(program: Program) -> Any:
    """Run a program with numbers of 64 bits, so that sums in another order do not matter."""
    torch.set_default_dtype(torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return program()


PROGRAMS = _programs()
"""Every public function of each file, imported before any test begins."""
ON_THREE_RANKS = ("loading",)
"""Files whose loaders are of many kinds: their ranks have uneven blocks of each batch."""
WAYS = {"3-sliced": (3, True), "2": (2, False), "2-sliced": (2, True), "3": (3, False), "1": (1, True)}
"""World sizes, and whether forwards are sliced also where that does not pay."""


def _ways(file: str) -> Iterator[Any]:
    """Yield the parameters of the programs of ``file``, which run in one way by default.

    Slices on three ranks are uneven in every batch and their sums are added in another order, and on two in the last
    one. Where forwards run whole on every rank, as those of small models do, less differs from one process.
    """
    usual = "3-sliced" if file in ON_THREE_RANKS else "2-sliced"
    for name in PROGRAMS[file]:
        for way, (world_size, always_slices) in WAYS.items():
            marks = () if way == usual and file != "compiled" else pytest.mark.soak
            yield pytest.param(file, name, world_size, always_slices, id=f"{file}-{name}-{way}", marks=marks)


@cache
def plain_runs(file: str) -> dict[str, judge.Run]:
    return judge.one_after_another(PROGRAMS[file], 1, patches=False)


@cache
def runs(file: str, world_size: int, always_slices: bool) -> dict[str, judge.Run]:
    return judge.one_after_another(PROGRAMS[file], world_size, batches="whole", always_slices=always_slices)


@pytest.mark.parametrize(
    ("file", "name", "world_size", "always_slices"), [way for file in PROGRAMS for way in _ways(file)]
)
def test_ranks_give_what_one_process_gives(file: str, name: str, world_size: int, always_slices: bool) -> None:
    plain, run = plain_runs(file)[name], runs(file, world_size, always_slices)[name]
    for rank in run.ranks:
        assert judge.differences(rank.value, plain.ranks[0].value, tolerance=TOLERANCE) == []
        assert judge.text_differences(rank.text, plain.ranks[0].text) == []
        assert rank.passes == plain.ranks[0].passes
        assert rank.left == []
    assert judge.file_differences(run.files, plain.files) == []
    if always_slices and world_size > 1:
        said = "\n".join(line for line in run.ranks[0].said.splitlines() if "runs whole on every rank" in line)
        line = SAID.get(f"{file}.{name}")
        assert line in said if line else said == ""
        assert (run.ranks[0].num_gathered == 0) == (f"{file}.{name}" in NOTHING_SLICED)
