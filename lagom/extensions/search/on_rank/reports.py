"""``report_logged_values``: reports the metric that an unmodified program logs in its trial. See Note [Reports]."""

from __future__ import annotations

import functools
import os
import threading
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from lagom.extensions.search.on_rank.pass_losses import record_pass_losses
from lagom.patching.importers import on_import
from lagom.patching.replace import replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import ModuleType

    from lagom.extensions.search.on_rank.trial import Trial
    from lagom.session.session import Session


@contextmanager
def report_logged_values(session: Session, trial: Trial) -> Iterator[None]:
    """Report the values that the program logs as the trial's metric, to MLflow, TensorBoard or a tqdm bar.

    If the plan says so, the mean loss of each pass counts for a program that logs none.
    """
    reports = _Reports(session, trial)
    session.events.pass_ended.subscribe(reports.end_pass)
    with ExitStack() as stack:

        def change(module: ModuleType) -> None:
            for name, method, log in _LOGGERS[module.__name__]:
                owner = vars(module)[name]
                stack.enter_context(replaced(owner, method, _followed_by(vars(owner)[method], reports, log)))

        stack.enter_context(on_import(dict.fromkeys(_LOGGERS, change)))
        if session.plan.reports_pass_losses and session.config.backend == "torch":
            stack.enter_context(record_pass_losses(session, functools.partial(reports.log, "loss", trial.metric)))
        yield


class _Reports:
    """Reports the values of one source, the first that logs the metric."""

    def __init__(self, session: Session, trial: Trial) -> None:
        self._session = session
        self._trial = trial
        self.metric = trial.metric
        self._step = -1
        self._here = os.getpid(), threading.get_ident()
        self._pending: tuple[str, str, Any] | None = None
        """Source, name and value that a tqdm bar shows in a pass that has not ended; None if no bar shows any."""
        self._epoch = 0

    def log(self, source: str, name: str, value: Any, step: Any = None) -> None:
        """Report ``value``, which ``source`` has logged as ``name`` at ``step``; skip other metrics and other sources.

        A missing step, or one that is not later than the last step, becomes the step after the last.
        """
        if name != self.metric and name.rpartition("/")[2] != self.metric:
            return
        number = _number(value)
        # Skip values that a thread or a forked process of the program logs: other ranks do not know when it does.
        if number is None or (os.getpid(), threading.get_ident()) != self._here:
            return
        if self._trial.takes(f"{source} {name}"):
            if source in ("mlflow", "tensorboard"):
                self._trial.logged = number
            self._step = step if type(step) is int and step > self._step else self._step + 1
            self._trial.report(self._step, number)

    def show(self, name: str, value: Any) -> None:
        """Report ``value``, which a tqdm bar shows: at once between passes over loaders, else at the pass's end."""
        passes = self._session.passes
        epoch = passes.progress["epoch"] or 0
        if self._pending is not None and epoch != self._epoch:
            self._report_pending()  # the program has left that pass early
        if passes.evaluation() is None and not passes.trains():
            self.log("tqdm between passes,", name, value)
            return
        kind = "training" if passes.evaluation() is None else "evaluation"
        self._pending, self._epoch = (f"tqdm in {kind},", name, value), epoch

    def end_pass(self) -> None:
        """Report the last value that a bar has shown in the pass that ends."""
        if self._pending is not None and ("evaluation" in self._pending[0] or not self._session.passes.trains()):
            self._report_pending()

    def _report_pending(self) -> None:
        assert self._pending is not None
        pending, self._pending = self._pending, None
        self.log(*pending)


def _followed_by(original: Callable[..., Any], reports: _Reports, log: Callable[..., None]) -> Callable[..., Any]:
    """Return a wrapper of ``original`` that then calls ``log`` with the same arguments."""

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(self, *args, **kwargs)
        log(reports, *args, **kwargs)
        return found

    return call


def _log_metric(
    reports: _Reports, run_id: str, key: str, value: Any, timestamp: Any = None, step: Any = None, *_: Any, **__: Any
) -> None:
    reports.log("mlflow", key, value, step)


def _log_batch(reports: _Reports, run_id: str, metrics: Any = (), *_: Any, **__: Any) -> None:
    for metric in metrics:
        reports.log("mlflow", metric.key, metric.value, metric.step)


def _add_scalar(reports: _Reports, tag: str, scalar_value: Any, global_step: Any = None, *_: Any, **__: Any) -> None:
    reports.log("tensorboard", tag, scalar_value, global_step)


def _add_scalars(
    reports: _Reports, main_tag: str, tag_scalar_dict: Mapping[str, Any], global_step: Any = None, *_: Any, **__: Any
) -> None:
    for tag, value in tag_scalar_dict.items():
        reports.log("tensorboard", f"{main_tag}/{tag}", value, global_step)


def _set_postfix(reports: _Reports, ordered_dict: Any = None, refresh: bool = True, *_: Any, **values: Any) -> None:
    for name, value in {**dict(ordered_dict or {}), **values}.items():
        if name == reports.metric:
            reports.show(name, value)


_WRITER = (("SummaryWriter", "add_scalar", _add_scalar), ("SummaryWriter", "add_scalars", _add_scalars))
_LOGGERS: Mapping[str, tuple[tuple[str, str, Callable[..., None]], ...]] = {
    "mlflow.tracking.client": (("MlflowClient", "log_metric", _log_metric), ("MlflowClient", "log_batch", _log_batch)),
    "torch.utils.tensorboard.writer": _WRITER,
    "tensorboardX.writer": _WRITER,
    "tqdm.std": (("tqdm", "set_postfix", _set_postfix),),
}
"""For each module: class, method that logs, and the function that gets the method's arguments."""


def _number(value: Any) -> float | None:
    """Return ``value`` as a float if it is a number, a tensor or array of one, or a bar's text; else None."""
    try:
        return float(value.item() if hasattr(value, "item") else value)
    except (TypeError, ValueError, RuntimeError):
        return None


# Note [Reports]
#
# A trial reports values of one source, the first that has a value: reporter.broadcast; MLflow, TensorBoard or a bar
# (_LOGGERS) with one name, which is the metric's or, except for a bar, a path that ends with it, as "val/loss"; or the
# mean losses of passes (pass_losses.py). One logger with two names is two sources, and so is a bar in training and in
# evaluation: their values are two series (a training loss beside a test loss), which cannot be compared.
#
# MLflow and TensorBoard count as the program calls them. A bar shows many values in a pass; the last counts, when the
# pass over the loader has ended. On all ranks the same calls are made in the same order, and rank 0's values count: the
# driver answers each report once for all ranks, so that they end together.
#
# A step matters to pruners, which compare trials at equal steps. If a program's steps begin anew in each epoch, or are
# missing, its reports get consecutive steps.
