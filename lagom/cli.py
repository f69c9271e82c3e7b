"""The command line: ``lagom run``, ``debug`` and ``search`` run an unchanged script; ``lagom doctor`` checks a cluster.

``lagom runs``, ``show`` and ``compare`` read what runs have recorded; ``resume`` goes on with a run from its snapshots.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lagom import __version__, experiment
from lagom.cli_options import (
    add_debug_options,
    add_place,
    add_record_options,
    add_run_options,
    add_script,
    add_training_options,
    training_fields,
)
from lagom.config import TorchDistributedConfig
from lagom.config.torch_distributed import Launcher
from lagom.errors import LagomError, MetricError, RankError, RankTraceback, VerificationError
from lagom.extensions.compat.compatible import compatible
from lagom.extensions.compat.horovodrun import num_ranks, script_of
from lagom.extensions.observe import Debug
from lagom.extensions.observe.report.compare_runs import compare_runs
from lagom.extensions.search.on_rank.script_trial import ScriptTrial
from lagom.extensions.search.script_search import add_search_options, command_line, resumed, search_config
from lagom.extensions.search.trial_files import last_lines
from lagom.program.detect_distributed import is_driver
from lagom.program.own_frames import cut_own_frames
from lagom.program.script import Script
from lagom.result import show
from lagom.watch.run_dir import RESULT
from lagom.watch.runs import list_runs, open_run


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status.

    Returns:
        The script's own status, 1 if it raised; 2 for an error of lagom's; 3 if rehearsals differ; 130 after Ctrl-C.
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
    except KeyboardInterrupt:
        return 130
    except BaseException as error:
        return _failed(error)


def _resume(args: argparse.Namespace) -> int:
    launcher: Launcher | None = None
    if args.master is not None:
        launcher = "local" if args.master == "local" else "spark"
        if launcher == "spark":
            _session(args.master, args.n)
    result = experiment.resume(args.run, world_size=args.n, launcher=launcher)
    folder = result.run_url or str(result.run_dir)
    text = f"lagom: the run has ended. {folder}/{RESULT} has its result as text"
    if result.value is not None:  # a script returns nothing
        text += f"; what the function returned, tensors and all, is experiment.resume({folder!r}).value"
    print(text, file=sys.stderr)
    return 0


def _run(args: argparse.Namespace) -> int:
    words, as_horovodrun = _words(args, "lagom run -n 4 train.py --epochs 2")
    on_spark = args.master not in (None, "local")
    world_size = num_ranks(args.n, args.hosts, on_spark)
    try:
        script = _script(words)
    except SyntaxError as error:
        return _bad_syntax(error)
    config = TorchDistributedConfig(
        **training_fields(args),
        world_size=world_size,
        launcher="spark" if on_spark else "local",
        verify=args.verify,
        log=args.log or ("all" if as_horovodrun or args.hosts else "rank0"),
        timeline=args.timeline_file or os.environ.get("HOROVOD_TIMELINE") or args.timeline,
        timeout_s=args.timeout,
        max_failures=args.max_failures,
        min_world_size=args.min_world_size,
        snapshot_every_s=args.snapshot_every,
        debug=_debug(args),
        name=script.__name__,
    )
    if config.launcher == "spark":
        _session(args.master, args.n)
    if is_driver(script):
        named = ["batches"] if args.batches else []
        return _drive(script, config if args.master else replace(config, launcher="auto"), named)
    experiment.lagom(script, config)
    return 0


def _debug(args: argparse.Namespace) -> Debug:
    if not args.debug:
        return None
    return "first" if args.rank is None else int(args.rank)


def _search(args: argparse.Namespace) -> int:
    if args.resume and not (args.space or args.words or args.module):
        folder = Path(args.resume).expanduser().absolute()
        args.argv, cwd = resumed(folder)
        try:
            os.chdir(cwd)
        except OSError as error:
            raise LagomError(f"the search was called in {cwd}, which cannot be entered: {error}") from error
        sys.argv[1:] = args.argv  # the records keep sys.argv, from which a later resume reads the options
        args = argument_parser().parse_args(args.argv, args)
    words, _ = _words(args, "lagom search --space lr=log:1e-5:1e-1 --metric loss --trials 20 train.py --epochs 2")
    on_spark = args.master not in (None, "local")
    config = search_config(args, {**training_fields(args), "launcher": "spark" if on_spark else "local"})
    try:
        script = _script(words)
    except SyntaxError as error:
        return _bad_syntax(error)
    if is_driver(script):
        raise ValueError(
            f"{words[0]} starts ranks by itself, so it is no trial; have it call lagom() with a HyperparameterOptConfig"
        )
    if on_spark:
        _session(args.master, args.slots and args.slots * config.ranks_per_trial)
    result = experiment.lagom(ScriptTrial.of(script, args.metric), replace(config, name=script.__name__))
    print(result)
    if any(trial["state"] == "complete" for trial in result.trials):
        given = args.argv[1 : len(args.argv) - len(args.words) - len(args.module or ()) - bool(args.module)]
        print(f"\nThe best again:\n  {command_line(given, words, result.best_trial['params'])}")
    elif not result.interrupted:
        last: Mapping[str, Any] = (
            result.trials[-1] if result.trials else {"error": "none began in --timeout-s", "folder": Path()}
        )
        print(f"lagom: no trial ran to its end: {last['error']}\n{last_lines(last['folder'])}", end="", file=sys.stderr)
        return 1
    return 130 if result.interrupted else 0


def _words(args: argparse.Namespace, example: str) -> tuple[list[str], bool]:
    """Return the script (or -m and a module) with its arguments, and whether the word ``python`` came before them."""
    given = ["-m", *args.module, *args.words] if args.module else args.words
    if not given:
        raise ValueError(f"there is nothing to run; want a script, as in: {example}")
    return script_of(given)


def _bad_syntax(error: SyntaxError) -> int:
    print("".join(traceback.format_exception_only(error)), end="", file=sys.stderr)
    return 1


def _script(words: Sequence[str]) -> Script:
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
        with experiment.command_line_config(config, named), compatible():
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


def _doctor(args: argparse.Namespace) -> int:
    from lagom.extensions.observe.doctor.findings import Finding
    from lagom.extensions.observe.doctor.visit import as_json, print_findings, visit

    launcher: Launcher = "local" if args.master in (None, "local") else "spark"
    config = TorchDistributedConfig(world_size=args.n, launcher=launcher, run_dir=None)
    try:
        if launcher == "spark":
            _session(args.master, args.n)
        found = visit(config)
    except LagomError as error:
        found = [Finding("fail", "cluster", str(error))]
    print(as_json(found) if args.json else print_findings(found))
    return int(any(one.level == "fail" for one in found))


def _runs(args: argparse.Namespace) -> int:
    print(list_runs(args.folder or TorchDistributedConfig().run_dir, args.num))
    return 0


def _show(args: argparse.Namespace) -> int:
    print(show(args.run))
    return 0


def _compare(args: argparse.Namespace) -> int:
    place = TorchDistributedConfig().run_dir
    print(compare_runs(open_run(args.first, place), open_run(args.second, place)))
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


def _session(master: str, slots: int | None) -> Any:
    """Start a Spark session on ``master``; "spark" is this machine, with ``slots`` slots (None: one per core)."""
    from lagom.spark.spark_master import start_session

    return start_session(f"local[{slots or '*'}]" if master == "spark" else master)


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
    run.set_defaults(command=_run, debug=False)
    add_run_options(run)
    add_script(run)
    debug = commands.add_parser(
        "debug",
        help="run a script, and stop where it fails",
        description="Run a script as `lagom run` does; stop at breakpoint() and where it fails, with pdb on that rank.",
        usage="lagom debug [--rank N] [OPTION ...] SCRIPT [ARGUMENT ...]",
    )
    debug.set_defaults(command=_run, debug=True)
    add_debug_options(debug)
    add_run_options(debug)
    add_script(debug)
    search = commands.add_parser(
        "search",
        help="search for the best options of a script",
        description="Run a script many times, each time with other values of some of its options; find the best.",
        usage="lagom search [OPTION ...] --space NAME=VALUES ... --metric NAME SCRIPT [ARGUMENT ...]",
        allow_abbrev=False,
    )
    search.set_defaults(command=_search)
    add_search_options(search)
    add_place(search, "number of ranks of each trial; 1 if not given")
    add_training_options(search)
    add_record_options(search, "whose output is shown as it comes: rank0 shows no trial's, all every line of each")
    add_script(search)
    text = "Look around on every rank: versions, GPUs, memory, exchanges, addresses; say what is wrong and what to do."
    doctor = commands.add_parser("doctor", help="check whether runs will work", description=text)
    doctor.set_defaults(command=_doctor)
    add_place(doctor, "number of ranks; one per core or slot if not given")
    doctor.add_argument("--json", action="store_true", help="print JSON")
    _add_record_commands(commands)
    return parser


def _add_record_commands(commands: Any) -> None:
    runs = commands.add_parser("runs", help="list recorded runs", description="List runs, the newest last.")
    runs.set_defaults(command=_runs)
    runs.add_argument("folder", nargs="?", metavar="FOLDER", help="folder with runs; default: the default run_dir")
    runs.add_argument(
        "-n", "--num", type=int, default=20, metavar="N", help="number of runs to list; default: %(default)s"
    )
    named = "its folder, or a part of its name that no other run has"
    one = commands.add_parser(
        "show", help="make the report of a run", description="Write the report of a run, and open it."
    )
    one.set_defaults(command=_show)
    one.add_argument("run", metavar="RUN", help=named)
    text = "Say what differs between two runs: settings, versions, code, losses, speed, results."
    again = commands.add_parser(
        "resume",
        help="continue a run from its last snapshot",
        description="Go on with a run that was called with snapshot_every_s, and whose process has ended.",
    )
    again.set_defaults(command=_resume)
    again.add_argument("run", metavar="RUN", help=f"{named}, or its URL")
    add_place(again, "number of ranks; as before if not given", otherwise="as before if not given")
    two = commands.add_parser("compare", help="show the differences between two runs", description=text)
    two.set_defaults(command=_compare)
    two.add_argument("first", metavar="A", help=named)
    two.add_argument("second", metavar="B", help=named)


if __name__ == "__main__":
    sys.exit(main())
