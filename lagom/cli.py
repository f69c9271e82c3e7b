"""The command line: ``lagom run SCRIPT`` runs a script unchanged on every rank; ``lagom doctor`` checks a cluster."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
import types
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

from lagom import __version__, experiment
from lagom.config import TorchDistributedConfig
from lagom.config.torch_distributed import RUN_DIR, Batches, Evaluation, Launcher, Log
from lagom.errors import LagomError, RankError, RankTraceback, VerificationError
from lagom.horovodrun import CheckBuild, num_ranks, script_of
from lagom.program.detect_distributed import is_driver
from lagom.program.script import Script
from lagom.worker.compatible import compatible


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status, which is the script's own."""
    args = _parser().parse_args(argv)
    try:
        return int(args.command(args))
    except VerificationError as error:
        print(f"lagom: {error}", file=sys.stderr)
        return 3
    except (ValueError, LagomError) as error:
        if isinstance(error.__cause__, RankTraceback):
            return _failed(error)
        print(f"lagom: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BaseException as error:
        return _failed(error)


def _run(args: argparse.Namespace) -> int:
    given = ["-m", *args.module, *args.words] if args.module else args.words
    if not given:
        raise ValueError("there is nothing to run; want a script, as in: lagom run -n 4 train.py --epochs 2")
    words, as_horovodrun = script_of(given)
    on_spark = args.master not in (None, "local")
    world_size = num_ranks(args.n, args.hosts, on_spark)
    try:
        script = _script(words)
    except SyntaxError as error:
        print("".join(traceback.format_exception_only(error)), end="", file=sys.stderr)
        return 1
    config = TorchDistributedConfig(
        world_size=world_size,
        launcher="spark" if on_spark else "local",
        batches=args.batches or "whole",
        evaluation=args.evaluation,
        zero_lvl=args.zero,
        mixed_precision=args.mixed_precision or False,
        micro_batches=args.micro_batches,
        verify=args.verify,
        seed=args.seed,
        log=args.log or ("all" if as_horovodrun or args.hosts else "rank0"),
        timeline=args.timeline_file or os.environ.get("HOROVOD_TIMELINE") or args.timeline,
        run_dir=args.run_dir or None,
        stall_timeout_s=args.stall_timeout,
        timeout_s=args.timeout,
        name=script.__name__,
    )
    if config.launcher == "spark":
        _session(args.master, args.n)
    if is_driver(script):
        named = ["batches"] if args.batches else []
        return _drive(script, config if args.master else replace(config, launcher="auto"), named)
    experiment.lagom(script, config)
    return 0


def _script(words: Sequence[str]) -> Script:
    """Read the script in ``words``, with the folder from which python would import first on ``sys.path``."""
    if words[0] == "-m":
        sys.path.insert(0, str(Path.cwd()))
        return Script.of_module(words[1], words[2:])
    script = Script.read(Path(words[0]), words[1:])
    sys.path.insert(0, str(Path(words[0]).resolve().parent))
    return script


def _drive(script: Script, config: TorchDistributedConfig, named: Sequence[str]) -> int:
    """Run a script that starts ranks by itself, in this process, as python does; ``config`` fills in its settings."""
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
        return _failed(error.with_traceback(_of_program(error.__traceback__)))
    return 0


def _of_program(trace: types.TracebackType | None) -> types.TracebackType | None:
    """Return ``trace`` from the program's first line on."""
    here = str(Path(__file__).parent)
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(here):
        trace = trace.tb_next
    return trace


def _doctor(args: argparse.Namespace) -> int:
    from lagom.doctor.findings import Finding
    from lagom.doctor.visit import as_json, print_findings, visit

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


def _failed(error: BaseException) -> int:
    """Print a failure as python would have printed the script's own; return the exit status."""
    cause = error.__cause__
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
    """Start a Spark session on ``master``; "spark" is one on this machine."""
    from lagom.launchers.spark_master import start_session

    return start_session(f"local[{slots or '*'}]" if master == "spark" else master)


def _micro_batches(text: str) -> int | Literal["auto"]:
    if text == "auto":
        return "auto"
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor 'auto'") from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lagom", description="Ordinary PyTorch programs on many ranks, unchanged.")
    parser.add_argument("--version", action="version", version=f"lagom {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    run = commands.add_parser(
        "run",
        help="run a script on every rank",
        description="Run a script, a module or a notebook on every rank.",
        usage="lagom run [OPTION ...] SCRIPT [ARGUMENT ...], or: lagom run [OPTION ...] -m MODULE [ARGUMENT ...]",
    )
    _add_run_options(run)
    text = "Look around on every rank: versions, GPUs, memory, exchanges, addresses; say what is wrong and what to do."
    doctor = commands.add_parser("doctor", help="say whether runs can be expected to work", description=text)
    doctor.set_defaults(command=_doctor)
    _add_place(doctor)
    doctor.add_argument("--json", action="store_true", help="for machines")
    return parser


