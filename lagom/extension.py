"""``Extension``: an optional part of lagom as the trunk sees it. ``extensions/registry.py`` lists all of them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import argparse
    import os
    from collections.abc import Callable, Mapping

    from lagom.config import TorchDistributedConfig
    from lagom.config.trials import TrialsConfig
    from lagom.driver.driver_run import DriverRun
    from lagom.driver.view_part import ViewPart
    from lagom.on_rank.oom_report import Shortage
    from lagom.on_rank.rank_call import RankCall
    from lagom.plan import Plan
    from lagom.result import Result
    from lagom.run_folder import RunFolder
    from lagom.session.session import Session
    from lagom.watch.run_dir import RunRecords
    from lagom.wire.messages import LocalEvent
    from lagom.wire.server import DriverServer


class Settings:
    """Base class of the fields that an extension adds to the config: a frozen dataclass, from which it inherits."""

    title = ""
    """Heading of the fields in ``help(TorchDistributedConfig)``."""

    @staticmethod
    def check(config: TorchDistributedConfig) -> None:
        """Check the fields of the extension in ``config``.

        Raises:
            ValueError: if a field has a wrong value, or does not go with another.
        """

    @staticmethod
    def check_trials(config: TrialsConfig) -> None:
        """Check the fields of the extension in the ``config`` of many trials, before ``check``.

        Raises:
            ValueError: if a field has a value that trials cannot have.
        """


class Extension:
    """An optional part of lagom; a run enters only those that ``is_wanted`` names, and imports no other.

    A subclass lies in the ``__init__.py`` of its folder and imports what it needs inside of its methods, since every
    process imports that file.
    """

    name = ""
    """Name of the folder in ``lagom/extensions``."""
    settings: type[Settings] = Settings
    """Class of the fields that the extension adds to the config; ``Settings`` itself for none."""
    messages = ""
    """Name of the module with the extension's messages; "" without one."""
    served_packages: tuple[str, ...] = ()
    """Top-level packages that programs import from lagom on ranks that do not have them."""

    def is_wanted(self, plan: Plan) -> bool:
        """Return whether a run with ``plan`` uses the extension."""
        return False

    def obstacle(self, config: TorchDistributedConfig, world_size: int) -> str:
        """Return why a run of ``world_size`` ranks cannot have the extension's settings; "" if it can."""
        return ""

    def needs_sources(self, config: TorchDistributedConfig) -> bool:
        """Return whether the call must have the text of the source files of its functions."""
        return False

    def waits_for_user(self, config: TorchDistributedConfig) -> bool:
        """Return whether a rank may wait for a person, and the other ranks for days for this rank."""
        return False

    def records_spans(self, plan: Plan) -> bool:
        """Return whether ranks record the spans of their activities."""
        return False

    def provided(self, provided: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the arguments that the config provides, with those replaced that cannot travel to ranks.

        Return ``provided`` itself if none is replaced.

        Raises:
            ValueError: if an argument cannot be used on a rank.
            DataError: if an argument cannot be replaced.
        """
        return provided

    def complete_records(self, plan: Plan, records: RunRecords) -> None:
        """Add files that are made of the records of a run, which has ended; called before ``records`` are closed."""

    def report(self, folder: RunFolder) -> str:
        """Return an HTML page about the recorded run in ``folder``; "" if the extension makes none.

        Raises:
            ValueError: when ``folder`` holds no run.
            LagomError: when its records are damaged.
        """
        return ""

    def notebook_chart(self, folder: RunFolder) -> str:
        """Return HTML that a notebook shows below the result of the run in ``folder``; "" for nothing."""
        return ""

    def runs_config(self, config: TorchDistributedConfig) -> Callable[[Callable[..., Any], Any], Any] | None:
        """Return the function that runs a call with a config of the extension's own class; None for other configs."""
        return None

    def resumes_run(self) -> Callable[[str | os.PathLike[str], int | None, Any], Result] | None:
        """Return the function that continues a run, given its folder, number of ranks and launcher; None: cannot."""
        return None

    def check_call(self, config: TorchDistributedConfig) -> None:
        """Check what only the driver's process can tell of ``config``.

        Raises:
            ValueError: if a setting cannot work in this process.
        """

    def view(self, plan: Plan, channel: DriverServer, put: Callable[[LocalEvent], None]) -> ViewPart | None:
        """Return a part for the driver's view of an attempt; None without one.

        Args:
            put: passes an event to the thread that shows the run.
        """
        return None

    def serves_host(self, plan: Plan) -> Callable[..., None] | None:
        """Return the function that serves a host process instead of one run of its ranks; None: there is no other."""
        return None

    def check_run(self, run: DriverRun) -> None:
        """Check a run, before anything of it is recorded.

        Raises:
            LagomError: if the run must not start.
        """

    def driver(self, run: DriverRun) -> AbstractContextManager[None]:
        """Return the context of a run in the driver's process; entered before the ranks start."""
        return nullcontext()

    def process(self, rank_call: RankCall) -> AbstractContextManager[None]:
        """Return the context of a rank's process; entered before torch is used, and left when the process ends."""
        return nullcontext()

    def in_clear(self, config: TorchDistributedConfig) -> str:
        """Return the library by which the extension has ranks exchange between hosts unencrypted; "" if it has none."""
        return ""

    def rank(self, session: Session) -> AbstractContextManager[None]:
        """Return the context of a rank; entered when its ``Session`` is made and torch is not patched yet.

        The context may subscribe to ``session.events``.
        """
        return nullcontext()

    def explain_out_of_memory(self, session: Session, shortage: Shortage) -> str:
        """Return settings of the extension with which a rank that ran out of memory would need less; "" for none.

        Every extension is asked, also those that the run does not use.
        """
        return ""

    def script(self) -> AbstractContextManager[None]:
        """Return the context of a script that starts ranks itself, and that ``lagom run`` runs in its own process."""
        return nullcontext()

    def add_commands(self, commands: Any) -> None:
        """Add the extension's commands to those of ``lagom``; ``commands`` is argparse's object for subparsers."""

    def add_training_options(self, parser: argparse.ArgumentParser) -> None:
        """Add the extension's options that ``lagom run`` has, and other commands that train, such as a search."""

    def add_run_options(self, run: argparse.ArgumentParser) -> None:
        """Add the extension's options that only ``lagom run`` has."""

    def adapt_arguments(self, args: argparse.Namespace) -> None:
        """Change the arguments of a command that runs a script, before they are used.

        ``args.script`` is the list of the script and its arguments. Options of ``lagom run`` may be missing.
        """

    def config_fields(self, args: argparse.Namespace) -> dict[str, Any]:
        """Return the fields of the config that the extension's options set; options of ``lagom run`` may be missing."""
        return {}
