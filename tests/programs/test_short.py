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
    "loading.hidden_state_over_batches": "Language runs whole on every rank",  # the reason depends on ranks
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
    "unusual.called_by_keyword": "computes its rows from a loss, sum or mean of the batch",
    "unusual.depends_on_the_size_of_the_batch": "does not compute the rows of its batch one by one",
    "unusual.errors_that_are_caught": "takes decisions by the numbers of its input",
    "unusual.forward_called_directly": "does not compute the rows of its batch one by one",
    "unusual.global_switches": "changes numbers among its attributes, or what it can see",
    "unusual.mixes_past_a_threshold": "does not compute the rows of its batch one by one",
    "unusual.patched_in_mid_training": "does not compute the rows of its batch one by one",
    "unusual.results_of_other_kinds": "gives a generator, of which it is unknown what is in it",
    "unusual.skipped_at_random": "draws from Python's or numpy's generator",
}
"""For each program with a module that runs whole on every rank, the reason in the line that lagom shows.

For other programs there is no such line.
"""
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
AS_OTHERS = {
    "architectures": (
        *("attention_over_a_graph", "bandits_and_actors", "early_exits", "ensemble", "hopfield", "hypernetwork"),
        *("inducing_points", "laplacian", "prototypes", "q_learning", "routed_experts", "translation"),
        *("gaussian_process", "learned_to_learn", "physics_informed", "point_clouds"),
    ),
    "backwards": ("normalised_by_a_hook", "penalised_in_a_function", "rounded_gradients"),
    "generative": (
        *("annealed_variational", "bootstrapped", "conditional_gan", "diffusion", "language_sampled"),
        *("energy_based", "simple_contrast", "tied_autoencoder", "vector_quantised"),
    ),
    "loading": (
        *("balanced_batches", "collate_with_masks", "cut_and_mixed", "hard_examples_again", "in_one_pass"),
        *("negative_samples", "shards_in_files", "splits_and_folds", "weighted_sampler", "windows"),
    ),
    "losses": (
        *("center_loss", "class_balanced", "correlation", "counts_and_variances", "distances_of_distributions"),
        *("evidential", "hinges", "margin_ranking", "mixture_density", "quantiles", "ranking", "smoothed"),
        *("soft_targets", "triplet", "tversky_per_sample"),
        *("arc_face", "cosine_embedding", "ctc", "focal", "sinkhorn", "survival", "top_k_hardest", "triplet_of_torch"),
    ),
    "records": (
        *("dropout_in_evaluation", "history_as_a_frame", "logged", "metrics_of_all_batches", "watched_weights"),
        "words_in_contexts",
    ),
    "schedules": (
        *("many_optimizers", "range_test", "restored_best", "schedules_of_torch", "sharpness_and_surrogates"),
        *("snapshots", "whole_newton"),
    ),
    "torch_features": (
        *("adapters", "attention_weights", "channels_last", "expanded_output", "fake_quantised", "low_rank"),
        *("per_sample", "range_followed", "recomputed", "several_gradients_at_once", "sparse_embeddings", "traced"),
        *("copied", "jacobian_of_model", "saved_tensors_packed", "vectorised_ensemble"),
    ),
    "unusual": ("depends_on_the_size_of_the_batch", "gradients_by_hand"),
}
"""Programs that test nothing which another program does not test by default; they run only with ``-m soak``.

The other program is in the same file or in tests/programs/test_programs.py. A loss of gathered outputs counts as tested
by any other such loss, and a reason to run whole by another program with that reason.
"""
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
            is_default = way == usual and file != "compiled" and not _is_as_another(file, name)
            marks = () if is_default else pytest.mark.soak
            yield pytest.param(file, name, world_size, always_slices, id=f"{file}-{name}-{way}", marks=marks)


def _is_as_another(file: str, name: str) -> bool:
    return name in AS_OTHERS.get(file, ())


def _alike(file: str, as_others: bool) -> dict[str, Program]:
    """Return the programs of ``file`` that run by default, or the others: each half has ranks of its own."""
    return {name: one for name, one in PROGRAMS[file].items() if _is_as_another(file, name) == as_others}


@cache
def plain_runs(file: str, as_others: bool) -> dict[str, judge.Run]:
    return judge.one_after_another(_alike(file, as_others), 1, patches=False)


@cache
def runs(file: str, as_others: bool, world_size: int, always_slices: bool) -> dict[str, judge.Run]:
    programs = _alike(file, as_others)
    return judge.one_after_another(programs, world_size, batches="whole", always_slices=always_slices)


def test_programs_that_are_as_others_exist() -> None:
    assert [(file, name) for file, names in AS_OTHERS.items() for name in names if name not in PROGRAMS[file]] == []


@pytest.mark.parametrize(
    ("file", "name", "world_size", "always_slices"), [way for file in PROGRAMS for way in _ways(file)]
)
def test_ranks_give_what_one_process_gives(file: str, name: str, world_size: int, always_slices: bool) -> None:
    as_others = _is_as_another(file, name)
    plain, run = plain_runs(file, as_others)[name], runs(file, as_others, world_size, always_slices)[name]
    for rank in run.ranks:
        assert judge.differences(rank.value, plain.ranks[0].value, tolerance=TOLERANCE) == []
        assert judge.text_differences(rank.text, plain.ranks[0].text) == []
        assert rank.passes == plain.ranks[0].passes
        assert rank.left == []
    assert judge.file_differences(run.files, plain.files) == []
    if always_slices and world_size > 1:
        said = "\n".join(line for line in run.ranks[0].said.splitlines() if "runs whole on every rank" in line)
        line = SAID.get(f"{file}.{name}")
        assert line in said if line else said == "", said
        assert (run.ranks[0].num_gathered == 0) == (f"{file}.{name}" in NOTHING_SLICED)
