"""``rank_environment``, ``world``, ``device`` and ``random_states``: what a rank stands on, and puts back."""

from __future__ import annotations

import os

import pytest
import torch

import lagom
from lagom.cluster import Cluster
from lagom.config import TorchDistributedConfig
from lagom.errors import RankError
from lagom.on_rank import rank_environment
from lagom.on_rank.rank_environment import environment, rank_device, threads
from lagom.plan import Plan, plan
from lagom.wire.spec import RankSpec
from lagom.world import Place, place_set

LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "HOROVOD_RANK")


def spec_of_rank(gpu: str | None = None) -> RankSpec:
    return RankSpec(
        rank=0,
        local_rank=0,
        local_world_size=1,
        ip="127.0.0.1",
        store=("127.0.0.1", 0),
        store_fd=None,
        control_fd=-1,
        outcome_fd=-1,
        payload_fd=-1,
        stacks_fd=None,
        host_dir="",
        threads=1,
        gpu=gpu,
    )


def test_a_rank_sees_no_launcher_and_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHERS:
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    before = dict(os.environ)
    with environment(spec_of_rank(gpu="GPU-7")):
        assert not set(LAUNCHERS) & set(os.environ)
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-7"
    assert dict(os.environ) == before


def test_a_rank_without_a_gpu_of_its_own_keeps_the_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with environment(spec_of_rank()):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"


def test_inline_leaves_the_environment_as_it_is_and_puts_back_what_the_program_sets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", "3")
    before = dict(os.environ)

    def train() -> None:
        with environment(None):
            assert os.environ["RANK"] == "3"
            os.environ["NEW"] = "x"
            del os.environ["RANK"]
            raise ValueError("on purpose")

    with pytest.raises(ValueError, match="on purpose"):
        train()
    assert dict(os.environ) == before


def test_a_place_holds_while_it_is_stood_at() -> None:
    with place_set(Place(2, 4, 0, 2)):
        assert (lagom.rank(), lagom.world_size()) == (2, 4)
        with place_set(Place()):
            assert (lagom.rank(), lagom.world_size()) == (0, 1)
        assert lagom.rank() == 2
    assert (lagom.rank(), lagom.world_size()) == (0, 1)


def test_threads_are_put_back() -> None:
    before = torch.get_num_threads()
    with threads(1):
        assert torch.get_num_threads() == 1
    with threads(0):
        assert torch.get_num_threads() == before
    assert torch.get_num_threads() == before


def a_plan(gpu: bool) -> Plan:
    return plan(TorchDistributedConfig(), Cluster(launcher="local", slots=1, gpus_per_slot=int(gpu)))


def test_a_run_without_gpus_is_on_the_cpu_even_where_there_is_one() -> None:
    assert rank_device(a_plan(gpu=False)) == torch.device("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_torch_does_not_find_is_an_error_with_the_remedy() -> None:
    with pytest.raises(RankError, match="CUDA build"):
        rank_device(a_plan(gpu=True))


def test_a_gpu_of_another_kind_than_torchs_is_an_error_that_names_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_environment, "available_accelerator", lambda: torch.device("xpu"))
    with pytest.raises(RankError) as caught:
        rank_device(a_plan(gpu=True), entry="GPU-1f")
    assert "the 'cuda' device 'GPU-1f', and torch's accelerator here is 'xpu'" in str(caught.value)
