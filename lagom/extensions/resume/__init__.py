"""Snapshots of a running program, from which another attempt or another process continues.

Start with ``snapshot_taker.py`` (on a rank) and ``kept_call.py`` (on the driver); ``passes/`` has the passes over
loaders and their workers.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from lagom.extension import Extension, Settings
from lagom.settings import is_seconds

if TYPE_CHECKING:
    import argparse
    import os
    from collections.abc import Callable

    from lagom.config import TorchDistributedConfig
    from lagom.config.trials import TrialsConfig
    from lagom.driver.driver_run import DriverRun
    from lagom.plan import Plan
    from lagom.result import Result
    from lagom.session.session import Session


@dataclass(frozen=True, kw_only=True, eq=False)
class ResumeSettings(Settings):
    """Fields of the config for snapshots."""

    title = "Snapshots and resume"

    snapshot_every_s: float | Literal["auto"] | None = None
    """Seconds between two snapshots of the program's state in the run's folder, written while the training continues. A
    run that loses a rank continues from the last snapshot, and so does ``experiment.resume(run_dir)``, in the middle of
    a pass and with any number of ranks. "auto": every 10 s, or less often if snapshots would take more than 1% of the
    time. None: never. Needs ``batches="whole"``; docs/survive.md says for which programs, and what it costs."""

    @staticmethod
    def check(config: TorchDistributedConfig) -> None:
        """See ``Settings``."""
        every_s = config.snapshot_every_s
        if every_s not in (None, "auto") and not is_seconds(every_s):
            raise ValueError(f"snapshot_every_s is {every_s!r}; want seconds, more than 0, 'auto', or None for never")

    @staticmethod
    def check_trials(config: TrialsConfig) -> None:
        """See ``Settings``."""
        if config.snapshot_every_s is not None:
            raise ValueError(
                f"snapshot_every_s is {config.snapshot_every_s!r}, but trials keep no snapshots; a search that has "
                "ended goes on by resume=, with the folder of its run"
            )


class Resume(Extension):
    """Snapshots, and runs that continue from them."""

    name = "resume"
    settings = ResumeSettings

    def is_wanted(self, plan: Plan) -> bool:
        """See ``Extension``."""
        return plan.config.snapshot_every_s is not None

    def add_commands(self, commands: Any) -> None:
        """See ``Extension``."""
        from lagom.extensions.resume.resume_command import add_resume_command

        add_resume_command(commands)

    def add_run_options(self, run: argparse.ArgumentParser) -> None:
        """See ``Extension``."""
        from lagom.extensions.resume.resume_command import add_snapshot_option

        add_snapshot_option(run)

    def config_fields(self, args: argparse.Namespace) -> dict[str, Any]:
        """See ``Extension``."""
        return {"snapshot_every_s": args.snapshot_every} if "snapshot_every" in args else {}

    def needs_sources(self, config: TorchDistributedConfig) -> bool:
        """See ``Extension``."""
        return config.snapshot_every_s is not None

    def resumes_run(self) -> Callable[[str | os.PathLike[str], int | None, Any], Result] | None:
        """See ``Extension``."""
        from lagom.extensions.resume.resumed_run import resume_run

        return resume_run

    def driver(self, run: DriverRun) -> AbstractContextManager[None]:
        """See ``Extension``."""
        from lagom.extensions.resume.resumed_run import kept_run

        return kept_run(run)

    def rank(self, session: Session) -> AbstractContextManager[None]:
        """See ``Extension``."""
        from lagom.extensions.resume.rank_snapshots import snapshots_on_rank

        return snapshots_on_rank(session)
