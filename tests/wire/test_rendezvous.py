"""``lagom.wire.rendezvous``: how the tasks of a run find each other."""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import socket
from collections.abc import Iterator

import pytest

from lagom.errors import PlanError
from lagom.wire import rendezvous
from lagom.wire.client import DriverClient, LinkClosed
from lagom.wire.messages import Gather, Started, Stop, from_json, to_json
from lagom.wire.rendezvous import Stopped, join_run, other_torch, peers
from tests.wire.joins import join


@pytest.fixture
def pair() -> Iterator[tuple[DriverClient, DriverClient]]:
    left, right = (DriverClient(end) for end in socket.socketpair())
    yield left, right
    left.close()
    right.close()


def test_ranks_are_in_order_in_whatever_order_tasks_join() -> None:
    tables = [peers(order) for order in itertools.permutations([join(task) for task in range(3)])]
    assert [rank.rank for rank in tables[0].ranks] == [0, 1, 2]
    assert [rank.ip for rank in tables[0].ranks] == ["10.0.0.0", "10.0.0.1", "10.0.0.2"]
    assert tables[0].store == ("10.0.0.0", 1234)
    assert all(table == tables[0] for table in tables)


def test_more_than_ten_tasks_are_ordered_as_numbers() -> None:
    table = peers([join(task) for task in reversed(range(12))])
    assert [rank.rank for rank in table.ranks] == list(range(12))


def test_tasks_with_several_ranks_give_each_its_gpu() -> None:
    table = peers([join(1, ranks=[2, 3], gpus=["0", "1"]), join(0, ranks=[0, 1], gpus=["0", "1"])])
    found = [(rank.rank, rank.host.split("|")[0], rank.gpu) for rank in table.ranks]
    assert found == [(0, "host0", "0"), (1, "host0", "1"), (2, "host1", "0"), (3, "host1", "1")]
    assert table.nccl is True


def test_ranks_that_share_a_gpu_do_without_nccl() -> None:
    table = peers([join(0, gpus=["0"], host="same|64:1"), join(1, gpus=["0"], host="same|64:1")])
    assert table.nccl is False


def test_the_same_address_in_two_containers_of_a_host_is_not_one_gpu() -> None:
    table = peers([join(0, gpus=["0"], host="same|64:1"), join(1, gpus=["0"], host="same|65:9")])
    assert table.nccl is True


def test_ranks_of_one_host_without_gpus_do_without_nccl() -> None:
    assert peers([join(0, host="same|64:1"), join(1, host="same|64:1")]).nccl is False


@pytest.mark.parametrize("fact", ["python", "torch"])
def test_different_versions_are_an_error_naming_hosts_and_versions(fact: str) -> None:
    with pytest.raises(PlanError) as raised:
        peers([join(task, **{fact: version}) for task, version in enumerate(("1.0", "2.0", "1.0"))])
    text = str(raised.value)
    assert f"versions of {fact}" in text
    assert "1.0 on host" in text
    assert "2.0 on host1" in text
    assert "64:1" not in text


@pytest.mark.parametrize(("own", "is_told"), [("2.13.1+cpu", False), ("2.9.1", True), (None, False)])
def test_another_torch_of_the_driver_is_told_of(
    monkeypatch: pytest.MonkeyPatch, own: str | None, is_told: bool
) -> None:
    def version(name: str) -> str:
        if own is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return own

    monkeypatch.setattr(importlib.metadata, "version", version)
    text = other_torch([join(0), join(1)])
    assert text.startswith("the driver has torch 2.9.1 and the executors have torch 2.13.0: ") == is_told
    assert bool(text) == is_told


def test_hosts_that_would_exchange_in_clear_are_refused_by_name() -> None:
    here = [join(0, host="same|64:1"), join(1, host="same|64:1")]
    assert peers(here, "NCCL") == peers(here)
    wanted = r"2 hosts \(host0, host1\).* NCCL would send .* in clear.*allow_unencrypted_collectives=True"
    with pytest.raises(PlanError, match=wanted):
        peers([join(1), join(0)], "NCCL")
    with pytest.raises(PlanError, match="in clear"):
        join_run(None, lambda text: [text, json.dumps(to_json(join(1)))], join(0), in_clear="NCCL")


def test_the_table_travels_as_json() -> None:
    table = peers([join(0), join(1)])
    assert from_json(json.loads(json.dumps(to_json(table)))) == table


def test_a_task_joins_and_gets_the_table_from_the_driver(pair: tuple[DriverClient, DriverClient]) -> None:
    ours, driver = pair
    table = peers([join(0)])
    driver.send(Started(pids={}))
    driver.send(table)
    assert join_run(ours, None, join(0)) == table
    assert driver.poll() == [join(0)]


def test_a_task_that_is_told_to_gather_does(pair: tuple[DriverClient, DriverClient]) -> None:
    ours, driver = pair
    driver.send(Gather())
    table = join_run(ours, lambda text: [text, json.dumps(to_json(join(1)))], join(0))
    assert table == peers([join(0), join(1)])


def test_a_task_without_a_driver_gathers() -> None:
    assert join_run(None, lambda text: [text], join(0)) == peers([join(0)])


def test_a_task_without_a_driver_and_without_a_way_to_gather_says_so() -> None:
    with pytest.raises(LinkClosed, match="cannot be reached"):
        join_run(None, None, join(0))


def test_a_task_that_comes_too_late_is_stopped(pair: tuple[DriverClient, DriverClient]) -> None:
    ours, driver = pair
    driver.send(Stop())
    with pytest.raises(Stopped):
        join_run(ours, None, join(0))


def test_a_driver_that_goes_away_meanwhile_ends_the_wait(pair: tuple[DriverClient, DriverClient]) -> None:
    ours, driver = pair
    driver.close()
    with pytest.raises(LinkClosed):
        join_run(ours, None, join(0))


def test_the_wait_for_the_others_has_an_end(
    pair: tuple[DriverClient, DriverClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "WAIT_S", 0.05)
    with pytest.raises(LinkClosed, match="did not start"):
        join_run(pair[0], None, join(0))