def _add_run_options(run: argparse.ArgumentParser) -> None:
    _add_place(run)
    run.add_argument("-H", "--hosts", metavar="HOST:SLOTS", help="as horovodrun's, of this machine: localhost:4")
    run.add_argument("-cb", "--check-build", action=CheckBuild, nargs=0, help="say what programs of Horovod's find")
    run.add_argument("--zero", type=int, default=0, metavar="LEVEL", help="what is sharded: 0 nothing (the default)")
    run.add_argument("--mixed-precision", choices=("bf16", "fp16"), help="what forwards compute in")
    run.add_argument(
        "--micro-batches",
        type=_micro_batches,
        metavar="N",
        help="parts of a batch that a forward runs in, or 'auto': after one that ran out of memory",
    )
    run.add_argument("--batches", choices=get_args(Batches), help="what a rank sees of a batch: whole, if not given")
    run.add_argument(
        "--evaluation", choices=get_args(Evaluation), default="gathered", help="how test sets are run through"
    )
    run.add_argument(
        "--verify",
        action="store_true",
        help="rehearse the first steps in one process and on the ranks; exit with status 3 where they do not agree",
    )
    run.add_argument("--seed", type=int, help="start of the random generators; a new Python's if not given")
    _add_seeing_options(run)
    run.set_defaults(command=_run)
    run.add_argument("-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE", help="a module, as python -m")
    run.add_argument(
        "words",
        nargs=argparse.REMAINDER,
        metavar="SCRIPT",
        help='path of a script or notebook; or "python", and then the path; what follows is the script\'s own',
    )


def _add_seeing_options(run: argparse.ArgumentParser) -> None:
    run.add_argument(
        "--log",
        choices=get_args(Log),
        help='whose output is shown as it comes; rank0, or all after "python" or with -H',
    )
    run.add_argument(
        "--run-dir",
        default=os.environ.get("LAGOM_RUN_DIR", RUN_DIR),
        help="where each run gets a folder of records, %(default)s if not given; '' keeps nothing",
    )
    run.add_argument("--timeline", action="store_true", help="keep a trace of what all ranks do, in the run's folder")
    run.add_argument("--timeline-file", "--timeline-filename", metavar="FILE", help="write that trace here, too")
    run.add_argument(
        "--stall-timeout", type=float, default=60.0, metavar="S", help="name ranks that get nowhere so long"
    )
    run.add_argument("--timeout", type=float, metavar="S", help="end the run when a rank gets nowhere so long")


def _add_place(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-n",
        "-np",
        "--num-proc",
        dest="n",
        type=int,
        metavar="N",
        help="number of ranks; one per core or slot if not given",
    )
    parser.add_argument(
        "--master",
        help="where: local (processes of this machine; the default), spark (Spark on this machine), "
        "a Spark master such as spark://host:7077, or sc://host for Spark Connect",
    )


if __name__ == "__main__":
    sys.exit(main())
