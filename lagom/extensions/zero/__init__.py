"""ZeRO: optimizer state, gradients and parameters, each sharded over the ranks.

Start with ``zero_steps.py`` (what a run enters), ``sharded_optimizer.py`` (level 1), ``gradient_shards.py`` (level 2),
``parameters/`` (level 3). ``optimizer_probe.py`` finds out how an optimizer can be sharded, and ``optimizer_group.py``
steps it. ``gradient_access.py`` has the functions of torch that see shards; all else that reads a gradient makes it
whole. ``deepspeed/`` drives DeepSpeed's engine instead, and ``memory_plan/`` computes the bytes that each level needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from lagom.extension import Extension, Settings
from lagom.settings import check_one_of

if TYPE_CHECKING:
    import argparse

    from lagom.config import TorchDistributedConfig
    from lagom.on_rank.oom_report import Shortage
    from lagom.plan import Plan
    from lagom.session.session import Session

Backend = Literal["torch", "deepspeed"]


@dataclass(frozen=True, kw_only=True, eq=False)
class ZeroSettings(Settings):
    """Fields of the config for sharding."""

    title = "Sharding (ZeRO)"

    zero_lvl: int = 0
    """Level of sharding over the ranks: 0 nothing, 1 optimizer state, 2 also gradients, 3 also parameters."""
    backend: Backend = "torch"
    """Library that shards: "torch" is lagom itself; "deepspeed" drives DeepSpeed's engine, at stage ``zero_lvl``."""
    deepspeed_config: Mapping[str, Any] | None = None
    """Passed through to DeepSpeed: offloading, its optimizers, bf16 and fp16, accumulation, clipping."""

    @staticmethod
    def check(config: TorchDistributedConfig) -> None:
        """See ``Settings``."""
        check_one_of("zero_lvl", config.zero_lvl, (0, 1, 2, 3))
        check_one_of("backend", config.backend, get_args(Backend))
        if config.backend == "deepspeed":
            if config.verify:
                raise ValueError("verify=True compares gradients, which DeepSpeed keeps; verify with backend='torch'")
            if config.mixed_precision == "fp16":
                raise ValueError(
                    "mixed_precision='fp16' scales losses by itself; with backend='deepspeed' set "
                    "deepspeed_config={'fp16': {'enabled': True}}, or mixed_precision='bf16'"
                )
            if config.micro_batches is not None:
                raise ValueError(
                    "micro_batches is for backend='torch'; with 'deepspeed' use its activation checkpointing, or "
                    "smaller batches with deepspeed_config={'gradient_accumulation_steps': ...}"
                )
            if asked := config.gradient_changes():
                raise ValueError(
                    f"{asked} is not for backend='deepspeed', which has settings for it in deepspeed_config"
                )
        if config.deepspeed_config is None:
            return
        if not isinstance(config.deepspeed_config, Mapping):
            raise ValueError(f"deepspeed_config is {config.deepspeed_config!r}; want a dict, as DeepSpeed takes it")
        if config.backend != "deepspeed":
            raise ValueError("deepspeed_config is given, but backend is 'torch'; set backend='deepspeed' or drop it")


class Zero(Extension):
    """Sharding by lagom, or by DeepSpeed."""

    name = "zero"
    settings = ZeroSettings

    def is_wanted(self, plan: Plan) -> bool:
        """See ``Extension``."""
        return plan.config.zero_lvl > 0 or plan.config.backend == "deepspeed"

    def in_clear(self, config: TorchDistributedConfig) -> str:
        """See ``Extension``."""
        return "gloo, by which DeepSpeed exchanges on the CPU," if config.backend == "deepspeed" else ""

    def rank(self, session: Session) -> AbstractContextManager[None]:
        """See ``Extension``."""
        if session.config.backend == "deepspeed":
            from lagom.extensions.zero.deepspeed.engine_patches import drive_by_deepspeed

            drive_by_deepspeed(session)
        elif session.world_size > 1:
            from lagom.extensions.zero.zero_steps import shard

            shard(session)
        else:
            from lagom.extensions.zero.snapshot_shards import SnapshotShards

            session.resumption.shards = SnapshotShards(session)  # a snapshot of several ranks has shards
        return nullcontext()

    def explain_out_of_memory(self, session: Session, shortage: Shortage) -> str:
        """See ``Extension``; names the level that would fit."""
        from lagom.extensions.zero.memory_plan.level_advice import advise_level

        return advise_level(session, shortage)

    def add_training_options(self, parser: argparse.ArgumentParser) -> None:
        """See ``Extension``."""
        parser.add_argument(
            "--zero",
            type=int,
            default=0,
            metavar="LEVEL",
            help="ZeRO level: 0 shards nothing (default), 1 optimizer state, 2 also gradients, 3 also parameters",
        )

    def config_fields(self, args: argparse.Namespace) -> dict[str, Any]:
        """See ``Extension``."""
        return {"zero_lvl": args.zero}
