"""The backend of an accelerator, and the class that its name means in this torch; stand-ins are the classes."""

from __future__ import annotations

import datetime
import os
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from lagom.exchange.device_backend import class_of_program, device_backend, is_served, make_device_group
from lagom.exchange.group import Group

TIMEOUT = datetime.timedelta(seconds=20)


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """torch's tables of backends, which are put back."""
    for name in ("default_device_backend_map", "_plugins", "backend_capability", "backend_type_map"):
        monkeypatch.setattr(dist.Backend, name, dict(getattr(dist.Backend, name)))
    monkeypatch.setattr(dist.Backend, "backend_list", list(dist.Backend.backend_list))
    monkeypatch.setattr(dist, "is_backend_available", lambda name: False)
    return monkeypatch


class Group2:
    """Stand-in for ``ProcessGroupNCCL2``, the class of a plug-in of torch 2.15."""


def made(backend: str, index: int = 0, name: str = "own", store: Any = None) -> Any:
    device = torch.device("cuda", index)
    return make_device_group(backend, device, store or dist.HashStore(), name, 1, 3, TIMEOUT)


class OldGroup:
    """Stand-in for ``ProcessGroupNCCL``, the class of torch's up to 2.14."""

    class Options:
        _timeout: Any = None

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        self.place, self.timeout = (rank, size), options._timeout


def test_each_kind_has_its_makers_backend_where_torch_has_it(backends: pytest.MonkeyPatch) -> None:
    assert [device_backend(kind) for kind in ("cuda", "xpu", "hpu", "mps", "cpu", "lagomtest")] == [None] * 6
    backends.setattr(dist, "is_backend_available", lambda name: name in ("nccl", "xccl", "gloo"))
    assert [device_backend(kind) for kind in ("cuda", "xpu", "hpu")] == ["nccl", "xccl", None]
    assert (device_backend("cpu"), device_backend("mps")) == (None, None)  # gloo carries no tensors of accelerators


def test_a_backend_that_a_package_registers_for_its_kind_is_used(backends: pytest.MonkeyPatch) -> None:
    dist.Backend.register_backend("testccl", lambda *_: None, devices=["mtia"])
    dist.Backend.register_backend("hccl", lambda *_: None, devices=["hpu"])
    assert (device_backend("mtia"), device_backend("hpu")) == ("testccl", "hccl")


def test_up_to_torch_2_14_nccl_is_torchs_class(backends: pytest.MonkeyPatch) -> None:
    backends.setattr(distributed_c10d, "ProcessGroupNCCL", OldGroup, raising=False)
    group = made("nccl")
    assert (type(group), group.place, group.timeout) == (OldGroup, (1, 3), TIMEOUT)


def test_in_torch_2_15_nccl_is_the_class_of_the_plug_in(backends: pytest.MonkeyPatch) -> None:
    asked, devices = [], []

    def create(options: Any, of_backend: Any) -> Group2:
        devices.append(os.environ["LOCAL_RANK"])
        assert (options.group_rank, options.group_size, options.timeout) == (1, 3, TIMEOUT)
        assert options.global_ranks_in_group == [0, 1, 2]
        assert of_backend is None
        return Group2()

    def ensure(name: str) -> None:  # torch registers its own when the name is asked for
        asked.append(name)
        dist.Backend._plugins["NCCL"] = dist.Backend._BackendPlugin(create, True)

    backends.setattr(distributed_c10d, "ProcessGroupNCCL", OldGroup, raising=False)
    backends.setattr(dist.Backend, "_ensure_backend_registered", ensure, raising=False)
    backends.setenv("LOCAL_RANK", "5")
    assert device_backend("cuda") == "nccl"
    group = made("nccl", index=2)
    assert type(group) is Group2
    assert set(asked) == {"nccl"}
    assert devices == ["2"]  # the device to which the class binds itself
    assert os.environ["LOCAL_RANK"] == "5"
    backends.delenv("LOCAL_RANK")
    made("nccl")
    assert "LOCAL_RANK" not in os.environ


def test_a_plug_in_with_the_short_interface_is_made_as_torch_makes_it(backends: pytest.MonkeyPatch) -> None:
    dist.Backend.register_backend("testccl", lambda store, rank, size, timeout: (rank, size, timeout), devices=["xpu"])
    assert made("testccl") == (1, 3, TIMEOUT)


def test_groups_of_the_same_ranks_share_neither_a_name_nor_keys(backends: pytest.MonkeyPatch) -> None:
    """A backend may name communicators, memory or files by the group's name."""
    names, store = [], dist.HashStore()

    def create(options: Any, of_backend: Any) -> None:
        names.append(options.group_id)
        assert not options.store.check(["address"])
        options.store.set("address", "here")

    dist.Backend.register_backend("testccl", create, extended_api=True, devices=["xpu"])
    for name in ("own", "own aside"):
        made("testccl", name=name, store=store)
    assert len(set(names)) == 2


def test_the_class_that_runs_is_told(backends: pytest.MonkeyPatch) -> None:
    def group(nccl: Any) -> Group:
        return Group(0, 1, lambda data, wanted=None: [data], lambda *_: pytest.fail("gloo is not needed"), nccl=nccl)

    assert group(None).device_group_class is None
    assert not group(None).has_gpus
    with_devices = group(lambda name: Group2())
    assert with_devices.device_group_class == "Group2"
    assert with_devices.has_gpus


def test_the_class_of_the_programs_own_group_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # which init_process_group() replaces
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert class_of_program(torch.device("cpu")) == "ProcessGroupGloo"
        assert class_of_program(torch.device("hpu")) == "none"
        assert not is_served(dist.group.WORLD, torch.device("cpu"))
    finally:
        dist.destroy_process_group()
