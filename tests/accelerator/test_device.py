"""The test device behaves as CUDA does, where programs and lagom depend on it; its numbers are the CPU's."""

from __future__ import annotations

import copy
import io
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lagom.program.payload import Parcel, unpack
from tests.accelerator.device_build import ROOT
from tests.accelerator.device_processes import needs_device, with_device

pytestmark = needs_device

HERE = "lagomtest:0"
MB = 1 << 20


@with_device()
def test_torch_knows_the_device() -> None:
    module = torch.get_device_module()
    assert str(torch.accelerator.current_accelerator()) == "lagomtest"
    assert (torch.accelerator.device_count(), module.device_count(), module.is_available()) == (2, 2, True)
    with module.device(1):
        assert torch.ones(2, device="lagomtest").device.index == module.current_device() == 1
        assert torch.accelerator.current_device_index() == 1
    assert torch.ones(2, device="lagomtest").device == torch.device(HERE)
    with pytest.raises(RuntimeError, match="no device 2"):
        torch.ones(2, device="lagomtest:2")


@with_device()
def test_tensors_of_two_devices_do_not_mix() -> None:
    here, other, cpu = torch.ones(2, 2, device=HERE), torch.ones(2, 2, device="lagomtest:1"), torch.ones(2, 2)
    calls: list[Callable[[], Any]] = [
        lambda: here + cpu,
        lambda: cpu + here,
        lambda: here @ other,
        lambda: torch.cat([here, cpu]),
        lambda: nn.Linear(2, 2)(here),
        lambda: here.add_(cpu),
        lambda: nn.functional.mse_loss(here, cpu),
        lambda: torch.bernoulli(here, generator=torch.Generator()),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match=r"same device|Expected a 'lagomtest' device type"):
            call()
    with pytest.raises(TypeError, match="can't convert lagomtest:0 device type tensor to numpy"):
        here.numpy()
    assert (here + torch.tensor(1.0)).tolist() == [[2, 2], [2, 2]]
    assert here[torch.tensor([0])].shape == (1, 2)
    assert cpu.copy_(other).device.type == "cpu"
    assert here.to("lagomtest:1").device.index == 1


@with_device()
def test_views_share_memory_and_results_do_not() -> None:
    x = torch.arange(6.0, device=HERE).reshape(2, 3)
    x.t()[2] += 10
    x[:, 1:].select(0, 1).mul_(2)
    assert x.tolist() == [[0, 1, 12], [3, 8, 30]]
    left, right = x.split(1)
    assert left._base is x._base
    assert right.data_ptr() == x.data_ptr() + 3 * 4
    assert x.expand(2, 2, 3).sum().item() == 108
    kept = x.detach()
    x.data.zero_()
    assert kept.sum().item() == 0
    assert (x + 1).data_ptr() != x.data_ptr()
    out = torch.empty(0, device=HERE)
    torch.add(x, 1, out=out)
    assert out.shape == (2, 3)
    assert out.resize_(1, 2).shape == (1, 2)
    storage = x.untyped_storage()
    storage.resize_(0)
    storage.resize_(6 * 4)
    x.copy_(torch.ones(2, 3))
    assert x.sum().item() == 6


def convolutional() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1, groups=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.ConvTranspose2d(8, 4, 2, 2), nn.GroupNorm(2, 4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)),
    )


class Recurrent(nn.Module):
    """The output of a recurrent layer, which has a second result."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x)[0]
        return found


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], bool]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 2)), (4, 8), True),
    "convolutional": (convolutional, (4, 3, 8, 8), True),
    # torch computes these in another order where a tensor is not on the CPU.
    "lstm": (lambda: Recurrent(nn.LSTM(3, 5, 2, batch_first=True, bidirectional=True)), (4, 6, 3), False),
    "gru": (lambda: Recurrent(nn.GRU(3, 5, 2, batch_first=True)), (4, 6, 3), False),
    "transformer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), (4, 6, 8), False),
}
"""Each with the shape of its input, and whether its numbers are the CPU's bit for bit."""


