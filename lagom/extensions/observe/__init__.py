"""Ways to look at a run: ``report/`` and ``timeline/`` after it, ``tracking/`` (MLflow and others) and ``debugger/``
during it, ``doctor/`` before it.

Start with ``report/report.py``, ``timeline/timeline.py``, ``tracking/mlflow.py``, ``debugger/rank_debugger.py`` or
``doctor/visit.py``.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from lagom.extension import Extension, Settings
from lagom.settings import is_int

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from lagom.config import TorchDistributedConfig
    from lagom.config.trials import TrialsConfig
    from lagom.driver.view_part import ViewPart
    from lagom.on_rank.rank_call import RankCall
    from lagom.plan import Plan
    from lagom.run_folder import RunFolder
    from lagom.session.session import Session
    from lagom.watch.run_dir import RunRecords
    from lagom.wire.messages import LocalEvent
    from lagom.wire.server import DriverServer

Debug = Literal["first"] | int | None


@dataclass(frozen=True, kw_only=True, eq=False)
class ObserveSettings(Settings):
    """Fields of the config for timelines and the debugger."""

    title = "Looking at a run"

    timeline: bool | str | os.PathLike[str] = False
    """Records what all ranks do, for chrome://tracing or Perfetto, in "timeline.json" of the run's folder; a path
    writes it there as well. The timeline has the first 100 steps, and samples of later ones."""
    debug: Debug = None
    """Opens a debugger on a rank whose function has failed, before the run ends. "first": on the first rank that fails;
    a number: on this rank, where ``breakpoint()`` stops as well. Ranks then wait for each other for up to ten days.
    None: only ``breakpoint()`` opens a debugger, on rank 0. docs/debug.md shows how to use it."""

    @staticmethod
    def check(config: TorchDistributedConfig) -> None:
        """See ``Settings``."""
        _check_timeline(config)
        if config.debug not in (None, "first") and (not is_int(config.debug) or int(config.debug) < 0):
            raise ValueError(f"debug is {config.debug!r}; want 'first', the number of a rank, or None")
        if config.debug is not None and config.launcher == "inline":
            raise ValueError(
                "launcher='inline' runs in this process, where breakpoint() and pdb.pm() stop by themselves; drop debug"
            )

    @staticmethod
    def check_trials(config: TrialsConfig) -> None:
        """See ``Settings``."""
        if config.debug is not None:
            raise ValueError(
                f"debug is {config.debug!r}, but several trials run at a time, and none stops for a debugger; debug a "
                "run with the hyperparameters of a trial, by TorchDistributedConfig"
            )


def _check_timeline(config: TorchDistributedConfig) -> None:
    timeline = config.timeline
    if not isinstance(timeline, (bool, str, os.PathLike)):
        raise ValueError(f"timeline is {timeline!r}; want True, False or the path of a file to write")
    if timeline and (config.run_dir is None or not os.fspath(config.run_dir)):
        raise ValueError("timeline is kept in the run's folder, but run_dir is None; name a folder there")
    if isinstance(timeline, (str, os.PathLike)):
        folder = os.path.dirname(os.path.abspath(os.path.expanduser(timeline)))
        if not os.path.isdir(folder):
            raise ValueError(f"timeline is {timeline!r}; there is no folder {folder} to write it to")


class Observe(Extension):
    """Timelines, trackers and the debugger."""

    name = "observe"
    settings = ObserveSettings
    messages = "lagom.extensions.observe.debugger.messages"

    def is_wanted(self, plan: Plan) -> bool:
        """See ``Extension``."""
        return True  # a program may call breakpoint(), or import a tracker

    def obstacle(self, config: TorchDistributedConfig, world_size: int) -> str:
        """See ``Extension``."""
        if isinstance(config.debug, int) and config.debug >= world_size:
            return f"debug is rank {config.debug}, but the run has {world_size} ranks, from rank 0 on"
        return ""

    def waits_for_user(self, config: TorchDistributedConfig) -> bool:
        """See ``Extension``."""
        return config.debug is not None

    def records_spans(self, plan: Plan) -> bool:
        """See ``Extension``."""
        return bool(plan.config.timeline) and plan.rehearsal is None

    def check_call(self, config: TorchDistributedConfig) -> None:
        """See ``Extension``."""
        if config.debug is None:
            return
        from lagom.extensions.observe.debugger.terminal import NOBODY, can_type

        if not can_type():
            raise ValueError(f"debug is {config.debug!r}, but {NOBODY}; run it there, or drop debug")

    def view(self, plan: Plan, channel: DriverServer, put: Callable[[LocalEvent], None]) -> ViewPart:
        """See ``Extension``."""
        from lagom.extensions.observe.debugger.terminal import DebugTerminal

        return DebugTerminal(plan, channel, put)

    def process(self, rank_call: RankCall) -> AbstractContextManager[None]:
        """See ``Extension``."""
        from lagom.extensions.observe.first_use import breakpoints_on_rank

        return breakpoints_on_rank(rank_call)

    def rank(self, session: Session) -> AbstractContextManager[None]:
        """See ``Extension``."""
        from lagom.extensions.observe.first_use import trackers_on_rank

        if (breakpoints := session.parts.get("observe")) is not None:
            breakpoints.join(session)
        if (spans := session.spans) is not None:
            from lagom.extensions.observe.timeline.program_spans import recorded_calls

            session.events.patched.subscribe(lambda stack: stack.enter_context(recorded_calls(spans)))
        return trackers_on_rank(session)

    def complete_records(self, plan: Plan, records: RunRecords) -> None:
        """Merge the timelines of the ranks; see ``Extension``."""
        if plan.config.timeline:
            from lagom.extensions.observe.timeline.timeline import merge_timelines

            also = None if isinstance(plan.config.timeline, bool) else plan.config.timeline
            records.complete(lambda folder: merge_timelines(folder, also))

    def report(self, folder: RunFolder) -> str:
        """See ``Extension``."""
        from lagom.extensions.observe.report.report import report

        return report(folder)

    def notebook_chart(self, folder: RunFolder) -> str:
        """See ``Extension``."""
        from lagom.extensions.observe.report.notebook_chart import notebook_chart

        return notebook_chart(folder)

    def add_commands(self, commands: Any) -> None:
        """See ``Extension``."""
        from lagom.extensions.observe.observe_commands import add_observe_commands

        add_observe_commands(commands)

    def add_run_options(self, run: argparse.ArgumentParser) -> None:
        """See ``Extension``."""
        run.add_argument("--timeline", action="store_true", help="write a timeline of all ranks to the run's folder")
        run.add_argument(
            "--timeline-file", "--timeline-filename", metavar="FILE", help="write the timeline to FILE as well"
        )

    def config_fields(self, args: argparse.Namespace) -> dict[str, Any]:
        """See ``Extension``."""
        if "timeline" not in args:
            return {}
        rank: int | None = getattr(args, "rank", None)
        debug = None if not getattr(args, "debug", False) else "first" if rank is None else rank
        return {"timeline": args.timeline_file or args.timeline, "debug": debug}
