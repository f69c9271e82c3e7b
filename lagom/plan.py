"""``Plan``: all facts of a run; launcher and number of ranks are resolved once, before anything starts."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from typing import Any

from lagom.cluster import Cluster, backend_word, device_word
from lagom.config import TorchDistributedConfig
from lagom.errors import PlanError
from lagom.extensions.registry import EXTENSIONS


@dataclass(frozen=True, kw_only=True, slots=True)
class Rehearsal:
    """Limits of a run that is cut short and recorded, to be compared with another.

    See Note [Rehearsals] in extensions/verify/rehearsals.py.
    """

    num_backwards: int = 64
    """Most backwards that run; the program is ended when it begins the next one."""
    num_batches: int = 8
    """Most batches of a pass over a data loader; the last one is the data set's last, which may be shorter."""
    num_in_long_passes: int = 16
    """Number of backwards after which passes are shorter still, so that a program of some epochs reaches its end."""
    num_batches_of_short: int = 2
    """Most batches of such a shorter pass."""
    seconds: float | None = None
    """Time limit, checked only before the 9th and the 25th backward, so that a busy machine compares the same steps.
    Only for one rank: several ranks would end at different places. None: no limit."""
    group_size: int = 1
    """Number of consecutive batches that are dealt together: with ``batches="per_rank"`` one for each rank."""
    expected: str = ""
    """Name of the exception with which one process ended: a rank that ends with it too reports no failure."""
    pinned: bool = False
    """Turn dropout off, and derive a sample's random numbers from its index, so that ranks draw none of their own."""
    jumps: bool = False
    """Make clocks jump at each read by the program, so that values that depend on time differ between two runs."""
    other_threads: bool = False
    """Let torch use one thread instead of several, or two instead of one, which changes rounding and nothing else."""
    snapshot_after: int | None = None
    """Take a snapshot when the program asks for a batch after this many backwards; None: take none."""
    num_before: int = 0
    """Number of backwards before the snapshot that the program goes on from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The facts of a run, equal on the driver and all ranks: the config, and facts of the cluster.

    Only ``ranks_per_slot`` of a local run differs on the ranks: there it is the number of all ranks.
    """

    config: TorchDistributedConfig
    """The settings, without the function's arguments, which travel with the call."""
    name: str
    launcher: str
    world_size: int
    ranks_per_slot: int
    """Number of ranks in one task: one per accelerator of the task, else one."""
    barrier: bool
    gpu: bool
    """True if each rank has a GPU or another accelerator, alone or shared with other ranks."""
    names_gpu: bool = True
    """True if the program places its tensors itself, or all are on the CPU; else see run_state/mixed_devices.py."""
    keeps_logs: bool = False
    """True if the output of every rank is sent to the driver."""
    encrypted: bool = False
    """True if the channel between driver and ranks is encrypted, since the user has set encryption in Spark."""
    encrypts_ranks: bool = False
    """True if ranks on several hosts encrypt what they send each other."""
    in_clear: str = ""
    """Library that would send unencrypted although ranks are to encrypt; ranks must then share a host. Empty: none."""
    already_distributed: bool = False
    """True if the program is written for torchrun: its ranks then find torchrun's variables."""
    packages: tuple[str, ...] = ()
    """Packages that the program imports and the driver has; see program/failure_advice.py."""
    rehearsal: Rehearsal | None = None
    """Limits of a rehearsal, which shows no output and keeps no files; None in the run itself."""
    searches: bool = False
    """True if tasks run one trial of a search after another; all other fields then describe one trial."""
    reports_pass_losses: bool = False
    """True if a trial that logs no metric reports the mean training loss of each pass over a loader."""

    @property
    def num_slots(self) -> int:
        """Number of slots that the run takes: on Spark its tasks; a local run has one task, whatever the number."""
        return -(-self.world_size // self.ranks_per_slot)

    def with_config(self, **changes: Any) -> Plan:
        """Return this plan with other settings.

        Raises:
            ValueError: if a setting has a wrong value.
        """
        return dataclasses.replace(self, config=dataclasses.replace(self.config, **changes))


def plan(
    config: TorchDistributedConfig,
    cluster: Cluster,
    name: str = "lagom",
    *,
    already_distributed: bool = False,
    names_gpu: bool = True,
    packages: tuple[str, ...] = (),
) -> Plan:
    """Resolve ``config`` against the cluster's facts.

    Args:
        name: name of the run, unless the config has one.
        already_distributed: see ``Plan``, as for ``names_gpu`` and ``packages``; ``facts_of_code`` finds them.

    Raises:
        PlanError: if the run cannot fit, with the remedy; or if an extension has an obstacle.
    """
    ranks_per_slot = max(1, cluster.gpus_per_slot)
    room = cluster.slots * ranks_per_slot
    most = room if cluster.most_ranks is None else cluster.most_ranks
    world_size = config.world_size or min(room, most)
    if cluster.most_ranks is not None and world_size > most:
        raise PlanError(f"world_size is {world_size}; {_WHERE[cluster.launcher]} holds at most {most} ranks")
    if room == 0 or (world_size > room and not (cluster.oversubscribe and not cluster.gpus_per_slot)):
        what = f"{device_word(cluster.device_kind)}s" if cluster.gpus_per_slot else "task slots"
        remedies = ([f"ask for at most {room}"] if room else []) + ([cluster.remedy] if cluster.remedy else [])
        raise PlanError(
            f"world_size is {world_size or 'all'}, but {_WHERE[cluster.launcher]} has {room} {what}; "
            + (", or ".join(remedies) or "start some first")
        )
    if obstacle := next(filter(None, (extension.obstacle(config, world_size) for extension in EXTENSIONS)), ""):
        raise PlanError(obstacle)
    encrypts_ranks = cluster.encrypted and not config.allow_unencrypted_collectives
    return Plan(
        config=dataclasses.replace(config, module=None, train_set=None, test_set=None, dataset=None, hparams={}),
        name=config.name or name,
        launcher=cluster.launcher,
        world_size=world_size,
        ranks_per_slot=ranks_per_slot,
        barrier=cluster.barrier,
        gpu=cluster.gpus_per_slot > 0,
        names_gpu=names_gpu,
        keeps_logs=config.log == "all" or (config.run_dir is not None and bool(os.fspath(config.run_dir))),
        encrypted=cluster.encrypted,
        encrypts_ranks=encrypts_ranks,
        in_clear=_in_clear(config, cluster) if encrypts_ranks else "",
        already_distributed=already_distributed,
        packages=packages,
    )


def _in_clear(config: TorchDistributedConfig, cluster: Cluster) -> str:
    """Return the library that ranks use and that cannot encrypt between hosts; empty if the config chooses none."""
    if cluster.gpus_per_slot:
        return backend_word(cluster.device_kind)
    own = "gloo (collectives='gloo')" if config.collectives == "gloo" else ""
    return next(filter(None, (extension.in_clear(config) for extension in EXTENSIONS)), own)


_WHERE = {"spark": "Spark", "local": "this machine", "inline": "this process"}
