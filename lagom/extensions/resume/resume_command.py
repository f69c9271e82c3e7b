"""``lagom resume``, and the option ``--snapshot-every`` of ``lagom run``."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from lagom import experiment
from lagom.cli import start_session
from lagom.cli_options import add_place
from lagom.config.torch_distributed import Launcher
from lagom.watch.run_dir import RESULT


def add_resume_command(commands: Any) -> None:
    """Add ``lagom resume`` to the commands."""
    resume = commands.add_parser(
        "resume",
        help="continue a run from its last snapshot",
        description="Go on with a run that was called with snapshot_every_s, and whose process has ended.",
    )
    resume.set_defaults(command=_resume)
    named = "its folder, or a part of its name that no other run has, or its URL"
    resume.add_argument("run", metavar="RUN", help=named)
    add_place(resume, "number of ranks; as before if not given", otherwise="as before if not given")


def add_snapshot_option(run: argparse.ArgumentParser) -> None:
    """Add ``--snapshot-every`` to the options of a run."""
    run.add_argument(
        "--snapshot-every",
        type=_seconds_or_auto,
        metavar="S",
        help="save a snapshot of the program every S seconds, from which a restart or lagom resume continues; "
        "auto: every 10 s, or less often if snapshots would take more than 1%% of the time",
    )


def _seconds_or_auto(text: str) -> float | str:
    try:
        return text if text == "auto" else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}; want seconds, or auto") from None


def _resume(args: argparse.Namespace) -> int:
    launcher: Launcher | None = None
    if args.master is not None:
        launcher = "local" if args.master == "local" else "spark"
        if launcher == "spark":
            start_session(args.master, args.n)
    result = experiment.resume(args.run, world_size=args.n, launcher=launcher)
    folder = result.run_url or str(result.run_dir)
    text = f"lagom: the run has ended. {folder}/{RESULT} has its result as text"
    if result.value is not None:  # a script returns nothing
        text += f"; what the function returned, tensors and all, is experiment.resume({folder!r}).value"
    print(text, file=sys.stderr)
    return 0
