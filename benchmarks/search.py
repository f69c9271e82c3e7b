"""Measures how fast trials follow one another: lagom, Ray Tune, Optuna with joblib, and MLflow's Spark study.

    python -m benchmarks.search [--rounds 3] [--empty 100] [--seconds 1.0] [--trials 40] [--only lagom]

On 2 slots: the time of empty trials; the share of the slots' time, from the first start of a trial to the last end, for
which they are busy with trials of a second, and the share of the whole call; the time from the end of a trial to the
start of the next. On 4 slots: trials of unequal length, asynchronously and in rounds. Ray, joblib and MLflow are left
out where they are not installed: pip install "ray[tune]" joblib mlflow.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks import peers
from lagom import experiment
from lagom.config import HyperparameterOptConfig, Searchspace

SLOTS = 2
SLOTS_UNEQUAL = 4
"""Slots for trials of unequal length: 0.1 to 3 s, evenly spaced on a logarithmic scale."""
Trials = list[tuple[float, float]]
"""Start and end of each trial, in seconds since the epoch."""
Run = Callable[[Sequence[float], int], Trials]
"""Function that runs a trial of each of the given lengths, in seconds, on the given number of slots."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and print medians and ranges; return 0 if the targets hold, else 1."""
    args = _arguments(argv)
    logging.getLogger("lagom").setLevel(logging.ERROR)
    generator = random.Random(3)
    lengths = [0.1 * 30 ** generator.random() for _ in range(args.trials)]
    found: dict[str, dict[str, list[float]]] = {}
    with peers.spark(f"local[{SLOTS_UNEQUAL}]"):
        for name, run in _contenders(args.only).items():
            run([0.0] * 8, SLOTS_UNEQUAL)  # to warm up
            measured = found[name] = {"empty": [], "busy": [], "call": [], "gap": [], "unequal": []}
            for _ in range(args.rounds):
                measured["empty"].append(_seconds(run, [0.0] * args.empty, SLOTS)[0])
                seconds, trials = _seconds(run, [args.seconds] * args.trials, SLOTS)
                held_s = max(end for _, end in trials) - min(start for start, _ in trials)
                measured["busy"].append(args.trials * args.seconds / (SLOTS * held_s))
                measured["call"].append(args.trials * args.seconds / (SLOTS * seconds))
                measured["gap"].append(gap(trials))
                measured["unequal"].append(_seconds(run, lengths, SLOTS_UNEQUAL)[0])
            print(f"{name}: done", file=sys.stderr)
    print(report(found, args, in_rounds(lengths)))
    return 0 if all(held for _, held in targets(found, args, in_rounds(lengths))) else 1


def gap(trials: Trials) -> float:
    """Return the median time from the end of a trial to the start of the next one on its slot."""
    ends, found = list[float](), list[float]()
    for start, end in sorted(trials):
        earlier = [other for other in ends if other <= start]
        if earlier:
            latest = max(earlier)
            ends.remove(latest)
            found.append(start - latest)
        ends.append(end)
    return statistics.median(found)


def in_rounds(lengths: Sequence[float]) -> float:
    """Return the least time of trials in rounds: each round takes as long as its longest trial."""
    firsts = range(0, len(lengths), SLOTS_UNEQUAL)
    return sum(max(lengths[first : first + SLOTS_UNEQUAL]) for first in firsts)


def report(found: Mapping[str, Mapping[str, Sequence[float]]], args: argparse.Namespace, rounds_s: float) -> str:
    """Return a table, and a line for each target that says whether it holds."""
    busy = f"slots busy, {args.trials} of {args.seconds:g} s"
    heads = (f"{args.empty} empty, s", busy, "of the call", "gap, ms", "unequal, s")
    lines = [f"{'':22}" + "".join(f"{head:>30}" for head in heads)]
    for name, measured in found.items():
        cells = []
        shown = (("empty", 1, 2), ("busy", 1, 3), ("call", 1, 3), ("gap", 1e3, 1), ("unequal", 1, 2))
        for kind, scale, digits in shown:
            values = [value * scale for value in measured[kind]]
            median = statistics.median(values)
            cells.append(f"{median:.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})")
        lines.append(f"{name:22}" + "".join(f"{cell:>30}" for cell in cells))
    lines.append(f"{'in rounds, calculated':22}" + " " * 120 + f"{rounds_s:>30.2f}")
    lines += [f"{'holds' if held else 'MISSED':7}{target}" for target, held in targets(found, args, rounds_s)]
    return "\n".join(lines)


def targets(
    found: Mapping[str, Mapping[str, Sequence[float]]], args: argparse.Namespace, rounds_s: float
) -> list[tuple[str, bool]]:
    """Return each target as text, and whether it holds for the medians."""
    checked = []
    for name in ("lagom, local", "lagom, spark"):
        if name not in found:
            continue
        median = {kind: statistics.median(values) for kind, values in found[name].items()}
        saved = 1 - median["unequal"] / rounds_s
        limit_s = args.empty / 20
        checked += [
            (f"{name}: slots are busy for at least 0.95 of the time", median["busy"] >= 0.95),
            (f"{name}: the next trial starts within 50 ms", median["gap"] <= 0.050),
            (f"{name}: {args.empty} empty trials take at most {limit_s:g} s", median["empty"] <= limit_s),
            (f"{name}: unequal trials take {saved:.0%} less than in rounds, of 33%", saved >= 0.33),
        ]
    return checked


