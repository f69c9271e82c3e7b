"""``Result``: what a run gave back, and how it shows itself."""

from __future__ import annotations

import html
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

TEST_RESULT = "test result"
_SHOWN_RANKS = 8


class Result(Mapping[str, Any]):
    """The outcome of a run, read-only.

    ``result["test result"]`` is the aggregated value; when the function returned a dict of metrics, each metric is a
    key as well.
    """

    def __init__(
        self,
        value: Any,
        per_rank: list[Any],
        *,
        seconds: float,
        name: str = "",
        where: str = "",
        run_dir: Path | None = None,
    ) -> None:
        metrics = {key: item for key, item in value.items() if isinstance(key, str)} if isinstance(value, dict) else {}
        self._items = {**metrics, TEST_RESULT: value}
        self._value = value
        self._per_rank = tuple(per_rank)
        self._seconds = seconds
        self._name = name
        self._where = where
        self._run_dir = run_dir

    @property
    def value(self) -> Any:
        """The aggregated value: what one machine would have returned."""
        return self._value

    @property
    def per_rank(self) -> tuple[Any, ...]:
        """What each rank returned, in rank order."""
        return self._per_rank

    @property
    def world_size(self) -> int:
        """Number of ranks that ran."""
        return len(self._per_rank)

    @property
    def seconds(self) -> float:
        """Wall-clock seconds from the call to the result."""
        return self._seconds

    @property
    def run_dir(self) -> Path | None:
        """Folder that keeps the run's records; None where the config had none kept."""
        return self._run_dir

    def report(self, path: str | os.PathLike[str] | None = None) -> Path:
        """Write one HTML page about the run, which needs no network to be looked at; returns its path.

        Args:
            path: of the page; None: "report.html" in the run's folder.

        Raises:
            ValueError: when no records were kept, as the config said.
        """
        if self._run_dir is None:
            raise ValueError("there is nothing to report from: this run's config had run_dir=None")
        from lagom.records.report import report

        target = Path(path) if path is not None else self._run_dir / "report.html"
        target.write_text(report(self._run_dir), encoding="utf-8")
        return target

    def __getitem__(self, key: str) -> Any:
        try:
            return self._items[key]
        except KeyError:
            raise KeyError(f"{key!r}; this result has {', '.join(map(repr, self._items))}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        metrics = "".join(f"\n  {key}: {_short(value)}" for key, value in self._items.items())
        return f"Result of {self._title()}{metrics}"

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><th style='text-align:left'>{html.escape(key)}</th>"
            f"<td style='text-align:left'>{html.escape(_short(value))}</td>"
            + "".join(f"<td style='text-align:left'>{html.escape(_short(item))}</td>" for item in self._by_rank(key))
            + "</tr>"
            for key, value in self._items.items()
        )
        shown = range(min(self.world_size, _SHOWN_RANKS))
        ranks = "".join(f"<th style='text-align:left'>rank {rank}</th>" for rank in shown)
        if self.world_size > _SHOWN_RANKS:
            ranks += "<th style='text-align:left'>…</th>"
        return (
            f"<table><caption style='text-align:left'><b>{html.escape(self._title())}</b></caption>"
            f"<thead><tr><th></th><th style='text-align:left'>result</th>{ranks}</tr></thead>"
            f"<tbody>{rows}</tbody></table>"
        )

    def _by_rank(self, key: str) -> list[Any]:
        items = self._per_rank[:_SHOWN_RANKS]
        if key != TEST_RESULT or isinstance(self._value, dict):
            return [item.get(key, item) if isinstance(item, dict) else item for item in items]
        return list(items)

    def _title(self) -> str:
        ranks = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"
        where = f" on {self._where}" if self._where else ""
        return f"{self._name or 'a run'}: {ranks}{where}, {self._seconds:.2f} s"


def _short(value: Any, limit: int = 60) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    try:
        text = " ".join(repr(value).split())
    except Exception:  # a foreign __repr__ may do anything
        text = f"<{type(value).__name__}>"
    return text if len(text) <= limit else text[: limit - 1] + "…"