@pytest.mark.parametrize("name", MODELS)
@with_device()
def test_a_model_trains_with_the_numbers_of_the_cpu(name: str) -> None:
    make, shape, is_exact = MODELS[name]
    torch.manual_seed(0)
    plain = make().double()
    model = copy.deepcopy(plain).to(HERE)
    data = torch.rand(3, *shape, dtype=torch.float64)
    for one in (plain, model):
        optimizer = torch.optim.Adam(one.parameters(), lr=0.01, foreach=False)  # as the CPU's default
        for x in data.to(next(one.parameters()).device):
            optimizer.zero_grad()
            one(x).square().mean().backward()
            nn.utils.clip_grad_norm_(one.parameters(), 1.0, foreach=False)
            optimizer.step()
    for found, wanted in zip(model.state_dict().values(), plain.state_dict().values(), strict=True):
        assert found.device == torch.device(HERE)
        limit = 0.0 if is_exact else 1e-9
        torch.testing.assert_close(found.cpu(), wanted, rtol=limit, atol=limit)


@with_device()
def test_the_device_has_generators_of_its_own() -> None:
    module = torch.get_device_module("lagomtest")
    torch.manual_seed(3)
    on_cpu, on_device = torch.rand(4), torch.rand(4, device=HERE)
    assert on_cpu.tolist() != on_device.tolist()
    torch.manual_seed(3)
    assert torch.rand(4, device=HERE).tolist() == on_device.tolist()
    assert torch.rand(4, device="lagomtest:1").tolist() == on_device.tolist()
    assert torch.rand(4).tolist() == on_cpu.tolist()
    module.manual_seed(3)
    assert module.initial_seed() == 3
    assert torch.rand(4, device=HERE).tolist() == on_device.tolist()
    assert torch.rand(4, device=HERE).tolist() != on_device.tolist()
    state = module.get_rng_state()
    draws: list[Callable[[], Tensor]] = [
        lambda: nn.functional.dropout(torch.ones(64, device=HERE)),
        lambda: torch.randn(8, device=HERE),
        lambda: torch.randperm(20, device=HERE),
        lambda: torch.multinomial(torch.ones(30, device=HERE), 10),
        lambda: nn.functional.rrelu(torch.randn(30, device=HERE), training=True),
        lambda: torch.poisson(torch.full((10,), 5.0, device=HERE)),
    ]
    for draw in draws:
        before = torch.get_rng_state()
        module.set_rng_state(state)
        first = draw()
        second = draw()
        module.set_rng_state(state)
        assert torch.equal(draw(), first)
        assert not torch.equal(first, second)
        assert torch.equal(torch.get_rng_state(), before)  # the CPU's generator is not drawn from
    with torch.random.fork_rng(devices=[0], device_type="lagomtest"):
        kept = module.get_rng_state()
        torch.rand(4, device=HERE)
    assert torch.equal(module.get_rng_state(), kept)
    own = torch.Generator(HERE).manual_seed(3)
    assert torch.rand(4, device=HERE, generator=own).tolist() == on_device.tolist()
    module.set_rng_state_all([state, state])
    assert torch.equal(torch.stack(module.get_rng_state_all()), torch.stack([state, state]))


@with_device()
def test_two_generators_can_share_a_state() -> None:
    """As lagom has CUDA's do."""
    ours, other = torch.Generator(HERE).manual_seed(1), torch.Generator(HERE).manual_seed(2)
    kept = ours.graphsafe_get_state()
    ours.graphsafe_set_state(other)
    first = torch.rand(3, device=HERE, generator=ours)
    second = torch.rand(3, device=HERE, generator=other)
    ours.graphsafe_set_state(kept)
    assert (
        torch.rand(3, device=HERE, generator=ours).tolist()
        == torch.rand(3, device=HERE, generator=torch.Generator(HERE).manual_seed(1)).tolist()
    )
    other.manual_seed(2)
    assert torch.rand(6, device=HERE, generator=other).tolist() == [*first.tolist(), *second.tolist()]


@with_device()
def test_a_copy_that_does_not_block_is_late() -> None:
    module = torch.get_device_module("lagomtest")
    x = torch.ones(3, device=HERE)
    found = x.to("cpu", non_blocking=True)
    assert found.is_pinned()
    assert found.isnan().all()
    module.synchronize()
    assert found.tolist() == [1, 1, 1]
    pinned = torch.zeros(3).pin_memory()
    y = pinned.to(HERE, non_blocking=True)
    pinned.fill_(5)  # too early: the device has not read it
    assert y.tolist() == [5, 5, 5]
    pageable = torch.zeros(3)
    y = pageable.to(HERE, non_blocking=True)
    pageable.fill_(5)
    assert y.tolist() == [0, 0, 0]
    pinned = torch.zeros(3).pin_memory()
    y = pinned.to(HERE, non_blocking=True) + 1  # in the order of the stream
    assert y.tolist() == [1, 1, 1]


