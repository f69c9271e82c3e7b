"""The command line: ``lagom run`` runs an unchanged script, ``lagom runs`` lists runs; extensions add the rest.

A command of an extension that runs a script uses ``script_words``, ``read_script`` and ``start_session``.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from lagom import __version__, experiment
from lagom.cli_options import add_run_options, add_script, training_fields
from lagom.config import TorchDistributedConfig
from lagom.errors import LagomError, MetricError, RankError, RankTraceback, Terminated, VerificationError
from lagom.extensions.registry import EXTENSIONS
from lagom.program.detect_distributed import is_driver
from lagom.program.own_frames import cut_own_frames
from lagom.program.script import Script
from lagom.watch.runs import list_runs


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status.

    Returns:
        The script's own status, 1 if it raised; 2 for an error of lagom's; 3 if rehearsals differ; 130 after Ctrl-C;
        143 after SIGTERM.
    """
    parser = argument_parser()
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        runs = getattr(args, "words", None) or getattr(args, "module", None)
        hint = "; options of the script go behind it" if runs else ""
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    args.argv = list(sys.argv[1:] if argv is None else argv)
    try:
        return int(args.command(args))
    except VerificationError as error:
        print(f"lagom: {error}", file=sys.stderr)
        return 3
    except (ValueError, LagomError) as error:
        if isinstance(error.__cause__, RankTraceback) and not isinstance(error, MetricError):
            return _failed(error)
        print(f"lagom: {error}", file=sys.stderr)
        return 2
    except Terminated as end:
        return int(end.code or 0)
    except KeyboardInterrupt:
        return 130
    except BaseException as error:
        return _failed(error)


def run_script(args: argparse.Namespace) -> int:
    """Run the script that ``args`` of ``lagom run`` name; return the exit status."""
    words = script_words(args, "lagom run -n 4 train.py --epochs 2")
    on_spark = args.master not in (None, "local")
    try:
        script = read_script(words)
    except SyntaxError as error:
        return print_syntax_error(error)
    config = TorchDistributedConfig(
        **training_fields(args),
        world_size=args.n,
        launcher="spark" if on_spark else "local",
        log=args.log or "rank0",
        timeout_s=args.timeout,
        max_failures=args.max_failures,
        min_world_size=args.min_world_size,
        name=script.__name__,
    )
    if config.launcher == "spark":
        start_session(args.master, args.n)
    if is_driver(script):
        named = ["batches"] if args.batches else []
        return _drive(script, config if args.master else replace(config, launcher="auto"), named)
    experiment.lagom(script, config)
    return 0


def script_words(args: argparse.Namespace, example: str) -> list[str]:
    """Return the script (or -m and a module) and its arguments, after extensions have adapted ``args``.

    Raises:
        ValueError: if no script is given; the text shows ``example``.
    """
    args.script = ["-m", *args.module, *args.words] if args.module else args.words
    if not args.script:
        raise ValueError(f"there is nothing to run; want a script, as in: {example}")
    for extension in EXTENSIONS:
        extension.adapt_arguments(args)
    return list(args.script)


def print_syntax_error(error: SyntaxError) -> int:
    """Print the syntax error of a script as Python does; return the exit status."""
    print("".join(traceback.format_exception_only(error)), end="", file=sys.stderr)
    return 1


def read_script(words: Sequence[str]) -> Script:
    """Read the script in ``words``; put its folder (with -m: the working directory) first on ``sys.path``."""
    if words[0] == "-m":
        sys.path.insert(0, str(Path.cwd()))
        return Script.of_module(words[1], words[2:])
    script = Script.read(Path(words[0]), words[1:])
    sys.path.insert(0, str(Path(words[0]).resolve().parent))
    return script


def _drive(script: Script, config: TorchDistributedConfig, named: Sequence[str]) -> int:
    """Run a script that starts ranks itself, in this process; return its exit status.

    ``config`` and ``named`` are those of ``command_line_config``, for the ranks that the script starts.
    """
    try:
        with ExitStack() as stack:
            stack.enter_context(experiment.command_line_config(config, named))
            for extension in EXTENSIONS:
                stack.enter_context(extension.script())
            script()
    except VerificationError:
        raise
    except SystemExit as end:
        if not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else 1
    except Exception as error:
        cut_own_frames(error)
        return _failed(error)
    return 0


def _runs(args: argparse.Namespace) -> int:
    print(list_runs(args.folder or TorchDistributedConfig().run_dir, args.num))
    return 0


def _add_pack(commands: Any) -> None:
    pack = commands.add_parser(
        "pack",
        help="pack this Python environment for Spark's executors",
        description="Pack the environment of this Python into an archive that Spark unpacks on every executor, and "
        "print the settings for it. Needs venv-pack2 for virtual environments, conda-pack for those of conda.",
    )
    pack.set_defaults(command=_pack)
    pack.add_argument(
        "-o",
        "--output",
        default="environment.tar.gz",
        metavar="FILE",
        help="archive to write, .tar.gz or .zip; default: %(default)s",
    )
    pack.add_argument(
        "--python-prefix",
        metavar="FOLDER",
        help="folder in which executors have Python, such as /usr; default: where this machine has it; archives of "
        "conda have their own Python",
    )
    pack.add_argument("--force", action="store_true", help="replace an existing archive")


def _pack(args: argparse.Namespace) -> int:
    from lagom.spark.pack_environment import pack_environment

    print(pack_environment(Path(args.output), python_prefix=args.python_prefix, replace=args.force))
    return 0


def _failed(error: BaseException) -> int:
    """Print a failure as python would have printed the script's own; return the exit status."""
    cause = error.__cause__
    for note in getattr(error, "__notes__", ()):
        print(note, file=sys.stderr)
    if isinstance(error, RankError) and error.exit_status is not None:
        if isinstance(error.exit_status, int):
            return error.exit_status
        print(error.exit_status, file=sys.stderr)
        return 1
    if isinstance(cause, RankTraceback):
        print(f"on rank {cause.rank}:\n{cause.text.rstrip()}", file=sys.stderr)
        if isinstance(error, LagomError) and str(error) not in cause.text:  # the rank did not raise it
            print(f"lagom: {error}", file=sys.stderr)
    else:
        traceback.print_exception(type(error), error, error.__traceback__)
    return 1


def start_session(master: str, slots: int | None) -> Any:
    """Start a Spark session on ``master``; "spark" is this machine, with ``slots`` slots (None: one per core)."""
    from lagom.spark import spark_master

    return spark_master.start_session(f"local[{slots or '*'}]" if master == "spark" else master)


def argument_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands and their options."""
    parser = argparse.ArgumentParser(prog="lagom", description="Ordinary PyTorch programs on many ranks, unchanged.")
    parser.add_argument("--version", action="version", version=f"lagom {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    run = commands.add_parser(
        "run",
        help="run a script on every rank",
        description="Run a script, a module or a notebook on every rank.",
        usage="lagom run [OPTION ...] SCRIPT [ARGUMENT ...], or: lagom run [OPTION ...] -m MODULE [ARGUMENT ...]",
    )
    run.set_defaults(command=run_script)
    add_run_options(run)
    add_script(run)
    for extension in EXTENSIONS:
        extension.add_commands(commands)
    _add_pack(commands)
    runs = commands.add_parser("runs", help="list recorded runs", description="List runs, the newest last.")
    runs.set_defaults(command=_runs)
    runs.add_argument("folder", nargs="?", metavar="FOLDER", help="folder with runs; default: the default run_dir")
    runs.add_argument(
        "-n", "--num", type=int, default=20, metavar="N", help="number of runs to list; default: %(default)s"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
