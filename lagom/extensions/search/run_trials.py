"""``run_trials``: checks a call and runs its trials, until the last one has ended."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from lagom.cluster import Cluster
from lagom.config import TorchDistributedConfig
from lagom.config.trials import TrialsConfig
from lagom.driver.preparation import checked, facts_of_code, random_start, run_records, source_of
from lagom.errors import PlanError
from lagom.extensions.registry import replaced_arguments
from lagom.extensions.search.mlflow_trials import mlflow_trials
from lagom.extensions.search.search_progress import SearchProgress
from lagom.extensions.search.slots.choose_slots import choose_slots, num_slots
from lagom.extensions.search.slots.trial_slots import TrialSlots
from lagom.extensions.search.trial_files import put_in_place
from lagom.extensions.search.trial_loop import TrialLoop
from lagom.extensions.search.trial_source import KeptTrialSource
from lagom.launch import choose
from lagom.on_rank.process_settings import process_settings
from lagom.plan import Plan, plan
from lagom.program.signature import Call, check_searched, function_name
from lagom.run_folder import RunFolder
from lagom.timings import Timings
from lagom.watch.run_dir import RunRecords

Source = TypeVar("Source", bound=KeptTrialSource)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialsRun:
    """Facts of a search or study beside its trials: arguments of ``SearchResult``."""

    name: str
    seconds: float
    timings: Mapping[str, float]
    where: str
    run_dir: Path | None
    interrupted: bool


def run_trials(
    train: Callable[..., Any],
    config: TrialsConfig,
    make_source: Callable[[Path | None], Source],
    *,
    num_trials: int | None,
    searched: Mapping[str, Any] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> tuple[Source, TrialsRun]:
    """Run the trials of a source; return the source and facts of the run, on Ctrl-C with the trials so far.

    Args:
        make_source: makes the source, which keeps its trials in the folder that it gets, if any.
        num_trials: the number of trials, if it is known.
        searched: examples of the hyperparameters that trials have; None for an ablation study.
        extra: arguments of trials beside those that the config provides.
    """
    timings, trial = Timings(), config.of_a_trial()
    provided = _checked(train, config, searched or {}, extra or {})
    launcher = choose(trial.launcher)
    cluster, where = launcher.cluster(), launcher.where()
    of_trial = _plan(train, config, provided, cluster)
    call = _call(train, trial, provided, timings)
    number = num_slots(of_trial, cluster, config.num_slots, num_trials)
    resume = RunFolder.open_own(Path(config.resume).expanduser()) if config.resume is not None else None
    with contextlib.ExitStack() as stack:
        records = stack.enter_context(
            run_records(trial, of_trial, where, source_of(train), resume, began=timings.began)
        )
        folder = records.folder if records is not None else None
        timings.add_earlier(records.earlier_s if records is not None else 0.0)
        source = stack.enter_context(contextlib.closing(make_source(folder)))
        total = num_trials if resume is None else None
        key, direction = config.optimization_key, config.direction or "max"
        progress = SearchProgress(of_trial.name, where, number, direction, records, total, key)
        progress.restore(source.trials())
        progress.shows_output = config.log == "all"
        loop = _make_loop(stack, source, of_trial, config, folder, progress, number)
        stack.callback(progress.close)
        interrupted = _is_interrupted(source, loop, lambda: choose_slots(launcher, of_trial, call, number), timings)
        for problem in _put_best_in_place(source, loop, records):
            progress.warn(problem)
        timings.end("collect")
        if records is not None:
            summary = _summary(source.trials(), direction if searched is not None else "")
            ended = {"outcome": "interrupted" if interrupted else "returned", "value": summary}
            records.ended(ended, timings.seconds(), timings.parts())
    return source, TrialsRun(
        name=of_trial.name,
        seconds=timings.seconds(),
        timings=timings.parts(),
        where=where,
        run_dir=folder,
        interrupted=interrupted,
    )


def _make_loop(
    stack: contextlib.ExitStack,
    source: KeptTrialSource,
    of_trial: Plan,
    config: TrialsConfig,
    folder: Path | None,
    progress: SearchProgress,
    number: int,
) -> TrialLoop:
    """Return the loop over trials, whose files are in ``folder``, or in a temporary one until ``stack`` is closed."""
    trials_dir = (folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lagom-")))) / "trials"
    return TrialLoop(
        source,
        of_trial,
        config.optimization_key,
        config.max_failed_trials,
        trials_dir,
        progress,
        stack.enter_context(mlflow_trials(of_trial.name, config.optimization_key)),
        number,
    )


def _summary(trials: Sequence[Mapping[str, Any]], direction: str) -> str:
    """Return a text with the outcome; ``direction`` is "min" or "max" for a search, "" for an ablation study."""
    values = [trial["value"] for trial in trials if trial["state"] == "complete"]
    if not direction or not values:
        return f"{len(values)} of {len(trials)} trials completed"
    return f"best {(min if direction == 'min' else max)(values):.6g} of {len(trials)} trials"


def _checked(
    train: Callable[..., Any], config: TrialsConfig, searched: Mapping[str, Any], extra: Mapping[str, Any]
) -> dict[str, Any]:
    """Check the call before anything starts; return the arguments for the function."""
    provided = {**checked(train, config.of_a_trial(), {**searched, **extra}), **extra}
    check_searched(train, searched)
    if config.verify:
        raise PlanError("verify=True is for one run: search without it, and verify a run with the best config")
    if config.timeline:
        raise PlanError("timeline is for one run: search without it, and record a run with the best config")
    return provided


def _plan(train: Callable[..., Any], config: TrialsConfig, provided: dict[str, Any], cluster: Cluster) -> Plan:
    """Return the plan that each trial runs under, as if ``train`` ran alone with the trials' config."""
    of_trial = plan(config.of_a_trial(), cluster, function_name(train), **facts_of_code(train, provided, cluster))
    return dataclasses.replace(
        of_trial, searches=True, keeps_logs=False, reports_pass_losses=config.reports_pass_losses
    )


def _call(train: Callable[..., Any], trial: TorchDistributedConfig, provided: dict[str, Any], timings: Timings) -> Call:
    """Return the call that each trial changes, with written files in place of DataFrames."""
    timings.end("prepare")
    written = replaced_arguments(provided)
    timings.end("frame" if written is not provided else "prepare")
    return Call(function=train, provided=written, random_states=random_start(trial), settings=process_settings())


def _put_best_in_place(source: KeptTrialSource, loop: TrialLoop, records: RunRecords | None) -> Sequence[str]:
    """Put the files of the trial that is kept in their places; return a text for each that cannot be."""
    if source.kept_trial is None:
        return []
    folder = loop.folder_of(source.kept_trial)
    if records is not None:
        folder = records.run_folder.at(str(folder.relative_to(records.folder)))
    return put_in_place(folder)


def _is_interrupted(
    source: KeptTrialSource, loop: TrialLoop, slots: Callable[[], TrialSlots], timings: Timings
) -> bool:
    """Run the trials, if any are left; return whether Ctrl-C has ended them."""
    timings.end("prepare")
    if source.finished:  # a resumed search may have had all its trials already
        return False
    try:
        with slots() as started:
            loop.run(started)
    except KeyboardInterrupt:
        return True
    finally:
        timings.end_at("slots", loop.began_at)
        timings.end("trials")
    return False
