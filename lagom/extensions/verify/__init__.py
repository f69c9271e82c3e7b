"""``verify=True``: rehearses a run before it begins, and compares the rehearsal with one process.

Start with ``rehearsals.py`` (on the driver) and ``on_rank/rehearsal.py`` (on a rank).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lagom.extension import Extension, Settings
from lagom.settings import check_one_of

if TYPE_CHECKING:
    import argparse

    from lagom.config import TorchDistributedConfig
    from lagom.driver.driver_run import DriverRun
    from lagom.plan import Plan
    from lagom.session.session import Session


@dataclass(frozen=True, kw_only=True, eq=False)
class VerifySettings(Settings):
    """Fields of the config for rehearsals."""

    title = "Verification"

    verify: bool = False
    """Before the run, rehearses its first steps in one process and on the ranks, and compares. If the numbers differ, a
    ``VerificationError`` says why, and which setting gives the numbers of one process. With ``snapshot_every_s``, also
    rehearses a restart from a snapshot."""

    @staticmethod
    def check(config: TorchDistributedConfig) -> None:
        """See ``Settings``."""
        check_one_of("verify", config.verify, (False, True))
        if (asked := config.gradient_changes()) and config.verify:
            raise ValueError(f"verify=True compares with one process, and {asked} gives other numbers; verify without")


class Verify(Extension):
    """Rehearsals before a run."""

    name = "verify"
    settings = VerifySettings

    def is_wanted(self, plan: Plan) -> bool:
        """See ``Extension``."""
        return plan.rehearsal is not None or plan.config.verify

    def add_run_options(self, run: argparse.ArgumentParser) -> None:
        """See ``Extension``."""
        run.add_argument(
            "--verify",
            action="store_true",
            help="rehearse the first steps in one process and on the ranks; exit with status 3 where they do not agree",
        )

    def config_fields(self, args: argparse.Namespace) -> dict[str, Any]:
        """See ``Extension``."""
        return {"verify": args.verify} if "verify" in args else {}

    def check_run(self, run: DriverRun) -> None:
        """Rehearse the run, and show the result; see ``Extension``."""
        if not run.plan.config.verify or run.plan.world_size == 1:
            return
        from lagom.extensions.verify.rehearsals import verify
        from lagom.extensions.verify.verification import say_not_rehearsed, show

        if run.plan.already_distributed:
            say_not_rehearsed(run.plan.name)
            return
        run.timings.end("prepare")
        show(verify(run.launcher, run.plan, run.call))
        run.timings.end("verify")

    def rank(self, session: Session) -> AbstractContextManager[None]:
        """See ``Extension``."""
        if session.plan.rehearsal is None:
            return nullcontext()
        from lagom.extensions.verify.on_rank.rank_rehearsal import rehearsal_on_rank

        return rehearsal_on_rank(session)
