"""Options of ``lagom search`` alone: the searchspace as words, and commands to repeat the best trial or to resume."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from lagom.config import HyperparameterOptConfig, Searchspace
from lagom.config.hyperparameter_opt import EarlyStopping, Optimizer
from lagom.digests import parse_record
from lagom.errors import LagomError
from lagom.extensions.search.on_rank.script_trial import options
from lagom.run_folder import RunFolder
from lagom.settings import nearest
from lagom.watch.run_dir import RUN
from lagom.watch.secrets import HIDDEN

_RANGES: Mapping[str, tuple[str, ...]] = {
    "float": ("DOUBLE",),
    "log": ("DOUBLE", "log"),
    "int": ("INTEGER",),
    "intlog": ("INTEGER", "log"),
}
_FORMS = "lr=float:0.1:0.9, lr=log:1e-5:1e-1, units=int:32:512, units=intlog:32:512, or values as in act=relu,tanh"
_INTEGER, _NUMBER = re.compile(r"-?(0|[1-9]\d*)"), re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


def add_search_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``lagom search`` that no run has."""
    parser.add_argument(
        "--space",
        action="append",
        default=[],
        metavar="NAME=VALUES",
        help=f"an option of the script that is searched, and its values: {_FORMS}; once for each option",
    )
    parser.add_argument(
        "--metric", metavar="NAME", help='name of the number that counts: the last "NAME: 0.123" printed'
    )
    parser.add_argument(
        "--direction", metavar="min|max", help="which is best; if not given, min for a loss or an error, else max"
    )
    parser.add_argument("--trials", type=int, metavar="N", help="number of trials")
    parser.add_argument("--timeout-s", type=float, metavar="S", help="start no further trials after S seconds")
    parser.add_argument("--slots", type=int, metavar="N", help="number of trials at a time; default: as many as fit")
    parser.add_argument("--optimizer", default="tpe", help=f"{', '.join(get_args(Optimizer))}: tpe, if not given")
    parser.add_argument(
        "--es-policy",
        default="none",
        help=f"how bad trials are stopped early: {', '.join(get_args(EarlyStopping))}; none, if not given",
    )
    parser.add_argument(
        "--trial-timeout", type=float, metavar="S", help="fail a trial after S seconds without progress"
    )
    parser.add_argument("--resume", metavar="RUN", help="folder of an earlier search to continue")


def search_config(args: argparse.Namespace, shared: Mapping[str, Any]) -> HyperparameterOptConfig:
    """Return the config that ``args`` ask for; ``shared`` are the fields that a run has, too.

    Raises:
        ValueError: if something is missing or wrong.
    """
    space = space_of(args.space)
    if not args.metric:
        raise ValueError("there is no --metric; want the name of a number that the script prints, as in --metric loss")
    if args.trials is None and args.timeout_s is None and args.optimizer != "grid":
        raise ValueError("the search would never end; give --trials N, --timeout-s S, or both")
    return HyperparameterOptConfig(
        **shared,
        searchspace=space,
        optimization_key=args.metric,
        direction=args.direction,
        num_trials=args.trials,
        timeout_s=args.timeout_s,
        num_slots=args.slots,
        ranks_per_trial=args.n or 1,
        optimizer=args.optimizer,
        es_policy=args.es_policy,
        trial_timeout_s=args.trial_timeout,
        resume=args.resume,
        log=args.log or "rank0",
    )


def space_of(words: Sequence[str]) -> Searchspace:
    """Return the searchspace in words such as ``lr=log:1e-5:1e-1`` and ``act=relu,tanh``.

    Raises:
        ValueError: for a word in no such form, or without any word.
    """
    space = Searchspace()
    for word in words:
        name, equals, values = word.partition("=")
        if not equals or not name or not values:
            raise ValueError(f"--space {word}: want {_FORMS}")
        try:
            space.add(name.lstrip("-"), _parameter(values))
        except ValueError as error:
            raise ValueError(f"--space {word}: {error}") from None
    if not len(space):
        raise ValueError(f"there is no --space, so nothing to search; want {_FORMS}")
    return space


def _parameter(text: str) -> tuple[Any, ...]:
    kind, *bounds = text.split(":")
    if kind in _RANGES:
        if len(bounds) != 2:
            raise ValueError(f"want the lowest and the highest value, as in {kind}:1:10")
        number = _INTEGER if kind.startswith("int") else _NUMBER
        if wrong := [bound for bound in bounds if not number.fullmatch(bound)]:
            raise ValueError(f"{wrong[0]!r} is no {'whole ' * (number is _INTEGER)}number")
        numbers = [int(bound) if number is _INTEGER else float(bound) for bound in bounds]
        return (_RANGES[kind][0], numbers, *_RANGES[kind][1:])
    values = text.split(",")
    if len(values) < 2:
        hint = f"a range is {', '.join(_RANGES)}{nearest(kind, tuple(_RANGES))}" if bounds else "one value"
        raise ValueError(f"{hint}; want {_FORMS}. A value that is not searched belongs behind the script")
    if all(_NUMBER.fullmatch(value) for value in values):
        return ("DISCRETE", [int(value) if _INTEGER.fullmatch(value) else float(value) for value in values])
    return ("CATEGORICAL", values)


def command_line(words: Sequence[str], script: Sequence[str], params: Mapping[str, Any]) -> str:
    """Return the command that runs ``script`` with ``params``, for a shell.

    Args:
        words: options that ``lagom search`` was given.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_search_options(parser)
    for name in ("--log", "--run-dir", "--stall-timeout"):
        parser.add_argument(name)
    _, of_run = parser.parse_known_args(list(words))
    is_plain = not of_run and not script[0].endswith(".ipynb")
    names_ranks = any(re.match("-np?\\d*$|--num-proc(=|$)", word) for word in of_run)
    start = ["python"] if is_plain else ["lagom", "run", *(of_run if names_ranks else ["-n", "1", *of_run])]
    return shlex.join([*start, *script, *options(params)])


def resumed(folder: Path) -> tuple[list[str], str]:
    """Return the command-line arguments to resume the search in ``folder``, and its original working directory.

    Raises:
        ValueError: if ``folder`` has no records of a search, or they do not have the whole command line.
        LagomError: if other users can write to ``folder``, or its records are damaged: a command is run from them.
    """
    try:
        run = RunFolder.open_own(folder)
        driver = parse_record(run.read(RUN, own=True))["driver"]
        words = list(driver["argv"])
        cwd = str(driver["cwd"])
    except (OSError, KeyError):
        raise ValueError(f"--resume {folder}: there are no records of a search") from None
    except (ValueError, TypeError) as error:
        raise LagomError(f"--resume {folder}: {RUN} is damaged: {error}") from error
    if not all(isinstance(word, str) for word in words):
        raise LagomError(f"--resume {folder}: {RUN} is damaged: its command line is not one")
    if "search" not in words[1:2] or HIDDEN in " ".join(words):
        raise ValueError(f"--resume {folder}: its records have no whole command line; give the rest of it as well")
    old = words[2:4] if words[2:3] == ["--resume"] else []
    return ["search", "--resume", str(folder), *words[2 + len(old) :]], cwd
