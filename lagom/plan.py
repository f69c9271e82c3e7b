"""``Plan``: what a run will be, every "auto" resolved once, before anything starts."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from typing import Any

from lagom.cluster import Cluster
from lagom.config import TorchDistributedConfig
from lagom.errors import PlanError


@dataclass(frozen=True, kw_only=True, slots=True)
class Rehearsal:
    """A run that is cut short and recorded, to be compared with another. See Note [Rehearsals]."""

    num_backwards: int = 64
    """The program ends where it would begin one more."""
    num_batches: int = 8
    """Longest pass over a data loader; its last batch is the data set's last, which may be a shorter one."""
    num_in_long_passes: int = 16
    """After so many backwards, passes are shorter still: a program of some epochs comes to its end."""
    num_batches_of_short: int = 2
    seconds: float | None = None
    """After so long, the program ends where it would begin its 9th or its 25th backward: a busy machine does not change
    what is compared otherwise. For one rank alone: several would end in different places."""
    group_size: int = 1
    """Batches in a row that are dealt out together: with ``batches="per_rank"`` one for each rank."""
    expected: str = ""
    """Name of the exception that one process ended with: a rank that ends so too has no failure to report."""
    pinned: bool = False
    """No dropout, and a sample's random numbers follow from its index: draws of the ranks' own are taken out."""
    jumps: bool = False
    """Clocks jump at each look of the program's, so that what depends on time is another than in a run before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A run as it will be, equal on the driver and all ranks: the config, and facts of the cluster."""

    config: TorchDistributedConfig
    """The settings, without what the function is given: that travels with the call."""
    name: str
    launcher: str
    world_size: int
    ranks_per_slot: int
    """Ranks that one task holds: one per GPU of the task, else one."""
    barrier: bool
    gpu: bool
    """Each rank has a GPU: NCCL moves its gradients; else gloo does."""
    keeps_logs: bool = False
    """What every rank writes reaches the driver."""
    encrypted: bool = False
    """The channel between driver and ranks is encrypted, as what Spark sends is."""
    one_host: bool = False
    """Ranks on several hosts are refused: what they exchange is not encrypted."""
    already_distributed: bool = False
    """The program is written for torchrun: its ranks find the variables that torchrun sets."""
    rehearsal: Rehearsal | None = None
    """Not the run itself: nothing is shown, and no file comes home."""

    @property
    def num_slots(self) -> int:
        """Tasks that the run takes."""
        return -(-self.world_size // self.ranks_per_slot)

    def with_config(self, **changes: Any) -> Plan:
        """Return this plan with other settings.

        Raises:
            ValueError: when a setting has a value that it cannot have.
        """
        return dataclasses.replace(self, config=dataclasses.replace(self.config, **changes))


def plan(
    config: TorchDistributedConfig, cluster: Cluster, name: str = "lagom", *, already_distributed: bool = False
) -> Plan:
    """Resolve ``config`` against what the cluster has.

    Raises:
        PlanError: when it cannot fit, with the remedy.
    """
    ranks_per_slot = max(1, cluster.gpus_per_slot)
    room = cluster.slots * ranks_per_slot
    world_size = config.world_size or room
    if room == 0 or (world_size > room and not (cluster.oversubscribe and not cluster.gpus_per_slot)):
        what = "GPUs" if cluster.gpus_per_slot else "task slots"
        remedies = ([f"ask for at most {room}"] if room else []) + ([cluster.remedy] if cluster.remedy else [])
        raise PlanError(
            f"world_size is {world_size or 'all'}, but {_WHERE[cluster.launcher]} has {room} {what}; "
            + (", or ".join(remedies) or "start some first")
        )
    return Plan(
        config=dataclasses.replace(config, module=None, train_set=None, test_set=None, dataset=None, hparams={}),
        name=config.name or name,
        launcher=cluster.launcher,
        world_size=world_size,
        ranks_per_slot=ranks_per_slot,
        barrier=cluster.barrier,
        gpu=cluster.gpus_per_slot > 0,
        keeps_logs=config.log == "all" or (config.run_dir is not None and bool(os.fspath(config.run_dir))),
        encrypted=cluster.encrypted,
        one_host=cluster.encrypted and not config.allow_unencrypted_collectives,
        already_distributed=already_distributed,
    )


_WHERE = {"spark": "Spark", "local": "this machine", "inline": "this process"}
