"""Ordinary programs that name no device, on test devices: the numbers, texts and files of one process on the CPU.

``python -m tests.gpu.each_program --device test`` runs all of tests/programs so, and so does ``-m soak``.
"""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from tests import ranks
from tests.accelerator.device_processes import needs_device, with_device
from tests.programs import judge, test_short

pytestmark = needs_device

PROGRAMS: dict[str, tuple[str, ...]] = {
    "architectures": (
        *("attention_over_a_graph", "ensemble", "fixed_point", "gaussian_process", "hypernetwork", "laplacian"),
        *("neural_equation", "q_learning", "routed_experts"),
    ),
    "generative": ("conditional_gan", "energy_based", "masked_patches", "normalising_flow", "vector_quantised"),
    "losses": (
        *("arc_face", "center_loss", "ctc", "dice", "focal", "mixture_density", "perceptual", "sinkhorn"),
        *("triplet_of_torch", "uncertainty_weights"),
    ),
    "schedules": (
        *("accumulated_with_clipping", "frozen_in_stages", "hooks_of_optimizers", "many_optimizers"),
        *("restored_best", "sharpness_and_surrogates", "stochastic_averages"),
    ),
}
"""Programs of tests/programs/short, by their files."""
UNSUPPORTED = {"saved_tensors_packed", "sparse_embeddings", "zero_gradients"}
"""Programs that need sparse tensors, which the device lacks, or tensors of the CPU."""


@pytest.mark.parametrize("file", PROGRAMS)
@with_device(4)
def test_programs_on_ranks_with_a_device_each_give_what_one_process_gives(file: str) -> None:
    compare(file, PROGRAMS[file])


@with_device(1)
def test_programs_on_ranks_that_share_a_device_give_what_one_process_gives() -> None:
    ranks.DEVICE = "lagomtest:0"  # in a process of its own
    compare("schedules", PROGRAMS["schedules"])


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("file", sorted(test_short.PROGRAMS.keys() - {"compiled"}))
def test_all_programs_give_what_one_process_or_one_rank_gives(file: str) -> None:
    command = [sys.executable, "-m", "tests.gpu.each_program", "--device", "test", "--together", file]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    verdicts = dict(re.findall(rf"^{file}\.(\w+): (.*)$", run.stdout, re.MULTILINE))
    assert verdicts.keys() == test_short.PROGRAMS[file].keys(), run.stderr
    # The device draws other random numbers than the CPU: those of one rank on it.
    failed = {name for name, told in verdicts.items() if not told.startswith(("equal", "as one rank"))}
    assert failed == UNSUPPORTED & verdicts.keys(), verdicts


def place() -> str:
    """Return the device to which lagom has moved a batch."""
    (batch,) = next(iter(DataLoader(TensorDataset(torch.ones(2, 1)))))
    return str(batch.device)


def compare(file: str, names: tuple[str, ...]) -> None:
    programs = {name: test_short.PROGRAMS[file][name] for name in names}
    plain = judge.one_after_another(programs, 1, patches=False)
    found = judge.one_after_another({**programs, "place": place}, 2, batches="whole", always_slices=True)
    devices = ["lagomtest:0", "lagomtest:1"] if ranks.DEVICE == "lagomtest" else ["lagomtest:0"] * 2
    assert [rank.value for rank in found["place"].ranks] == devices
    for name in programs:
        for rank in found[name].ranks:
            assert judge.differences(rank.value, plain[name].ranks[0].value) == [], name
            assert judge.text_differences(rank.text, plain[name].ranks[0].text) == [], name
            assert rank.passes == plain[name].ranks[0].passes, name
        assert judge.file_differences(found[name].files, plain[name].files) == [], name
