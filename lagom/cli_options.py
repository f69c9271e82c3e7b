"""Options of the command line: options of a run, and options that runs, searches and ``lagom doctor`` share."""

from __future__ import annotations

import argparse
import os
from typing import Any, get_args

from lagom.config import TorchDistributedConfig
from lagom.config.torch_distributed import RUN_DIR, Batches, Evaluation, Log, Packages
from lagom.extensions.registry import EXTENSIONS


def add_run_options(run: argparse.ArgumentParser) -> None:
    """Add the options of ``lagom run``, without the script."""
    add_place(run, "number of ranks; default: one per core or slot")
    add_training_options(run)
    add_record_options(run, 'ranks whose output is shown live; default: rank0, or all after "python" or with -H')
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
    for extension in EXTENSIONS:
        extension.add_run_options(run)


def add_training_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how ranks train."""
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
    parser.add_argument(
        "--packages",
        choices=get_args(Packages),
        default="installed",
        help="ship: send packages that the script imports and Spark's executors lack, if they have no compiled parts",
    )
    for extension in EXTENSIONS:
        extension.add_training_options(parser)


def training_fields(args: argparse.Namespace) -> dict[str, Any]:
    """Return the config fields that options set: those of training and records, but log, and those of extensions."""
    fields = {
        "batches": args.batches or "whole",
        "evaluation": args.evaluation,
        "mixed_precision": args.mixed_precision or False,
        "micro_batches": args.micro_batches,
        "seed": args.seed,
        "packages": args.packages,
        "run_dir": args.run_dir or None,
        "stall_timeout_s": args.stall_timeout,
    }
    for extension in EXTENSIONS:
        fields |= extension.config_fields(args)
    return fields


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
