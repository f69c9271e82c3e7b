"""Accelerators of any kind: torch's interface for them, by a stand-in; and the files that name NVIDIA's kind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lagom import accelerators
from lagom.cluster import backend_word, device_word, kind_of_device, other_devices
from lagom.device_models import DeviceModel, describe_differences
from lagom.random_states import equal_random_states, random_states, seed_torch, set_random_states, start_random_states
from lagom.run_state.random_streams import OwnStreams
from tests.fake_accelerator import KIND, FakeModule, FullModule, plugin
from tests.sources import ROOT

NAME_IT = {
    "accelerators.py": "NVIDIA's own: one state shared by two generators, for CUDA graphs, and its driver's version",
    "cluster.py": "NVIDIA's own: CUDA_VISIBLE_DEVICES and nvidia-smi; torch's name for the kind",
    "disk/calls.py": "NVIDIA's own: the folder of its compiled kernels",
    "disk/libraries.py": "NVIDIA's own: its libraries, which open no files of a program",
    "device_models.py": "NVIDIA's own: on what its random numbers depend",
    "exchange/device_backend.py": "NVIDIA's own: NCCL is the backend for its kind",
    "extensions/compat/horovod/topology.py": "Horovod's own name: hvd.cuda_built()",
    "extensions/compat/horovod/torch.py": "Horovod's own name: hvd.cuda_built()",
    "extensions/compat/horovodrun.py": "Horovod's own: whether NCCL is built in",
    "extensions/observe/doctor/examination.py": "NVIDIA's own: whether torch is built for its GPUs",
    "extensions/observe/doctor/findings.py": "NVIDIA's own: the remedy where its GPUs are not seen",
    "gradients/backward.py": "NVIDIA's own: CUDA graphs",
    "on_rank/rank_environment.py": "NVIDIA's own: CUDA_VISIBLE_DEVICES",
    "program/detect_distributed.py": "words by which programs name a device",
    "spark/spark.py": "NVIDIA's own: CUDA_VISIBLE_DEVICES",
    "spark/spark_worker.py": "NVIDIA's own: CUDA_VISIBLE_DEVICES",
}
"""Files of lagom that name "cuda", each with the reason. All others ask ``lagom/accelerators.py``."""


def test_only_files_with_a_reason_name_nvidias_kind_of_device() -> None:
    folder = ROOT / "lagom"
    found = {str(path.relative_to(folder)) for path in folder.rglob("*.py") if "cuda" in path.read_text().lower()}
    assert found - NAME_IT.keys() == set(), "ask lagom/accelerators.py, or add the file with its reason"
    assert NAME_IT.keys() - found == set(), "the file names it no longer"


@pytest.fixture(params=[FakeModule, FullModule])
def fake(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeModule]:
    """A kind of accelerator with only what all kinds have, and one with all functions."""
    yield from _installed(request.param(), monkeypatch)


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeModule]:
    yield from _installed(FullModule(), monkeypatch)


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeModule]:
    yield from _installed(FakeModule(), monkeypatch)


def _installed(module: FakeModule, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeModule]:
    monkeypatch.setattr(torch, KIND, module, raising=False)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(KIND))
    torch.get_device_module.cache_clear()
    accelerators.select_device(torch.device(KIND, 0))
    yield module
    torch.get_device_module.cache_clear()


DEVICE = torch.device(KIND, 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_an_accelerator_everything_says_so() -> None:
    assert accelerators.available_accelerator() is None
    assert accelerators.generator_states() == {}
    assert accelerators.current_index() == -1
    assert random_states().keys() <= {"random", "numpy", "torch"}
    assert accelerators.free_bytes(torch.device("cpu")) is None
    assert accelerators.record_event(torch.zeros(1)) is None
    assert not accelerators.is_accelerator(torch.device("cpu"))
    assert not accelerators.is_accelerator(torch.device("meta"))


def test_a_torch_that_raises_where_there_is_none_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises() -> torch.device:
        raise RuntimeError("Cannot access accelerator device when none is available.")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", raises)  # as in torch 2.6
    assert accelerators.current_accelerator() is None


def test_a_device_of_another_maker_is_selected(fake: FakeModule) -> None:
    assert accelerators.is_accelerator(DEVICE)
    assert accelerators.available_accelerator() == torch.device(KIND)
    assert accelerators.select_device(DEVICE) == DEVICE
    assert (fake.current, accelerators.current_index()) == (1, 1)


def test_states_of_all_devices_are_kept_and_restored(fake: FakeModule) -> None:
    before = random_states()
    assert len(before[KIND]) == 2
    first = [fake.draw(), fake.draw()]
    assert not equal_random_states(before, random_states())
    set_random_states(before)
    assert equal_random_states(before, random_states())
    assert [fake.draw(), fake.draw()] == first
    set_random_states(before | {KIND: [*before[KIND], torch.zeros(16)]})  # of a machine with more


def test_states_of_another_kind_are_left_out(fake: FakeModule) -> None:
    """A kind has its own form of a state, which another kind may take for its own."""
    before = random_states()
    states = {name: state for name, state in before.items() if name != KIND}
    fake.manual_seed_all(5)
    now = fake.generators[0].get_state()
    set_random_states(states | {"cuda": before[KIND]})
    assert torch.equal(fake.generators[0].get_state(), now)
    assert not equal_random_states(before, states | {"cuda": before[KIND]})


def test_states_of_gpus_in_older_snapshots_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Version 0.3 wrote ``torch.cuda.get_rng_state_all()`` under "cuda"."""
    gpu = FullModule()
    monkeypatch.setattr(torch, "cuda", gpu)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    torch.get_device_module.cache_clear()
    states = random_states() | {"cuda": [torch.Generator().manual_seed(7).get_state()]}
    set_random_states(states)
    drawn = gpu.draw()
    torch.get_device_module.cache_clear()
    assert drawn == float(torch.rand((), generator=torch.Generator().manual_seed(7)))


