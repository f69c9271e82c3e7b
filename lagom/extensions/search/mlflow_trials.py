"""``mlflow_trials``: an MLflow run for each trial, as a child of the search's run. See Note [Trials in MLflow]."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lagom.extensions.search.trial_source import TrialOutcome, TrialSpec

log = logging.getLogger("lagom")
_STATUS = {"complete": "FINISHED", "pruned": "KILLED", "failed": "FAILED"}
_LOCAL = re.compile(r"(file|sqlite):|(?!databricks)(?!.*:)")
"""Matches MLflow's tracking URIs of stores on this machine: ``file:``, ``sqlite:``, or a path without a scheme."""


@contextmanager
def mlflow_trials(name: str, metric: str) -> Iterator[MlflowTrials | None]:
    """Yield an object that makes an MLflow run for each trial; None if this process does not use MLflow.

    A process uses MLflow if it has imported it, and has an active run or has set an experiment. If it has only set an
    experiment, a new run ``name`` lasts as long as the context. That run is not active, so that an inline trial can
    start a run. If MLflow fails to start the run ``name``, None is yielded too.
    """
    mlflow: Any = sys.modules.get("mlflow")
    with contextlib.ExitStack() as stack:
        parent = None
        if mlflow is not None:
            with _warned():
                parent = mlflow.active_run()
                if parent is None and {"MLFLOW_EXPERIMENT_ID", "MLFLOW_EXPERIMENT_NAME"} & os.environ.keys():
                    parent = stack.enter_context(_run_of_search(mlflow, name))
        trials = MlflowTrials(mlflow, parent.info, metric) if parent is not None else None
        try:
            yield trials
        finally:
            if trials is not None:
                trials.give_up()


@contextmanager
def _run_of_search(mlflow: Any, name: str) -> Iterator[Any]:
    run = mlflow.start_run(run_name=name)
    mlflow.end_run("RUNNING")  # only not active any more
    status = "FAILED"
    try:
        yield run
        status = "FINISHED"
    finally:
        with _warned():
            mlflow.MlflowClient().set_terminated(run.info.run_id, status)


class MlflowTrials:
    """Makes and ends the MLflow runs of trials.

    Args:
        parent: MLflow's ``RunInfo`` of the search's own run.
        metric: name of the metric.
    """

    def __init__(self, mlflow: Any, parent: Any, metric: str) -> None:
        self._client = mlflow.MlflowClient()
        self._parent = parent
        self._metric = metric
        self._uri = str(mlflow.get_tracking_uri())
        self._runs: dict[int, str] = {}

    def begin(self, spec: TrialSpec, sees_files: bool) -> dict[str, str]:
        """Make the run of a trial, if it has none yet; return environment variables by which its ranks log to it.

        The environment is empty if the run could not be made, or the trial's host cannot reach the store.

        Args:
            sees_files: whether the trial's host sees the files of this machine, which may be MLflow's store.
        """
        with _warned():
            if spec.number not in self._runs:
                made = self._client.create_run(
                    self._parent.experiment_id,
                    run_name=f"trial {spec.number}",
                    tags={"mlflow.parentRunId": self._parent.run_id, "mlflow.user": self._parent.user_id or ""},
                )
                self._runs[spec.number] = made.info.run_id
        if spec.number not in self._runs or (_LOCAL.match(self._uri) and not sees_files):
            return {}
        environment = {"MLFLOW_RUN_ID": self._runs[spec.number], "MLFLOW_EXPERIMENT_ID": self._parent.experiment_id}
        return environment | {"MLFLOW_TRACKING_URI": self._uri}

    def end(self, spec: TrialSpec, outcome: TrialOutcome) -> None:
        """Log the hyperparameters and the metric of a trial, and how it ended."""
        run = self._runs.pop(spec.number, None)
        if run is None:
            return
        for key, value in spec.params.items():
            with contextlib.suppress(Exception):  # MLflow refuses a parameter that the program logged with another text
                self._client.log_param(run, key, value)
        with _warned():
            if outcome.value is not None:
                # For MLflow the value at the largest step is the last, and the program may have logged some itself.
                known = [one.step for one in self._client.get_metric_history(run, self._metric)]
                self._client.log_metric(run, self._metric, outcome.value, step=max(known, default=-1) + 1)
            if outcome.error:
                self._client.set_tag(run, "error", outcome.error[:5000])
            self._client.set_terminated(run, _STATUS[outcome.state])

    def give_up(self) -> None:
        """End the MLflow runs of trials that still run; the search does not wait for these trials."""
        for run in self._runs.values():
            with _warned():
                self._client.set_terminated(run, "KILLED")
        self._runs.clear()


_warnings: set[str] = set()


@contextmanager
def _warned() -> Iterator[None]:
    """Turn errors of MLflow into a warning: a search must not fail because MLflow's server does not answer."""
    try:
        yield
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        if text not in _warnings:
            _warnings.add(text)
            log.warning("MLflow has not all that was to be logged of this search: %s", text)


# Note [Trials in MLflow]
#
# MLFLOW_RUN_ID is MLflow's own way to say which run a process logs to: the first start_run() in it, or the first call
# that logs, goes on with that run, and a later start_run() makes a new one. So a trial's process gets the run that the
# search has made for the trial, and an unmodified program logs to it. If the trial's host cannot reach the store (files
# of this machine), the process gets no run from the search, and MLflow does what it does in a plain call.
#
# The hyperparameters are logged when the trial has ended: MLflow refuses a second value of a parameter, and a program
# that logs its own, perhaps rounded, must not fail for it.
#
# A store in files is the real one, not one on the trial's own disk: see lagom/extensions/observe/tracking/mlflow.py.