def _seconds(run: Run, lengths: Sequence[float], slots: int) -> tuple[float, Trials]:
    start = time.perf_counter()
    trials = run(lengths, slots)
    return time.perf_counter() - start, trials


def _contenders(only: str | None) -> dict[str, Run]:
    found: dict[str, Run] = {
        "lagom, local": lambda lengths, slots: _lagom("local", lengths, slots),
        "lagom, spark": lambda lengths, slots: _lagom("spark", lengths, slots),
    }
    for name, package, run in (
        ("Ray Tune", "ray", _ray),
        ("Optuna, joblib", "joblib", _joblib),
        ("MLflow, Spark", "mlflow.pyspark.optuna", _mlflow),
    ):
        if only is not None and only.lower() not in name.lower():
            continue
        try:
            there = importlib.util.find_spec(package) is not None
        except ModuleNotFoundError:
            there = False
        if there:
            found[name] = run
        else:
            print(f"{name} is left out: there is no {package} here", file=sys.stderr)
    return {name: run for name, run in found.items() if only is None or only.lower() in name.lower()}


def _trial(seconds: float) -> dict[str, float]:
    """Do nothing for ``seconds``; return the times, and a metric."""
    start = time.time()
    time.sleep(seconds)
    return {"loss": seconds, "start": start, "end": time.time()}


def _lagom(launcher: Any, lengths: Sequence[float], slots: int) -> Trials:
    def train(number: int) -> dict[str, float]:
        return _trial(lengths[number])

    space = Searchspace(number=("DISCRETE", list(range(len(lengths)))))
    config = HyperparameterOptConfig(
        searchspace=space,
        optimizer="grid",
        optimization_key="loss",
        es_policy="none",
        launcher=launcher,
        seed=1,
        num_slots=slots,
        run_dir=None,
    )
    result = experiment.lagom(train, config)
    return [(trial["returned"]["start"], trial["returned"]["end"]) for trial in result.trials]


def _ray(lengths: Sequence[float], slots: int) -> Trials:
    import ray
    from ray import tune

    if not ray.is_initialized():
        ray.init(num_cpus=SLOTS_UNEQUAL, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")

    def train(config: Mapping[str, Any]) -> None:
        tune.report(_trial(lengths[config["number"]]))

    with tempfile.TemporaryDirectory() as folder:
        tuner = tune.Tuner(
            train,
            param_space={"number": tune.grid_search(list(range(len(lengths))))},
            tune_config=tune.TuneConfig(max_concurrent_trials=slots),
            run_config=tune.RunConfig(storage_path=folder, verbose=0),
        )
        return [(one.metrics["start"], one.metrics["end"]) for one in tuner.fit()]


def _optimize(name: str, path: str, lengths: Sequence[float], number: int) -> None:
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.load_study(study_name=name, storage=JournalStorage(JournalFileBackend(path)))
    study.optimize(lambda trial: _told(trial, lengths), n_trials=number)


def _told(trial: Any, lengths: Sequence[float]) -> float:
    times = _trial(lengths[trial.number])
    for name, value in times.items():
        trial.set_user_attr(name, value)
    return times["loss"]


def _joblib(lengths: Sequence[float], slots: int) -> Trials:
    import joblib
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/study"
        study = optuna.create_study(study_name="study", storage=JournalStorage(JournalFileBackend(path)))
        part = len(lengths) // slots
        joblib.Parallel(n_jobs=slots)(joblib.delayed(_optimize)("study", path, lengths, part) for _ in range(slots))
        return [(one.user_attrs["start"], one.user_attrs["end"]) for one in study.trials]


def _mlflow(lengths: Sequence[float], slots: int) -> Trials:
    import mlflow
    import optuna
    from mlflow.optuna.storage import MlflowStorage
    from mlflow.pyspark.optuna.study import MlflowSparkStudy

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        mlflow.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")
        storage = MlflowStorage(experiment_id=mlflow.create_experiment("search"))
        study = MlflowSparkStudy(study_name="study", storage=storage, mlflow_tracking_uri=mlflow.get_tracking_uri())
        study.optimize(lambda trial: _told(trial, lengths), n_trials=len(lengths), n_jobs=slots)
        return [(one.user_attrs["start"], one.user_attrs["end"]) for one in study.trials]


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--empty", type=int, default=100, help="number of empty trials")
    parser.add_argument("--trials", type=int, default=40, help="number of the other trials")
    parser.add_argument("--seconds", type=float, default=1.0, help="length of a trial")
    parser.add_argument("--only", help="contenders with this in their names")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