def test_states_that_are_restored_do_not_begin_to_use_a_device(full: FullModule) -> None:
    states = random_states()
    full.is_begun = False
    set_random_states(states)
    assert not full.is_begun


def test_apples_kind_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("mps"))
    assert accelerators.current_accelerator() is None
    assert other_devices() == ()
    assert random_states().keys() <= {"random", "numpy", "torch"}


def test_the_device_of_a_rank_is_the_first_whichever_it_is(fake: FakeModule) -> None:
    """Ranks that have drawn equally on devices of their own have equal states, and resume from one another's."""
    found = []
    for rank in (0, 1):
        fake.manual_seed_all(1)
        accelerators.select_device(torch.device(KIND, rank))
        fake.draw()
        found.append(random_states())
    assert equal_random_states(*({KIND: states[KIND]} for states in found))
    fake.manual_seed_all(1)
    set_random_states(found[0])  # rank 0's, on rank 1
    assert fake.draw() == float(torch.rand(2, generator=torch.Generator().manual_seed(1))[1])


def test_the_order_of_states_is_that_of_the_ranks_device_in_every_thread(fake: FakeModule) -> None:
    """torch has a current device for each thread, and a program may change it."""
    accelerators.select_device(DEVICE)
    fake.draw()
    before = random_states()
    fake.set_device(0)  # as in another thread, or by the program
    assert equal_random_states(before, random_states())
    set_random_states(before)
    assert equal_random_states(before, random_states())


def test_states_of_a_machine_with_an_accelerator_are_set_without_one() -> None:
    before = random_states()
    set_random_states(before | {KIND: [torch.get_rng_state()], "cuda": [torch.zeros(16, dtype=torch.uint8)]})
    assert torch.equal(torch.get_rng_state(), before["torch"])


def test_devices_are_seeded_with_torch(fake: FakeModule) -> None:
    fake.draw()
    states = {name: state for name, state in random_states().items() if name != KIND}
    start_random_states(states | {"entropy": 3})
    wanted = torch.Generator().manual_seed(torch.initial_seed()).get_state()
    assert all(torch.equal(generator.get_state(), wanted) for generator in fake.generators)
    seed_torch(5)
    assert torch.initial_seed() == 5


def test_a_rank_draws_on_its_device_from_a_stream_of_its_own(fake: FakeModule) -> None:
    accelerators.select_device(DEVICE)
    common, own = torch.Generator().manual_seed(1), torch.Generator().manual_seed(7)
    second = accelerators.OwnGenerator(DEVICE, 7)
    for _ in range(3):
        assert fake.draw() == float(torch.rand((), generator=common))
        replaced = second.swap_in()
        assert fake.draw() == float(torch.rand((), generator=own))
        assert fake.draw() == float(torch.rand((), generator=own))
        second.swap_out(replaced)
    assert fake.draw() == float(torch.rand((), generator=common))


