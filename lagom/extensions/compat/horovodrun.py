"""Parts of horovodrun's command line that ``lagom run`` accepts: hosts, ``python SCRIPT``, and the build check."""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_FLAGS = ("-u", "-B")
"""Options of python's that change nothing on a rank."""


def add_horovodrun_options(run: argparse.ArgumentParser) -> None:
    """Add horovodrun's options that no run needs otherwise."""
    run.add_argument("-H", "--hosts", metavar="HOST:SLOTS", help="as for horovodrun, on this machine only: localhost:4")
    run.add_argument(
        "-cb", "--check-build", action=CheckBuild, nargs=0, help="print the Horovod features that programs find"
    )


def adapt_arguments(args: argparse.Namespace) -> None:
    """Take ``python`` from before the script; for a run, apply ``--hosts`` and horovodrun's defaults.

    Raises:
        ValueError: as ``script_of`` and ``num_ranks``.
    """
    args.script, is_after_python = script_of(args.script)
    if "hosts" not in args:  # a search
        return
    args.n = num_ranks(args.n, args.hosts, args.master not in (None, "local"))
    if is_after_python or args.hosts:
        args.log = args.log or "all"
    args.timeline_file = args.timeline_file or os.environ.get("HOROVOD_TIMELINE")


def script_of(words: Sequence[str]) -> tuple[list[str], bool]:
    """Return the script (or ``-m`` and a module) with its arguments, and whether they followed the word ``python``.

    Raises:
        ValueError: if python is to run anything else.
    """
    if not re.fullmatch(r"python[\d.]*", Path(words[0]).name) or Path(words[0]).suffix == ".py":
        return list(words), False
    rest = list(words[1:])
    while rest and rest[0] in _FLAGS:
        rest.pop(0)
    if not rest or (rest[0].startswith("-") and (rest[0] != "-m" or len(rest) < 2)):
        what = f"{words[0]} {rest[0]}" if rest else words[0]
        raise ValueError(f"lagom run {what}: want a script, as in: lagom run -np 4 python train.py --epochs 2")
    return rest, True


def num_ranks(asked: int | None, hosts: str | None, on_spark: bool) -> int | None:
    """Return the number of ranks: the number asked for, or the slots of ``hosts``; None for the default.

    Raises:
        ValueError: if a host is not this machine, if ``hosts`` has too few slots, or for ``hosts`` on Spark.
    """
    if hosts is None:
        return asked
    if on_spark:
        raise ValueError(f"-H {hosts} names hosts, but with --master it is Spark that has them; leave -H out")
    slots = 0
    for entry in hosts.split(","):
        name, _, num = entry.strip().partition(":")
        if name not in ("localhost", "127.0.0.1", socket.gethostname(), socket.getfqdn()):
            raise ValueError(
                f"-H {hosts}: {name} is another machine, and lagom reaches others through Spark; "
                "use --master spark://HOST:PORT, or -H localhost:N"
            )
        if num and not num.isdigit():
            raise ValueError(f"-H {hosts}: {num!r} is no number of slots; want localhost:4")
        slots += int(num or 1)
    if asked is not None and asked > slots:
        raise ValueError(f"-np {asked}, but -H {hosts} has {slots} slots; ask for at most {slots}, or give it more")
    return asked if asked is not None else slots


class CheckBuild(argparse.Action):
    """Prints the available features in horovodrun's form, and ends."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        """Print the features, and exit."""
        from lagom import __version__

        shared = importlib.util.find_spec("lagom._native") is not None
        cuda = importlib.util.find_spec("torch") is not None and _has_cuda()
        print(
            f"lagom v{__version__}, for programs of Horovod's:\n\n"
            "Available Frameworks:\n    [ ] TensorFlow\n    [X] PyTorch\n    [ ] MXNet\n\n"
            "Available Controllers:\n    [ ] MPI\n    [X] Gloo\n\n"
            f"Available Tensor Operations:\n    [{_mark(cuda)}] NCCL\n    [ ] DDL\n    [ ] CCL\n    [ ] MPI\n"
            f"    [X] Gloo\n    [{_mark(shared)}] shared memory"
        )
        parser.exit(0)


def _mark(there: bool) -> str:
    return "X" if there else " "


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()
