"""Options of the command line: options of a run, and options that runs, searches and ``lagom doctor`` share."""

from __future__ import annotations

import argparse
import os
from typing import Any, get_args

from lagom.config import TorchDistributedConfig
from lagom.config.torch_distributed import RUN_DIR, Batches, Evaluation, Log
from lagom.horovodrun import CheckBuild


def add_run_options(run: argparse.ArgumentParser) -> None:
    """Add the options of ``lagom run``, without the script."""
    add_place(run, "number of ranks; one per core or slot if not given")
    run.add_argument("-H", "--hosts", metavar="HOST:SLOTS", help="as horovodrun's, of this machine: localhost:4")
    run.add_argument("-cb", "--check-build", action=CheckBuild, nargs=0, help="say what programs of Horovod's find")
    add_training_options(run)
    run.add_argument(
        "--verify",
        action="store_true",
        help="rehearse the first steps in one process and on the ranks; exit with status 3 where they do not agree",
    )
    add_record_options(run, 'whose output is shown as it comes; rank0, or all after "python" or with -H')
    run.add_argument("--timeline", action="store_true", help="keep a trace of what all ranks do, in the run's folder")
    run.add_argument("--timeline-file", "--timeline-filename", metavar="FILE", help="write that trace here, too")
    run.add_argument("--timeout", type=float, metavar="S", help="end the run when a rank gets nowhere so long")
    run.add_argument(
        "--max-failures",
        type=int,
        default=TorchDistributedConfig().max_failures,
        metavar="N",
        help="how often to begin again after ranks were killed or cut off: %(default)s, if not given",
    )
    run.add_argument(
        "--min-world-size", type=int, metavar="N", help="the fewest ranks with which to begin again on Spark"
    )
    run.add_argument(
        "--snapshot-every",
        type=_seconds_or_auto,
        metavar="S",
        help="keep the state of the program each S seconds, from which the run goes on, also by lagom resume; "
        "auto: each 10, or more if that would take more than 1%% of the time",
    )


def _seconds_or_auto(text: str) -> float | str:
    try:
        return text if text == "auto" else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}; want seconds, or auto") from None


def add_debug_options(debug: argparse.ArgumentParser) -> None:
    """Add the options that only ``lagom debug`` has."""
    debug.add_argument(
        "--rank",
        type=int,
        metavar="N",
        help="the rank to stop; if not given, rank 0 at breakpoint(), and the first one that fails",
    )


def add_training_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how ranks train."""
    parser.add_argument("--zero", type=int, default=0, metavar="LEVEL", help="what is sharded: 0 nothing (the default)")
    parser.add_argument("--mixed-precision", choices=("bf16", "fp16"), help="what forwards compute in")
    parser.add_argument(
        "--micro-batches", type=int, metavar="N", help="parts of a batch that a training forward runs in"
    )
    parser.add_argument("--batches", choices=get_args(Batches), help="what a rank sees of a batch: whole, if not given")
    parser.add_argument(
        "--evaluation", choices=get_args(Evaluation), default="gathered", help="how test sets are run through"
    )
    parser.add_argument("--seed", type=int, help="start of the random generators; a new Python's if not given")


def training_fields(args: argparse.Namespace) -> dict[str, Any]:
    """Return the config fields that the options of ``add_training_options`` and ``add_record_options`` set, but log."""
    return {
        "batches": args.batches or "whole",
        "evaluation": args.evaluation,
        "zero_lvl": args.zero,
        "mixed_precision": args.mixed_precision or False,
        "micro_batches": args.micro_batches,
        "seed": args.seed,
        "run_dir": args.run_dir or None,
        "stall_timeout_s": args.stall_timeout,
    }


def add_record_options(parser: argparse.ArgumentParser, log: str) -> None:
    """Add the options that say what is shown and kept; ``log`` is the help of ``--log``."""
    parser.add_argument("--log", choices=get_args(Log), help=log)
    parser.add_argument(
        "--run-dir",
        default=os.environ.get("LAGOM_RUN_DIR", RUN_DIR),
        help="where each run gets a folder of records, %(default)s if not given; '' keeps nothing",
    )
    parser.add_argument(
        "--stall-timeout", type=float, default=60.0, metavar="S", help="name ranks that get nowhere so long"
    )


def add_script(parser: argparse.ArgumentParser) -> None:
    """Add the script or module and its arguments, which end the options."""
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE", help="a module, as python -m")
    parser.add_argument(
        "words",
        nargs=argparse.REMAINDER,
        metavar="SCRIPT",
        help='path of a script or notebook; or "python", and then the path; what follows is the script\'s own',
    )


def add_place(parser: argparse.ArgumentParser, ranks: str, otherwise: str = "local if not given") -> None:
    """Add ``-n``, with the help ``ranks``, and ``--master``, whose help ends with the default, ``otherwise``."""
    parser.add_argument("-n", "-np", "--num-proc", dest="n", type=int, metavar="N", help=ranks)
    parser.add_argument(
        "--master",
        help="where: local (processes of this machine), spark (Spark on this machine), a Spark master such as "
        f"spark://host:7077, or sc://host for Spark Connect; {otherwise}",
    )