def test_a_stream_of_a_rank_is_on_its_device_whichever_is_the_current_one(fake: FakeModule) -> None:
    accelerators.select_device(DEVICE)
    fake.set_device(0)  # by the program
    states = [generator.get_state() for generator in fake.generators]
    second = accelerators.OwnGenerator(DEVICE, 7)
    replaced = second.swap_in()
    fake.set_device(1)
    assert fake.draw() == float(torch.rand((), generator=torch.Generator().manual_seed(7)))
    second.swap_out(replaced)
    assert all(map(torch.equal, states, [generator.get_state() for generator in fake.generators]))
    assert fake.current == 1


def test_forwards_draw_from_the_ranks_own_stream_on_its_device(fake: FakeModule) -> None:
    accelerators.select_device(DEVICE)
    drawn = []
    for rank in (0, 1):
        fake.manual_seed(1)
        streams = OwnStreams(0, rank, DEVICE)
        with streams.in_forward():
            first = fake.draw()
        common = fake.draw()
        with streams.in_forward():
            drawn.append((first, fake.draw()))
        assert common == float(torch.rand((), generator=torch.Generator().manual_seed(1)))
    assert len({number for pair in drawn for number in pair}) == 4


def test_the_generator_of_a_device_can_be_restored(fake: FakeModule) -> None:
    accelerators.select_device(DEVICE)
    generator = accelerators.global_generator(DEVICE)
    state = generator.get_state()
    first = fake.draw()
    generator.set_state(state)
    assert fake.draw() == first


def test_memory_and_use_of_a_device(full: FakeModule) -> None:
    assert accelerators.allocated_bytes(DEVICE) == 3 << 30
    assert accelerators.total_bytes(DEVICE) == 16 << 30
    assert accelerators.free_bytes(DEVICE) == 11 << 30  # with the memory that torch keeps
    assert accelerators.utilization(DEVICE) == 0.87


def test_a_kind_that_tells_nothing_of_its_memory_is_asked_for_nothing(plain: FakeModule) -> None:
    assert accelerators.allocated_bytes(DEVICE) is None
    assert accelerators.total_bytes(DEVICE) is None
    assert accelerators.free_bytes(DEVICE) is None
    assert accelerators.has_bf16(DEVICE)
    assert accelerators.make_stream(DEVICE) is None
    assert not accelerators.is_recording(DEVICE)
    with accelerators.in_stream(DEVICE, None):
        pass


def test_streams_of_a_kind_that_has_them(full: FullModule) -> None:
    stream = accelerators.make_stream(DEVICE)
    with accelerators.in_stream(DEVICE, stream) as entered:
        assert entered is stream
    full.records = True
    assert accelerators.is_recording(DEVICE)
    full.is_begun = False
    assert accelerators.generator_states() == {}  # reading them would begin to use the device
    assert accelerators.current_index() == -1


def test_emulated_bfloat16_does_not_count(full: FakeModule, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not accelerators.has_bf16(DEVICE)
    monkeypatch.setattr(full, "is_bf16_supported", lambda: True)  # without the argument, as in older versions
    assert accelerators.has_bf16(DEVICE)


def test_a_package_without_devices_leaves_the_gpus_of_a_build_for_nvidias(
    plain: FakeModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch names the kind of a package first, even where there is no device of it."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert accelerators.current_accelerator() == torch.device(KIND)
    monkeypatch.setattr(plain, "is_available", lambda: False)
    assert accelerators.current_accelerator() == torch.device("cuda")


def test_only_gpus_are_called_so() -> None:
    assert [device_word(kind) for kind in ("cuda", "xpu", "hpu", "lagomtest")] == [
        *("GPU", "GPU"),
        *("accelerator", "accelerator"),
    ]
    assert [kind_of_device(entry) for entry in ("0", "GPU-1f", "MIG-a/1/0", "0,1", "xpu:1", None)] == [
        *("cuda", "cuda", "cuda", "cuda"),
        *("xpu", "cuda"),
    ]
    assert (backend_word("cuda"), backend_word("hpu")) == ("NCCL", "torch's backend for 'hpu'")


def test_a_model_has_a_name_multiprocessors_and_a_driver(full: FakeModule) -> None:
    model = accelerators.device_model(DEVICE)
    assert model == DeviceModel(kind=KIND, name="Fake 1", multiprocessors=131, driver="1.2")
    assert model.words == "Fake 1 (131 multiprocessors, driver 1.2)"


def test_a_model_of_a_kind_that_tells_nothing_is_its_kind(plain: FakeModule) -> None:
    assert accelerators.device_model(DEVICE).words == KIND


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\nGCC", "550.54.15"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build  (a@b)", "570.124.06"),
        ("something else", ""),
        (None, ""),
    ],
)
def test_nvidias_driver_is_read_from_the_system(text: str | None, version: str, tmp_path: Path) -> None:
    path = tmp_path / "version"
    if text is not None:
        path.write_text(text)
    assert accelerators.nvidia_driver(path) == version


