"""``AblationResult``: what each component of an ablation study is worth, and its display."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Mapping, Sequence
from typing import Any

from lagom.errors import LagomError
from lagom.extensions.search.effects import Effect
from lagom.extensions.search.search_result import SearchResult
from lagom.result import html_table, short
from lagom.watch.interval_chart import Bar, interval_chart

_HEAD = ("without", "metric", "difference to the base", "95% interval", "seeds")
_ONE_SEED = "one seed: the differences have no confidence interval; seeds=3 gives them one"
_SEED_IGNORED = (
    "the seeds make no difference: if the function sets a seed of its own, give it a parameter seed, or put seed into "
    "hparams; either is the trial's"
)


class AblationResult(SearchResult):
    """The outcome of an ablation study, read-only; ``effects`` has a dict for each variant except the base.

    Args:
        effects: the change of the metric without each component.
        base: the mean metric with all components; None if no such trial ran to its end.
        num_seeds: number of seeds that each variant has.
        seed_ignored: whether seeds make no difference.
        given: arguments of ``SearchResult``.
    """

    def __init__(
        self,
        trials: Sequence[Mapping[str, Any]],
        *,
        effects: Sequence[Effect],
        base: float | None,
        num_seeds: int,
        seed_ignored: bool,
        **given: Any,
    ) -> None:
        super().__init__(trials, **given)
        self._effects = list(effects)
        self._base = base
        self._num_seeds = num_seeds
        self._seed_ignored = seed_ignored

    @property
    def base_value(self) -> float:
        """The mean metric of the base, with all components.

        Raises:
            LagomError: if no trial of the base has run to its end.
        """
        if self._base is None:
            errors = [trial["error"] for trial in self.trials if trial["error"]]
            raise LagomError(f"no trial of the base has run to its end{f': {errors[0]}' if errors else ''}")
        return self._base

    @property
    def effects(self) -> list[dict[str, Any]]:
        """One dict for each component, or for each layer that a pattern matches, in the order of the study.

        Its keys are "component", "value" (the mean metric without it), "difference" (to the base, the mean over seeds),
        "low" and "high" (ends of the 95% confidence interval of the difference; None with one seed) and "num_seeds".
        ``pandas.DataFrame(result.effects)`` is a table.
        """
        return [dataclasses.asdict(effect) for effect in self._effects]

    def chart(self) -> str:
        """Return the differences as an SVG element, the most harmful omission first; empty if there are none."""
        bars = [Bar(e.component, e.difference, e.low, e.high) for e in self._ordered() if e.difference is not None]
        better = "larger" if self._direction == "max" else "smaller"
        return interval_chart("What leaving out a component changes", bars, f"difference ({better} is better)")

    def __repr__(self) -> str:
        rows = [_HEAD, *self._rows()]
        widths = [max(len(row[place]) for row in rows) for place in range(len(_HEAD))]
        table = ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        notes = [f"  {note}" for note in self._notes()]
        return "\n".join([f"Ablation study of {self._title()}", f"  trials: {self._counts()}", *table, *notes])

    def _repr_html_(self) -> str:
        notes = "".join(f"<div>{html.escape(note)}</div>" for note in self._notes())
        return (
            f"<div style='overflow-x:auto'><div><b>{html.escape(self._title())}</b></div>"
            f"<div>{html.escape(self._counts())}</div><div style='max-width:44em'>{self.chart()}</div>"
            f"{html_table(_HEAD, self._rows())}{notes}{self._records()}</div>"
        )

    def _page_parts(self) -> list[str]:
        from lagom.extensions.search.pages.search_page import narrow, trial_table
        from lagom.extensions.search.pages.slot_timeline import slot_timeline
        from lagom.watch.html_page import timings_bar

        notes = "".join(f"<p>{html.escape(note)}</p>" for note in self._notes())
        return [
            timings_bar(self._timings),
            f"{narrow(self.chart())}{html_table(_HEAD, self._rows())}{notes}",
            slot_timeline(self._trials),
            trial_table(self._trials, self._names()),
        ]

    def _best_line(self) -> str:
        return f"base: {short(self._base)}" if self._base is not None else ""

    def _rows(self) -> list[list[str]]:
        num_base = sum(not trial["params"]["without"] for trial in self._complete())
        base = ["(base)", self._shown(self._base, ""), "", "", str(num_base)]
        return [base, *(self._row(effect) for effect in self._ordered())]

    def _row(self, effect: Effect) -> list[str]:
        difference = f"{effect.difference:+.6g}" if effect.difference is not None else ""
        interval = f"{effect.low:+.4g} to {effect.high:+.4g}" if effect.low is not None else ""
        return [
            effect.component,
            self._shown(effect.value, effect.component),
            difference,
            interval,
            str(effect.num_seeds),
        ]

    def _ordered(self) -> list[Effect]:
        """Return the effects, the most helpful component first, and components without a difference last."""
        sign = 1 if self._direction == "max" else -1
        known = [effect for effect in self._effects if effect.difference is not None]
        unknown = [effect for effect in self._effects if effect.difference is None]
        return [*sorted(known, key=lambda effect: sign * (effect.difference or 0.0)), *unknown]

    def _notes(self) -> list[str]:
        names = {"": "base"} | {effect.component: effect.component for effect in self._effects}
        failed = [f"{shown}: {error}" for name, shown in names.items() if (error := self._error(name))]
        if self._num_seeds == 1:
            return [*failed, _ONE_SEED]
        return [*failed, *([_SEED_IGNORED] if self._seed_ignored else [])]

    def _shown(self, value: float | None, component: str) -> str:
        if value is not None:
            return short(value)
        return "failed" if self._error(component) else "not run"

    def _error(self, component: str) -> str:
        """Return the last error of the trials without ``component``; "" if there is none."""
        own = [trial for trial in self.trials if trial["params"]["without"] == component]
        return next((" ".join(trial["error"].split()) for trial in reversed(own) if trial["error"]), "")
