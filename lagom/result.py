"""``Result``: the value of a run, and its display."""

from __future__ import annotations

import base64
import html
import os
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lagom.records.upload import Upload

TEST_RESULT = "test result"
_SHOWN_RANKS = 8
# Front ends have styles of their own for tables: columns of equal width, and centered.
_TABLE = "table-layout:auto;margin:0;border-collapse:collapse"
_CELL = "text-align:left;vertical-align:top;padding:.15em .8em .15em 0"


class Page(type(Path())):  # type: ignore[misc]  # the class of this system's paths
    """The path of an HTML page, which a notebook shows as a link."""

    def _repr_html_(self) -> str:
        try:
            place = urllib.parse.quote(os.path.relpath(self))
            if place.startswith("../"):  # a notebook's server serves no files above the notebook's folder
                page = base64.b64encode(self.read_bytes()).decode()
                place = f"data:text/html;base64,{page}"
        except OSError:
            return html.escape(str(self))
        opened = f"href='{place}' target='_blank' download='{html.escape(self.name)}'"
        return f"<a {opened}>{html.escape(str(self))}</a>"


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
        upload: Upload | None = None,
    ) -> None:
        metrics = {key: item for key, item in value.items() if isinstance(key, str)} if isinstance(value, dict) else {}
        self._items = {**metrics, TEST_RESULT: value}
        self._value = value
        self._per_rank = tuple(per_rank)
        self._seconds = seconds
        self._name = name
        self._where = where
        self._run_dir = run_dir
        self._upload = upload

    @property
    def value(self) -> Any:
        """The aggregated value: the value that one machine would have returned."""
        return self._value

    @property
    def per_rank(self) -> tuple[Any, ...]:
        """Each rank's own value, in rank order."""
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
        """Folder of the run's records; None if the config keeps none.

        For records at a URL it is a copy, which is removed with this object.
        """
        return self._run_dir

    @property
    def run_url(self) -> str | None:
        """URL of the run's records, if they are not in a folder of this machine."""
        return self._upload.url if self._upload is not None else None

    def report(self, path: str | os.PathLike[str] | None = None) -> Page:
        """Write one HTML page about the run, which needs no network to be read; return its path.

        A notebook shows the path as a link.

        Args:
            path: path of the page; None: "report.html" in the run's folder, and at its URL if it has one.

        Raises:
            ValueError: if the config kept no records.
        """
        if self._run_dir is None:
            raise ValueError("there is nothing to report from: this run's config had run_dir=None")
        from lagom.records.report import report

        target = Page(path if path is not None else self._run_dir / "report.html")
        target.write_text(report(self._run_dir), encoding="utf-8")
        if self._upload is not None and path is None:
            self._upload.send(target)
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
        keys = [key for key in self._items if key != TEST_RESULT or len(self._items) == 1]
        by_rank = {key: [_short(item) for item in self._by_rank(key)] for key in keys}
        # Ranks return the same values as a rule: then they need no columns.
        num_ranks = 0 if all(len(set(texts)) < 2 for texts in by_rank.values()) else min(self.world_size, _SHOWN_RANKS)
        head = ["", "result", *(f"rank {rank}" for rank in range(num_ranks))]
        head += ["…"] * (0 < num_ranks < self.world_size)
        rows = ([key, _short(self._items[key]), *by_rank[key][:num_ranks]] for key in keys)
        body = "".join(f"<tr>{_cells('th', row[:1])}{_cells('td', row[1:])}</tr>" for row in rows)
        return (
            f"<div style='overflow-x:auto'><div><b>{html.escape(self._title())}</b></div>"
            f"<table style='{_TABLE}'><thead><tr>{_cells('th', head)}</tr></thead><tbody>{body}</tbody></table>"
            f"{self._records()}</div>"
        )

    def _records(self) -> str:
        """Return HTML of the run's charts and records, shown below its result."""
        if self._run_dir is None:
            return ""
        from lagom.records.notebook_chart import notebook_chart

        try:
            charts = notebook_chart(self._run_dir)
        except (OSError, ValueError):  # moved or changed since
            charts = ""
        return (
            f"<div>{charts}</div><div>records: {html.escape(str(self._run_dir))}; report() makes a page of them</div>"
        )

    def _by_rank(self, key: str) -> list[Any]:
        if key != TEST_RESULT or isinstance(self._value, dict):
            return [item.get(key, item) if isinstance(item, dict) else item for item in self._per_rank]
        return list(self._per_rank)

    def _title(self) -> str:
        ranks = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"
        where = f" on {self._where}" if self._where else ""
        return f"{self._name or 'a run'}: {ranks}{where}, {_lasted(self._seconds)}"


def _cells(tag: str, texts: Iterable[str]) -> str:
    return "".join(f"<{tag} style='{_CELL}'>{html.escape(text)}</{tag}>" for text in texts)


def _lasted(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.2f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min {rest} s"


def _short(value: Any, limit: int = 60) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    try:
        text = " ".join(repr(value).split())
    except Exception:  # a class of the program's may do anything in __repr__
        text = f"<{type(value).__name__}>"
    return text if len(text) <= limit else text[: limit - 1] + "…"