def model(name: str = "NVIDIA H200", multiprocessors: int = 132, driver: str = "570.1") -> DeviceModel:
    return DeviceModel(kind="cuda", name=name, multiprocessors=multiprocessors, driver=driver)


@pytest.mark.parametrize(
    "other", [model(name="NVIDIA A100"), model(multiprocessors=16), model(driver="550.2")], ids=lambda one: one.words
)
def test_ranks_with_other_models_slices_or_drivers_are_named(other: DeviceModel) -> None:
    line = describe_differences({"rank 0": model(), "rank 1": other, "rank 2": model()})
    assert "rank 0, rank 2: NVIDIA H200 (132 multiprocessors, driver 570.1); rank 1: " + other.words in line
    assert line.startswith("GPUs differ in model, multiprocessors or driver")
    assert "random numbers that a model draws on them (dropout) may differ" in line


def test_equal_models_are_not_worth_a_line() -> None:
    assert describe_differences({f"rank {rank}": model() for rank in range(8)}) == ""
    line = describe_differences({"the snapshot": model(), "this run": None})
    assert "this run: the CPU" in line
    many = {f"rank {rank}": model(multiprocessors=132 if rank else 16) for rank in range(9)}
    assert "rank 1, rank 2, rank 3 and 5 more: " in describe_differences(many)


def test_ranks_run_on_devices_of_another_maker(tmp_path: Path) -> None:
    """torch finds the stand-in in every process; so do the driver, which does not import torch, and the ranks."""
    folder = plugin(tmp_path)
    path = os.pathsep.join(filter(None, [str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")]))
    run = subprocess.run(
        [sys.executable, "-c", _RUN.format(folder=str(tmp_path / "runs"))],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
        check=False,
        timeout=150,
    )
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout.splitlines()[-1])
    assert result["before"] == ["hpu:0", "hpu:1"]
    assert result["values"] == [0, 1]  # each rank uses the device of its name
    assert result["devices"] == {
        "models": ["Fake 0 (132 multiprocessors, driver 1.2)", "Fake 1 (131 multiprocessors, driver 1.2)"],
        "exchanges": "ProcessGroupFake2",
    }
    assert "accelerators differ in model, multiprocessors or driver (rank 0: Fake 0" in run.stdout + run.stderr
    assert result["error"] == (
        "world_size is 3, but this machine has 2 accelerators; ask for at most 2, or hide the accelerators from torch "
        "with TORCH_DEVICE_BACKEND_AUTOLOAD=0 to run on the CPU"
    )


_RUN = """
import json, sys
from lagom.cluster import visible_devices

before = visible_devices()
assert "torch" not in sys.modules
from lagom import experiment
from lagom.config import TorchDistributedConfig

def train():
    import torch
    return torch.hpu.current_device()

result = experiment.lagom(train, TorchDistributedConfig(launcher="local", run_dir={folder!r}))
try:
    experiment.lagom(train, TorchDistributedConfig(launcher="local", world_size=3))
except Exception as error:
    said = str(error)
facts = json.loads((result.run_dir / "run.json").read_text())
print()
print(json.dumps(dict(before=before, values=result.per_rank, devices=facts.get("devices"), error=said)))
"""