@with_device()
def test_streams_are_ordered_by_events_alone() -> None:
    module = torch.get_device_module("lagomtest")
    side, done = module.Stream(), module.Event()
    with module.stream(side):
        x = torch.ones(3).pin_memory().to(HERE, non_blocking=True)
        done.record()
    assert module.current_stream() != side
    assert (x + 1).isnan().all()
    assert not done.query()
    assert done.query()
    with module.stream(side):
        y = torch.ones(3).pin_memory().to(HERE, non_blocking=True)
        done = side.record_event()
    module.current_stream().wait_event(done)
    assert (y + 1).tolist() == [2, 2, 2]
    with module.stream(side):
        y = torch.ones(3).pin_memory().to(HERE, non_blocking=True)
    module.current_stream().wait_stream(side)
    assert (y + 1).tolist() == [2, 2, 2]


@with_device()
def test_waits_of_the_host_can_be_forbidden() -> None:
    module = torch.get_device_module("lagomtest")
    x = torch.ones(3, device=HERE)
    waits: list[Callable[[], Any]] = [x.sum().item, x.tolist, x.cpu, x.nonzero, module.synchronize, lambda: bool(x[0])]
    module.set_sync_debug_mode("error")
    for wait in waits:
        with pytest.raises(RuntimeError, match="called a synchronizing lagomtest operation"):
            wait()
    (x * 2 + torch.ones(3).to(HERE, non_blocking=True)).sum()
    module.set_sync_debug_mode("default")
    assert x.sum().item() == 3


@with_device()
def test_memory_is_counted_and_has_an_end() -> None:
    module = torch.get_device_module("lagomtest")
    assert module.memory_allocated() == 0
    x = torch.empty(MB, dtype=torch.uint8, device=HERE)
    y = x + 1
    assert module.memory_allocated() == torch.accelerator.memory_allocated() == 2 * MB
    del y
    assert (module.memory_allocated(), module.max_memory_allocated()) == (MB, 2 * MB)
    module.reset_peak_memory_stats()
    assert module.max_memory_allocated(0) == MB
    module.set_total_memory(4 * MB)
    assert module.mem_get_info() == (3 * MB, 4 * MB)
    assert module.get_device_properties().total_memory == 4 * MB
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 4 MiB"):
        torch.empty(4 * MB, dtype=torch.uint8, device=HERE)
    with pytest.raises(torch.OutOfMemoryError):
        x.float()
    torch.empty(8 * MB, dtype=torch.uint8, device="lagomtest:1")
    assert module.memory_allocated() == MB
    assert torch.empty(4, device=HERE).isnan().all()


@with_device()
def test_tensors_are_saved_copied_and_pickled() -> None:
    model = nn.Linear(3, 2).to(HERE)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.rand(4, 3, device=HERE)).sum().backward()
    optimizer.step()
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    for where, wanted in ((None, HERE), ("cpu", "cpu"), ("lagomtest:1", "lagomtest:1")):
        file.seek(0)
        found = torch.load(file, map_location=where)
        assert str(found["model"]["weight"].device) == wanted
        assert str(found["optimizer"]["state"][0]["exp_avg"].device) == wanted
        assert torch.equal(found["model"]["weight"].cpu(), model.weight.detach().cpu())
    other = nn.Linear(3, 2).to(HERE)
    other.load_state_dict(found["model"])
    assert torch.equal(other.weight, model.weight)
    for made in (copy.deepcopy(model.weight), pickle.loads(pickle.dumps(model.weight))):
        assert made.device == torch.device(HERE)
        assert torch.equal(made, model.weight)
        assert made.data_ptr() != model.weight.data_ptr()


