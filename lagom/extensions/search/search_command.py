"""``lagom search``: searches for the best options of a script."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lagom import experiment
from lagom.cli import argument_parser, print_syntax_error, read_script, script_words, start_session
from lagom.cli_options import add_place, add_record_options, add_script, add_training_options, training_fields
from lagom.errors import LagomError
from lagom.extensions.search.on_rank.script_trial import ScriptTrial
from lagom.extensions.search.script_search import add_search_options, command_line, resumed, search_config
from lagom.extensions.search.trial_files import last_lines
from lagom.program.detect_distributed import is_driver


def add_search_command(commands: Any) -> None:
    """Add ``lagom search`` to the commands."""
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
    words = script_words(args, "lagom search --space lr=log:1e-5:1e-1 --metric loss --trials 20 train.py --epochs 2")
    on_spark = args.master not in (None, "local")
    config = search_config(args, {**training_fields(args), "launcher": "spark" if on_spark else "local"})
    try:
        script = read_script(words)
    except SyntaxError as error:
        return print_syntax_error(error)
    if is_driver(script):
        raise ValueError(
            f"{words[0]} starts ranks by itself, so it is no trial; have it call lagom() with a HyperparameterOptConfig"
        )
    if on_spark:
        start_session(args.master, args.slots and args.slots * config.ranks_per_trial)
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
