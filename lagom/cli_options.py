"""Options of the command line: options of a run, and options that runs, searches and ``lagom doctor`` share."""

from __future__ import annotations

import argparse
import os
from typing import Any, get_args

from lagom.config import TorchDistributedConfig
from lagom.config.torch_distributed import RUN_DIR, Batches, Evaluation, Log
from lagom.extensions.compat.horovodrun import CheckBuild


def add_run_options(run: argparse.ArgumentParser) -> None:
    """Add the options of ``lagom run``, without the script."""
    add_place(run, "number of ranks; default: one per core or slot")
    run.add_argument("-H", "--hosts", metavar="HOST:SLOTS", help="as for horovodrun, on this machine only: localhost:4")
    run.add_argument(
        "-cb", "--check-build", action=CheckBuild, nargs=0, help="print the Horovod features that programs find"
    )
    add_training_options(run)
    run.add_argument(
        "--verify",
        action="store_true",
        help="rehearse the first steps in one process and on the ranks; exit with status 3 where they do not agree",
    )
    add_record_options(run, 'ranks whose output is shown live; default: rank0, or all after "python" or with -H')
    run.add_argument("--timeline", action="store_true", help="write a timeline of all ranks to the run's folder")
    run.add_argument(
        "--timeline-file", "--timeline-filename", metavar="FILE", help="write the timeline to FILE as well"
    )
    run.add_argument(
        "--timeout",
        type=float,
        metavar="S",
        help="fail the run after S seconds in which a rank makes no progress; default: never",
    )
    run.add_argument(
        "--max-failures",
        type=int,
        default=TorchDistributedConfig().max_failures,
        metavar="N",
        help="number of restarts after ranks were killed or cut off; default: %(default)s",
    )
    run.add_argument("--min-world-size", type=int, metavar="N", help="smallest number of ranks for a restart on Spark")
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


def add_debug_options(debug: argparse.ArgumentParser) -> None:
    """Add the options that only ``lagom debug`` has."""
    debug.add_argument(
        "--rank",
        type=int,
        metavar="N",
        help="rank to stop; default: rank 0 at breakpoint(), and the first rank that fails",
    )


def add_training_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how ranks train."""
    parser.add_argument(
        "--zero",
        type=int,
        default=0,
        metavar="LEVEL",
        help="ZeRO level: 0 shards nothing (default), 1 optimizer state, 2 also gradients, 3 also parameters",
    )
    parser.add_argument("--mixed-precision", choices=("bf16", "fp16"), help="precision of forwards")
    parser.add_argument(
        "--micro-batches", type=int, metavar="N", help="parts of a batch that a training forward runs in"
    )
    parser.add_argument("--batches", choices=get_args(Batches), help="part of a batch that a rank sees; default: whole")
    parser.add_argument(
        "--evaluation",
        choices=get_args(Evaluation),
        default="gathered",
        help="how ranks evaluate test sets; default: %(default)s",
    )
    parser.add_argument("--seed", type=int, help="random seed; default: unseeded")


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
        help="folder for the records of runs; default: %(default)s; '' keeps no records",
    )
    parser.add_argument(
        "--stall-timeout",
        type=float,
        default=TorchDistributedConfig().stall_timeout_s,
        metavar="S",
        help="report a rank after S seconds without progress; default: %(default)g",
    )


def add_script(parser: argparse.ArgumentParser) -> None:
    """Add the script or module and its arguments, which end the options."""
    parser.add_argument(
        "-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE", help="run a module, like python -m"
    )
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
