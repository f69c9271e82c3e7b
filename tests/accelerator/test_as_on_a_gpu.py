"""The tests of tests/gpu that are not NVIDIA's own, on the test device: the same programs and checks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lagom import experiment
from lagom.config import TorchDistributedConfig
from lagom.errors import LagomError
from lagom.exchange.group import Group
from lagom.run_state.mixed_devices import meet_on
from tests.accelerator.collective_backend import Communicator
from tests.accelerator.device_processes import needs_device, with_device, with_driver
from tests.accelerator.test_training import on_ranks
from tests.gpu import test_cuda, test_micro_batches, test_mixed_devices, test_programs, test_shared_gpu
from tests.programs import scaled

pytestmark = needs_device

HERE = "lagomtest:0"
MB = 1 << 20


def inline(function: Any, **settings: Any) -> Any:
    """Run on the only rank, in this process, which has the device."""
    return experiment.lagom(function, TorchDistributedConfig(world_size=1, launcher="inline", seed=0, **settings))


@contextmanager
def group_of_one() -> Iterator[Group]:
    """A group of one rank, whose tensors on the device go by the double of NCCL."""
    store, made = dist.HashStore(), list[Any]()

    def nccl(name: str) -> Any:
        made.append(Communicator(dist.PrefixStore(name, store), 0, 1, test_cuda.TIMEOUT))
        return made[-1]

    try:
        yield Group(0, 1, lambda data, wanted=None: [data], lambda *_: pytest.fail("gloo is not needed"), nccl=nccl)
    finally:
        for one in made:
            one.shutdown()


@with_device(1)
def test_a_program_that_names_no_device_trains_on_it_in_this_process() -> None:
    torch.manual_seed(0)
    plain = test_cuda.train(epochs=2)
    assert plain["devices"] == ["cpu"]
    result = inline(test_cuda.train, hparams={"epochs": 2})
    assert result["devices"] == ["lagomtest:0"]
    torch.testing.assert_close(result["weights"], plain["weights"], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "asked", ["bf16", pytest.param("fp16", marks=pytest.mark.soak), pytest.param(True, marks=pytest.mark.soak)]
)
@with_device(1)
def test_mixed_precision_is_autocast_and_a_scaler_by_hand(asked: Any) -> None:
    dtype = torch.float16 if asked == "fp16" else torch.bfloat16
    found = inline(test_cuda.half, mixed_precision=asked, hparams={"by_hand": None, "kind": "lagomtest"})
    wanted = test_cuda.half(dtype, "lagomtest")
    torch.testing.assert_close(found["weights"], wanted["weights"], rtol=0, atol=1e-6)


@with_device(1)
def test_mixed_precision_with_a_scaler_gives_the_numbers_of_a_plain_run() -> None:
    options: dict[str, Any] = {"epochs": 2, "device": "lagomtest", "dtype": torch.float32}
    torch.manual_seed(0)
    plain = scaled.train(**options)
    result = inline(scaled.train, hparams=options)
    assert result["scale"] == plain["scale"]
    for name, value in plain["weights"].items():
        torch.testing.assert_close(result["weights"][name].cpu(), value.cpu(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [8, 1 << 21])
@with_device(1)
def test_no_steady_step_waits_for_the_device(size: int) -> None:
    with group_of_one() as group:
        test_cuda.check_no_step_waits(test_cuda.averager(group), size, "lagomtest")


@with_device(1)
def test_batchnorm_over_ranks_does_not_wait_for_the_device(tmp_path: Path) -> None:
    with group_of_one() as group:
        test_cuda.check_batchnorm_does_not_wait(group, tmp_path, "lagomtest:0")


@pytest.mark.needs("zero")
@with_device(1)
def test_parameters_on_the_device_are_let_go_of_and_gathered_by_the_double_of_nccl() -> None:
    from lagom.extensions.zero.parameters.shards import ParameterShards
    from lagom.run_state.leaves import Leaves
    from tests.extensions.zero.gpu.test_parameters_on_gpu import look_at_weights

    with group_of_one() as group:
        look_at_weights(ParameterShards(group, Leaves(), lambda: True, print), "lagomtest:0")


@with_device(1)
def test_a_program_that_runs_out_of_memory_fits_in_parts() -> None:
    test_micro_batches.check_parts_fit(10 * MB, kind="lagomtest", rows=1024, width=256)


@pytest.mark.parametrize("asked", ["bf16", pytest.param(False, marks=pytest.mark.soak)])
@with_device(1)
def test_so_many_parts_give_the_gradients_of_one(asked: Any) -> None:
    test_micro_batches.check_parts_give_gradients_of_one(asked, kind="lagomtest", rows=1024, width=256)


@pytest.mark.parametrize(
    "name",
    [
        "test_gradients_come_back_to_the_cpu",
        "test_what_is_written_on_the_cpu_stays_there",
        "test_arrays_and_texts_are_those_of_the_cpu",
        "test_packed_sequences_have_their_lengths_on_the_cpu",
        "test_a_program_is_exported_as_on_the_cpu",
        "test_weights_that_a_program_computes_are_used_in_place_of_a_module_s",
    ],
)
@with_device(1)
def test_what_is_on_the_cpu_meets_what_is_on_the_device(name: str) -> None:
    test_mixed_devices.THERE = torch.device(HERE)  # in a process of its own
    with meet_on(torch.device(HERE), list, lambda: True):
        getattr(test_mixed_devices, name)(torch.arange(12.0, device=HERE).reshape(4, 3))


@with_driver(4)
def test_a_program_that_loads_its_optimizer_goes_on_with_it_on_the_device(tmp_path: Path) -> None:
    plain = test_mixed_devices.resume("")
    found = on_ranks(2, test_mixed_devices.resume, hparams={"folder": str(tmp_path)})
    assert found["devices"] == ["lagomtest"]
    torch.testing.assert_close(found["weights"], plain["weights"], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("world_size", [1, 3])
@with_driver(4)
def test_a_program_that_names_no_device_runs_as_it_is(world_size: int, tmp_path: Path) -> None:
    result = on_ranks(world_size, test_mixed_devices.train, hparams={"folder": str(tmp_path)})
    test_mixed_devices.check_as_on_the_cpu(result, tmp_path)


@pytest.mark.parametrize("zero_lvl", [*(pytest.param(level, marks=pytest.mark.soak) for level in range(3)), 3])
@with_driver(4)
def test_a_rank_holds_its_share_within_a_tenth(zero_lvl: Any) -> None:
    hparams = {"kind": "lagomtest", "width": 512}
    for found in on_ranks(2, test_shared_gpu.held, zero_lvl=zero_lvl, batches="split", hparams=hparams).per_rank:
        assert found == pytest.approx(test_shared_gpu.share(zero_lvl, 512), rel=0.1)


def state_in_a_small_memory(ballast: bool) -> dict[str, Any]:
    torch.get_device_module().set_total_memory(64 * MB)
    return test_programs.whole_state(ballast, "lagomtest", 512, room=2 * MB)


@pytest.mark.parametrize(("ballast", "devices"), [(True, ["cpu"]), (False, ["lagomtest"])])
@with_driver(4)
def test_a_state_that_does_not_fit_the_device_is_on_the_cpu(ballast: bool, devices: list[str]) -> None:
    hparams = {"ballast": ballast}
    found = on_ranks(2, state_in_a_small_memory, zero_lvl=3, batches="split", hparams=hparams).value
    assert found["devices"] == devices
    assert found["found"] == pytest.approx(found["sums"], rel=1e-6)


@with_device(1)
def test_memory_is_planned_within_a_tenth() -> None:
    """Without attention, whose kernel on the CPU keeps other tensors than CUDA's."""
    kept, plan = inline(test_programs.predicted, hparams={"kind": "lagomtest", "width": 128, "attends": False}).value
    assert kept == pytest.approx(plan.needed(0), rel=0.1)


def recorded() -> None:
    """A backward while the device records its work for replays, as in a graph."""
    x = torch.ones(3, device="lagomtest", requires_grad=True)
    x.square().sum().backward()
    torch.get_device_module().is_current_stream_capturing = lambda: True
    x.square().sum().backward()


@with_driver(4)
def test_a_graph_that_records_a_backward_is_refused_by_name() -> None:
    with pytest.raises(LagomError, match="graph records this backward"):
        on_ranks(2, recorded)
