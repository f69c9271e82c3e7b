"""``lagom.plan``: every "auto" resolved before anything starts, or an error that says what would fit."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from lagom.cluster import Cluster
from lagom.config import TorchDistributedConfig
from lagom.errors import LagomError, PlanError
from lagom.plan import plan


def spark(slots: int, **more: Any) -> Cluster:
    return Cluster(launcher="spark", slots=slots, **more)


def local(slots: int, **more: Any) -> Cluster:
    return Cluster(launcher="local", slots=slots, oversubscribe=True, **more)


@pytest.mark.needs("zero")
def test_deepspeed_has_all_levels_and_its_own_settings() -> None:
    config = TorchDistributedConfig(backend="deepspeed", zero_lvl=3, deepspeed_config={"a": 1})
    found = plan(config, local(2)).config
    assert (found.backend, found.zero_lvl, found.deepspeed_config) == ("deepspeed", 3, {"a": 1})


@pytest.mark.parametrize(
    ("world_size", "cluster", "found", "num_slots"),
    [
        (None, spark(3), 3, 3),
        (None, local(2), 2, 2),
        (2, spark(5), 2, 2),
        (5, local(2), 5, 5),  # processes of one machine may be more than its cores
        (None, spark(2, gpus_per_slot=4), 8, 2),
    ],
)
def test_slots_are_taken_as_asked_for_and_all_where_no_number_is(
    world_size: int | None, cluster: Cluster, found: int, num_slots: int
) -> None:
    made = plan(TorchDistributedConfig(world_size=world_size), cluster)
    assert (made.world_size, made.num_slots) == (found, num_slots)


def test_a_machine_of_many_cores_gets_as_many_ranks_as_it_may_hold() -> None:
    assert plan(TorchDistributedConfig(), local(2000, most_ranks=960)).world_size == 960


@pytest.mark.parametrize(
    ("world_size", "cluster", "said"),
    [
        (None, spark(0), "0 task slots"),
        (3, spark(2), "2 task slots"),
        (961, local(2, most_ranks=960), "this machine holds at most 960 ranks"),
        (3, local(2, gpus_per_slot=1), "2 GPUs"),
        (9, spark(2, gpus_per_slot=4), "8 GPUs"),
    ],
)
def test_more_than_there_is_room_for_is_an_error(world_size: int | None, cluster: Cluster, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        plan(TorchDistributedConfig(world_size=world_size), cluster)


def test_with_sparks_encryption_ranks_encrypt_unless_it_is_allowed_not_to() -> None:
    found = [
        plan(TorchDistributedConfig(allow_unencrypted_collectives=allowed), spark(2, encrypted=encrypted))
        for encrypted, allowed in ((False, False), (True, False), (True, True))
    ]
    assert [(one.encrypted, one.encrypts_ranks) for one in found] == [(False, False), (True, True), (True, False)]
    assert [one.in_clear for one in found] == ["", "", ""]


@pytest.mark.parametrize(
    ("config", "gpus", "said"),
    [({}, 1, "NCCL"), ({"collectives": "gloo"}, 0, "gloo"), ({"backend": "deepspeed"}, 0, "DeepSpeed")],
)
def test_what_cannot_encrypt_is_named(config: dict[str, Any], gpus: int, said: str) -> None:
    def made(encrypted: bool, **more: Any) -> str:
        return plan(
            TorchDistributedConfig(**config, **more), spark(2, gpus_per_slot=gpus, encrypted=encrypted)
        ).in_clear

    assert said in made(True)
    assert made(True, allow_unencrypted_collectives=True) == made(False) == ""


def test_too_few_slots_is_an_error_with_both_numbers_and_the_remedy() -> None:
    with pytest.raises(PlanError) as raised:
        plan(TorchDistributedConfig(world_size=4), spark(2, remedy="raise spark.executor.instances"))
    text = str(raised.value)
    assert "4" in text
    assert "2 task slots" in text
    assert "raise spark.executor.instances" in text
    assert isinstance(raised.value, LagomError)


def test_no_error_tells_to_ask_for_no_rank_at_all() -> None:
    with pytest.raises(PlanError) as raised:
        plan(TorchDistributedConfig(), spark(0, remedy="add executors"))
    assert "at most 0" not in str(raised.value)
    assert "add executors" in str(raised.value)


@pytest.mark.parametrize(("world_size", "num_slots"), [(1, 1), (4, 1), (5, 2), (8, 2)])
def test_a_task_with_several_gpus_holds_several_ranks(world_size: int, num_slots: int) -> None:
    found = plan(TorchDistributedConfig(world_size=world_size), spark(2, gpus_per_slot=4))
    assert (found.world_size, found.ranks_per_slot, found.num_slots) == (world_size, 4, num_slots)
    assert found.gpu


def test_a_run_without_gpus_is_none_on_gpus() -> None:
    assert not plan(TorchDistributedConfig(), spark(2)).gpu


def test_the_config_names_the_run_else_the_function_does() -> None:
    assert plan(TorchDistributedConfig(), local(1), "train").name == "train"
    assert plan(TorchDistributedConfig(name="mine"), local(1), "train").name == "mine"


def test_what_the_ranks_must_know_is_in_the_plan_and_the_plan_travels() -> None:
    given = [b"x" * 1_000_000]
    config = TorchDistributedConfig(batches="per_rank", evaluation="sharded", hb_interval=3, train_set=given)
    travelled = pickle.dumps(plan(config, spark(2, barrier=False)))
    assert len(travelled) < 10_000
    found = pickle.loads(travelled)
    assert (found.config.batches, found.config.evaluation, found.config.hb_interval) == ("per_rank", "sharded", 3.0)
    assert (found.world_size, found.barrier) == (2, False)
