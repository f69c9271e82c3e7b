"""``lagom debug``, ``doctor``, ``show`` and ``compare``, and the options of ``lagom run`` for timelines."""

from __future__ import annotations

import argparse
from typing import Any

from lagom.cli import read_script, run_script, start_session
from lagom.cli_options import add_place, add_run_options, add_script
from lagom.config import TorchDistributedConfig
from lagom.config.torch_distributed import Launcher
from lagom.errors import LagomError
from lagom.extensions.observe.report.compare_runs import compare_runs
from lagom.result import show
from lagom.watch.runs import open_run


def add_observe_commands(commands: Any) -> None:
    """Add the commands that look at runs, or at the cluster."""
    _add_debug(commands)
    text = (
        "Look around on every rank: versions, packages, GPUs, memory, exchanges, addresses; say what is wrong and what "
        "to do."
    )
    doctor = commands.add_parser("doctor", help="check whether runs will work", description=text)
    doctor.set_defaults(command=_doctor)
    add_place(doctor, "number of ranks; one per core or slot if not given")
    doctor.add_argument(
        "script",
        nargs="?",
        metavar="SCRIPT",
        help="script or notebook whose packages the executors must have; it is not run",
    )
    doctor.add_argument("--json", action="store_true", help="print JSON")
    named = "its folder, or a part of its name that no other run has"
    report = commands.add_parser(
        "show", help="make the report of a run", description="Write the report of a run, and open it."
    )
    report.set_defaults(command=_show)
    report.add_argument("run", metavar="RUN", help=named)
    text = "Say what differs between two runs: settings, versions, code, losses, speed, results."
    compare = commands.add_parser("compare", help="show the differences between two runs", description=text)
    compare.set_defaults(command=_compare)
    compare.add_argument("first", metavar="A", help=named)
    compare.add_argument("second", metavar="B", help=named)


def _add_debug(commands: Any) -> None:
    debug = commands.add_parser(
        "debug",
        help="run a script, and stop where it fails",
        description="Run a script as `lagom run` does; stop at breakpoint() and where it fails, with pdb on that rank.",
        usage="lagom debug [--rank N] [OPTION ...] SCRIPT [ARGUMENT ...]",
    )
    debug.set_defaults(command=run_script, debug=True)
    debug.add_argument(
        "--rank",
        type=int,
        metavar="N",
        help="rank to stop; default: rank 0 at breakpoint(), and the first rank that fails",
    )
    add_run_options(debug)
    add_script(debug)


def _doctor(args: argparse.Namespace) -> int:
    from lagom.extensions.observe.doctor.findings import Finding
    from lagom.extensions.observe.doctor.visit import as_json, print_findings, visit

    launcher: Launcher = "local" if args.master in (None, "local") else "spark"
    config = TorchDistributedConfig(world_size=args.n, launcher=launcher, run_dir=None)
    try:
        if launcher == "spark":
            start_session(args.master, args.n)
        results = visit(config, read_script([args.script]) if args.script else None)
    except LagomError as error:
        results = [Finding("fail", "cluster", str(error))]
    print(as_json(results) if args.json else print_findings(results))
    return int(any(one.level == "fail" for one in results))


def _show(args: argparse.Namespace) -> int:
    print(show(args.run))
    return 0


def _compare(args: argparse.Namespace) -> int:
    place = TorchDistributedConfig().run_dir
    print(compare_runs(open_run(args.first, place), open_run(args.second, place)))
    return 0