@with_device()
def test_a_loader_pins_its_batches() -> None:
    data = TensorDataset(torch.arange(6.0))
    for (x,) in DataLoader(data, batch_size=3, pin_memory=True):
        assert x.is_pinned()
        assert x.to(HERE, non_blocking=True).device == torch.device(HERE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@with_device()
def test_autocast_and_a_scaler(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(HERE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("lagomtest", init_scale=256.0, growth_interval=2)
    scales, losses = [], []
    for step in range(5):
        optimizer.zero_grad()
        x = torch.linspace(0, 1, 32, device=HERE).reshape(8, 4)
        x[7, 0] = torch.inf if step == 3 else 0.5
        with torch.autocast("lagomtest", dtype):
            out = model(x)
            assert out.dtype is dtype
            loss = nn.functional.mse_loss(out, torch.ones_like(out))
            assert loss.dtype is torch.float32
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        losses.append(loss.item())
    assert scales == [256.0, 512.0, 512.0, 256.0, 256.0]
    assert losses[4] < losses[0]


@with_device()
def test_a_fork_of_a_process_that_uses_the_device_cannot() -> None:
    torch.ones(2, device=HERE)
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        try:
            torch.ones(2, device=HERE)
            os.write(write, b"used it")
        except RuntimeError as error:
            os.write(write, str(error).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert b"Cannot re-initialize lagomtest in forked subprocess" in os.read(read, 1000)


def test_this_process_has_no_accelerator() -> None:
    """The other tests of this file have run elsewhere."""
    assert not hasattr(torch, "lagomtest")


@with_device()
def test_views_of_conjugates_have_the_gradients_of_the_cpu() -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(4, 3, dtype=torch.complex128), torch.randn(5, 4, dtype=torch.complex128)
    gradients = []
    for device in ("cpu", HERE):
        parameter = weight.to(device, copy=True).requires_grad_()
        conjugate = (x.to(device) @ parameter).conj()
        (conjugate.imag.pow(2).mean() + conjugate.real.sum()).backward()
        assert parameter.grad is not None
        gradients.append(parameter.grad.cpu())
    torch.testing.assert_close(*gradients)


def test_without_a_compiler_the_tests_are_skipped_by_name_or_fail(tmp_path: Path) -> None:
    text = """
import sys, pytest
from pathlib import Path
from tests.accelerator import device_build
device_build.folder = lambda: Path(sys.argv[1], "none")
from tests.accelerator.device_build import ROOT
from tests.accelerator.device_processes import needs_device
print(needs_device.args, needs_device.kwargs["reason"])
device_build.library()
"""
    found = []
    for needed in ("0", "1"):
        environment = {**os.environ, "CXX": "no-compiler", "LAGOM_TEST_NEEDS_DEVICE": needed}
        command = [sys.executable, "-c", text, str(tmp_path)]
        run = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, cwd=ROOT)
        assert "RuntimeError: there is no C++ compiler 'no-compiler' for the test device" in run.stderr
        found.append(run.stdout)
    assert found[0].startswith("(True,) the path on GPUs is not tested")
    assert found[1].startswith("(False,)")


@with_device()
def test_inference_mode_is_as_on_the_cpu() -> None:
    layer, x = nn.Linear(2, 2).to(HERE), torch.ones(2, 2, device=HERE)
    with torch.inference_mode():
        found = layer(x)
        made = torch.zeros(2, device=HERE)
    assert (found.is_inference(), made.is_inference(), made.view(2, 1).is_inference()) == (True, True, True)
    assert torch.equal(found, layer(x))
    assert not layer.weight.is_inference()
    with torch.inference_mode():
        part = x[0]  # a view of a tensor that may be changed elsewhere
    x.add_(1)
    assert part.tolist() == [2, 2]
    assert part._version == x._version == 1


@with_device()
def test_tensors_travel_to_a_kind_whose_module_has_few_functions() -> None:
    """torch asks a module of all kinds for very little; a storage's ``to`` asks for the context manager ``device``."""
    module = torch.get_device_module()
    vars(module).pop("device")
    x = torch.arange(40_000.0, device=HERE)
    whole, part = unpack(bytearray(Parcel([x, x[1:3]]).tobytes()))
    assert (whole.device.type, part.tolist()) == ("lagomtest", [1, 2])
    assert torch.equal(whole, x)
    whole.zero_()
    assert part.tolist() == [0, 0]
