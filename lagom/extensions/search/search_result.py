"""``SearchResult``: the value of a search, and its display."""

from __future__ import annotations

import html
import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from lagom.errors import LagomError
from lagom.extensions.search.pages.axis import shown
from lagom.result import Page, html_table, lasted, short
from lagom.run_folder import RunFolder, write_file

if TYPE_CHECKING:
    import optuna
    import pandas  # type: ignore[import-untyped]

_SHOWN = 10  # trials in a notebook
_FEW = 30
"""Number of trials below which importances are a hint."""
_BEST = ("best_id", "best_val", "best_config", "worst_id", "worst_val", "worst_config", "avg")
_COUNTS = ("metric_list", "num_trials", "early_stopped")


class SearchResult(Mapping[str, Any]):
    """The outcome of a search, read-only.

    As a mapping it has the keys of Maggy's result: "best_id", "best_val", "best_config", "worst_id", "worst_val",
    "worst_config", "avg" and "metric_list", of the trials that ran to their end, "num_trials" and "early_stopped". If
    no trial ran to its end, it has only the last three keys, and the others raise a LagomError.

    Args:
        trials: one dict for each trial that has ended; see ``trials``.
        direction: "min" or "max".
        hparams: hyperparameters that all trials share.
        metric: name of the metric.
        logarithmic: names of the hyperparameters with a logarithmic scale.
    """

    def __init__(
        self,
        trials: Sequence[Mapping[str, Any]],
        *,
        direction: str,
        hparams: Mapping[str, Any],
        study: optuna.Study | None = None,
        seconds: float = 0.0,
        timings: Mapping[str, float] = MappingProxyType({}),
        name: str = "",
        where: str = "",
        run_dir: Path | None = None,
        interrupted: bool = False,
        metric: str = "metric",
        logarithmic: Collection[str] = (),
    ) -> None:
        self._trials = [dict(trial) for trial in trials]
        self._direction = direction
        self._hparams = dict(hparams)
        self._study = study
        self._seconds = seconds
        self._timings = dict(timings)
        self._name = name
        self._where = where
        self._run_dir = run_dir
        self._interrupted = interrupted
        self._metric = metric
        self._logarithmic = logarithmic

    @property
    def trials(self) -> list[dict[str, Any]]:
        """One dict for each trial, by number.

        Its keys are "number", "params", "value", "state" ("complete", "pruned" or "failed"), "seconds", "started" (when
        a slot got it, in seconds since the epoch), "prepare_s" (seconds until it began there), "slot", "error",
        "traceback", "folder" (its output and its files; None without records) and "returned" (what the function
        returned, in types of JSON; None in a search if that takes more than 4,096 characters). The value of a pruned
        trial is the last that it reported.
        """
        return self._trials

    @property
    def best_trial(self) -> dict[str, Any]:
        """The trial with the best value of those that ran to their end; the first of equal ones.

        Raises:
            LagomError: if no trial ran to its end.
        """
        return self._extreme(self._direction == "max")

    @property
    def best_value(self) -> float:
        """The metric of the best trial."""
        return float(self.best_trial["value"])

    @property
    def best_config(self) -> dict[str, Any]:
        """All hyperparameters of the best trial, with those that all trials share, as a config's ``hparams``."""
        return {**self._hparams, **self.best_trial["params"]}

    @property
    def study(self) -> optuna.Study | None:
        """Optuna's study, for its plots; None if trials were not chosen by Optuna."""
        return self._study

    @property
    def seconds(self) -> float:
        """Wall-clock seconds from the call to the result: the sum of ``timings``."""
        return self._seconds

    @property
    def timings(self) -> dict[str, float]:
        """Seconds of each part of the search that took time, in order.

        "earlier": earlier processes of a resumed search; "prepare": checks, plan and sources; "frame": the DataFrame
        written; "slots": the call sent, and the wait for slots; "trials": from the first trial's start until the slots
        have ended; "collect": the best trial's files put in their places.
        """
        return dict(self._timings)

    @property
    def run_dir(self) -> Path | None:
        """Folder of the search's records; None if the config keeps none."""
        return self._run_dir

    @property
    def interrupted(self) -> bool:
        """Whether the search was ended by Ctrl-C."""
        return self._interrupted

    @property
    def importances(self) -> dict[str, float]:
        """Importance of each hyperparameter for being in the better half of the trials (PED-ANOVA); their sum is 1.

        Pruned trials count as worse than all that ran to their end. With fewer than 30 trials the numbers are a hint.
        Empty if the trials were not chosen by Optuna, or fewer than ten ran to their end.
        """
        if self._study is None:
            return {}
        from lagom.extensions.search.samplers.algorithms import importances

        return importances(self._study)

    def report(self, path: str | os.PathLike[str] | None = None) -> Page:
        """Write one HTML page about the search, which needs no network to be read; return its path.

        A notebook shows the path as a link.

        Args:
            path: path of the page; None: "report.html" in the search's folder.

        Raises:
            ValueError: without ``path``, if the config kept no records.
        """
        if path is None and self._run_dir is None:
            raise ValueError(
                "the search kept no records (run_dir=None), so say where the page goes: report('page.html')"
            )
        from lagom.extensions.search.pages.search_page import search_page

        target = Page(path if path is not None else f"{self._run_dir}/report.html")
        facts = [self._counts(), *([self._best_line()] if self._complete() else [])]
        folder = RunFolder.open(self._run_dir) if self._run_dir is not None else None
        write_file(target, search_page(self._title(), facts, self._page_parts(), folder))
        return target

    def dataframe(self) -> pandas.DataFrame:
        """Return the main facts of ``trials`` as a DataFrame of pandas, with a column for each hyperparameter.

        Raises:
            LagomError: if pandas is missing.
        """
        try:
            import pandas as pd
        except ImportError:
            raise LagomError("a DataFrame needs pandas, which is not installed here: pip install pandas") from None
        rest = ("value", "state", "seconds", "slot", "error")
        rows = [{"number": each["number"], **each["params"]} | {n: each.get(n) for n in rest} for each in self._trials]
        return pd.DataFrame(rows, columns=["number", *self._names(), *rest])

    def __getitem__(self, key: str) -> Any:
        if key not in (*_BEST, *_COUNTS):
            raise KeyError(f"{key!r}; this result has {', '.join(map(repr, self))}")
        complete = self._complete()
        if key in _COUNTS:
            return {
                "metric_list": [each["value"] for each in complete],
                "num_trials": len(self._trials),
                "early_stopped": sum(each["state"] == "pruned" for each in self._trials),
            }[key]
        if key == "avg":
            self._extreme(True)
            return sum(each["value"] for each in complete) / len(complete)
        kind, _, fact = key.partition("_")
        trial = self._extreme((self._direction == "max") == (kind == "best"))
        return (
            {**self._hparams, **trial["params"]} if fact == "config" else trial[{"id": "number", "val": "value"}[fact]]
        )

    def __iter__(self) -> Iterator[str]:
        return iter((*_BEST, *_COUNTS) if self._complete() else _COUNTS)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        lines = [f"Search of {self._title()}", f"  trials: {self._counts()}"]
        if self._complete():
            lines.append(f"  {self._best_line()}")
        elif errors := [each["error"] for each in self._trials if each["error"]]:
            lines.append(f"  last error: {_line(errors[-1])}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        names = self._names()
        head = ["trial", "value", *names, "state", "seconds"]
        rows = [
            [
                str(each["number"]),
                short(each["value"]) if each["value"] is not None else "",
                *(shown(each["params"][name]) if name in each["params"] else "" for name in names),
                _line(f"{each['state']}: {each['error']}" if each["error"] else each["state"]),
                f"{each['seconds']:.3g}" if each.get("seconds") is not None else "",
            ]
            for each in self._ranked()[:_SHOWN]
        ]
        hidden = len(self._trials) - len(rows)
        more = f"<div>and {hidden} more: <code>.dataframe()</code> has all</div>" if hidden > 0 else ""
        return (
            f"<div style='overflow-x:auto'><div><b>{html.escape(self._title())}</b></div>"
            f"<div>{html.escape(self._counts())}</div>{html_table(head, rows)}{more}{self._records()}</div>"
        )

    def _page_parts(self) -> list[str]:
        """Return the HTML parts that ``report`` shows between its first paragraphs and the settings."""
        from lagom.extensions.search.pages.parallel_coordinates import parallel_coordinates
        from lagom.extensions.search.pages.search_page import narrow, trial_table, value_charts
        from lagom.extensions.search.pages.slot_timeline import slot_timeline
        from lagom.watch.html_page import timings_bar
        from lagom.watch.interval_chart import Bar, interval_chart

        importance = [Bar(name, share) for name, share in self.importances.items()]
        return [
            timings_bar(self._timings),
            value_charts(self._trials, self._direction),
            parallel_coordinates(self._trials, self._direction, self._metric, self._logarithmic),
            narrow(interval_chart(self._importance_title(), importance)),
            slot_timeline(self._trials),
            trial_table(self._ranked(), self._names()),
        ]

    def _importance_title(self) -> str:
        title, num = "Importance of hyperparameters (PED-ANOVA)", len(self._trials)
        return f"{title}: only a hint, since {num} trials are few" if num < _FEW else title

    def _best_line(self) -> str:
        best = self.best_trial
        params = ", ".join(f"{name}={shown(value)}" for name, value in best["params"].items())
        which = "smallest" if self._direction == "min" else "largest"
        return f"best: {short(best['value'])}, the {which}, of trial {best['number']} with {params}"

    def _records(self) -> str:
        if self._run_dir is None:
            return ""
        return f"<div>records: {html.escape(str(self._run_dir))}; report() makes a page of them</div>"

    def _title(self) -> str:
        where = f" on {self._where}" if self._where else ""
        cut = ", interrupted" if self._interrupted else ""
        return f"{self._name or 'a function'}{where}, {lasted(self._seconds)}{cut}"

    def _counts(self) -> str:
        states = Counter(each["state"] for each in self._trials)
        parts = [f"{states[state]} {state}" for state in ("complete", "pruned", "failed") if states[state]]
        return ", ".join(parts) or "none"

    def _names(self) -> list[str]:
        return list(dict.fromkeys(name for each in self._trials for name in each["params"]))

    def _complete(self) -> list[dict[str, Any]]:
        return [each for each in self._trials if each["state"] == "complete"]

    def _ranked(self) -> list[dict[str, Any]]:
        """Return all trials: completed ones, the best first, then pruned ones, then failed ones."""
        sign = -1 if self._direction == "max" else 1
        order = {"complete": 0, "pruned": 1, "failed": 2}
        return sorted(
            self._trials,
            key=lambda each: (order[each["state"]], sign * each["value"] if each["value"] is not None else 0),
        )

    def _extreme(self, largest: bool) -> dict[str, Any]:
        complete = self._complete()
        if not complete:
            errors = [each["error"] for each in self._trials if each["error"]]
            why = f"; the last error was {errors[-1]}" if errors else ""
            raise LagomError(f"no trial has run to its end, so none is the best: {self._counts()}{why}")
        return (max if largest else min)(complete, key=lambda each: float(each["value"]))


def _line(text: object, limit: int = 80) -> str:
    line = " ".join(str(text).split())
    return line if len(line) <= limit else line[: limit - 1] + "…"
