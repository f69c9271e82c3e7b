"""``Result``: the value of a run, and its display."""

from __future__ import annotations

import base64
import html
import os
import tempfile
import urllib.parse
import webbrowser
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from lagom.errors import LagomError
from lagom.extensions import registry
from lagom.run_folder import RunFolder, write_file
from lagom.speed import Speed
from lagom.watch.notebook import notebook

if TYPE_CHECKING:
    from lagom.watch.upload import Upload
    from lagom.whole_modules import WholeModule

TEST_RESULT = "test result"
_SHOWN_RANKS = 8
# These override the table styles of notebook front ends, which make columns of equal width and center them.
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


def show(run: str | os.PathLike[str] | Result) -> Page:
    """Write the report of a run, and return its path, which a notebook shows as a link.

    Outside of a notebook, open the report in a browser if there is a display.

    Args:
        run: the folder of the run, a part of its name in the default folder, or its result.

    Raises:
        ValueError: if there is no such run, or it has kept no records.
    """
    if isinstance(run, Result):
        page = run.report()
    else:
        from lagom.config import TorchDistributedConfig
        from lagom.watch.run_dir import RESULT
        from lagom.watch.runs import open_run

        folder = open_run(run, TorchDistributedConfig().run_dir)
        # Nothing is written to a folder of somebody else, and no page of it is opened.
        page = Page(folder.path if folder.is_own else tempfile.mkdtemp(prefix="lagom-report-")) / "report.html"
        if not (folder.is_own and folder.is_newer(page.name, RESULT)):
            write_file(page, registry.report(folder))
    if notebook() is None and (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        webbrowser.open(page.absolute().as_uri())
    return page


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
        timings: Mapping[str, float] = MappingProxyType({}),
        whole: Sequence[WholeModule] = (),
        speed: Speed | None = None,
        name: str = "",
        where: str = "",
        run_dir: Path | None = None,
        upload: Upload | None = None,
        failures: Sequence[Mapping[str, Any]] = (),
        module: Any = None,
    ) -> None:
        metrics = {key: item for key, item in value.items() if isinstance(key, str)} if isinstance(value, dict) else {}
        self._items = {**metrics, TEST_RESULT: value}
        self._value = value
        self._per_rank = tuple(per_rank)
        self._seconds = seconds
        self._timings = dict(timings)
        self._whole = tuple(whole)
        self._speed = speed or Speed(world_size=len(per_rank))
        self._name = name
        self._where = where
        self._run_dir = run_dir
        self._upload = upload
        self._failures = tuple(map(dict, failures))
        self._model_factory = module

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_model_factory": None}  # a lambda cannot be pickled

    @property
    def value(self) -> Any:
        """The aggregated value: that of all ranks, if they returned equal values; else see ``aggregate.aggregate``."""
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
        """Wall-clock seconds from the call to the result: the sum of ``timings``."""
        return self._seconds

    @property
    def timings(self) -> dict[str, float]:
        """Seconds of each part of the run that took time, in order.

        "earlier": earlier processes of a resumed run; "prepare": checks, plan and sources; "frame": the DataFrame
        written; "verify": rehearsals; "lost": attempts that were lost; "slots": the call sent, and the wait for slots;
        "start": ranks start, and unpack the call; "function": the function itself; "collect": the result collected.
        """
        return dict(self._timings)

    @property
    def whole(self) -> list[WholeModule]:
        """Modules that ran whole on every rank and why, by share of the forwards' time; empty with one rank.

        After a loss of ranks these are the modules of the last attempt.
        """
        return list(self._whole)

    @property
    def speed(self) -> Speed:
        """Seconds of a training step by part, the estimated seconds on one process, and what would help.

        False if no step was timed. After a loss of ranks, and in a resumed run, these are the steps since then.
        """
        return self._speed

    @property
    def failures(self) -> list[dict[str, Any]]:
        """Losses of ranks after which the run began again or went on, the first one first.

        Each has the keys time, rank, host, cause, resumed_from and seconds_lost.
        """
        return [dict(failure) for failure in self._failures]

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

    @property
    def module(self) -> Any:
        """The ``module`` of the run's config; None if it has none, and in an unpickled result."""
        return self._model_factory

    def predict(
        self, data: Any, *, to: str | os.PathLike[str] | None = None, launcher: str = "auto", **settings: Any
    ) -> Any:
        """Return ``data`` with the outputs of the model that the function returned, as further columns.

        The model is a torch module, its ``state_dict`` or the path of a file, alone or in a dict or tuple.

        Args:
            data: a DataFrame of Spark or pandas, an Arrow table, a path of Parquet files, or a data set of torch.
            to: for a path, the Parquet file or folder to write; see ``lagom.Predictor.predict``.
            launcher: for a path, what reads it: "spark", "local" or "auto".
            settings: those of ``lagom.Predictor``, such as ``inputs=["user", "item"]`` or ``outputs="score"``.

        Raises:
            ValueError: if the function returned no model, or the columns are not what it takes.
            DataError: if rows cannot be scored; the text names the row.
            LagomError: if this installation has no extension for it.
        """
        return registry.predictor(self, settings).predict(data, to=to, launcher=launcher)

    def save_mlflow(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        example: Any,
        name: str | None = None,
        options: Mapping[str, Any] = MappingProxyType({}),
        **settings: Any,
    ) -> Any:
        """Save the model that the function returned for MLflow; see ``lagom.Predictor.save_mlflow``.

        Args:
            path: folder to write; None with ``name``.
            example: a DataFrame with some rows, whose columns have the types of the model's.
            name: logs the model to MLflow's active run instead, under this name.
            options: further options of MLflow, such as ``{"registered_model_name": "churn"}``.
            settings: those of ``lagom.Predictor``.

        Raises:
            ValueError: as ``predict``.
            LagomError: if MLflow is not installed.
        """
        return registry.predictor(self, settings).save_mlflow(path, example=example, name=name, **options)

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
        target = Page(path if path is not None else self._run_dir / "report.html")
        write_file(target, registry.report(RunFolder.open(self._run_dir)))
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
        metrics = "".join(f"\n  {key}: {short(value)}" for key, value in self._items.items())
        return f"Result of {self._title()}{metrics}"

    def _repr_html_(self) -> str:
        title = f"<div><b>{html.escape(self._title())}</b></div>"
        return f"<div style='overflow-x:auto'>{title}{_own_html(self._value) or self._table()}{self._records()}</div>"

    def _table(self) -> str:
        """Return HTML of the metrics, with a column for each rank if any values differ."""
        keys = [key for key in self._items if key != TEST_RESULT or len(self._items) == 1]
        by_rank = {key: [short(item) for item in self._by_rank(key)] for key in keys}
        # Ranks usually return equal values, and then need no columns of their own.
        num_ranks = 0 if all(len(set(texts)) < 2 for texts in by_rank.values()) else min(self.world_size, _SHOWN_RANKS)
        head = ["", "result", *(f"rank {rank}" for rank in range(num_ranks))]
        head += ["…"] * (0 < num_ranks < self.world_size)
        rows = ([key, short(self._items[key]), *by_rank[key][:num_ranks]] for key in keys)
        return html_table(head, rows)

    def _records(self) -> str:
        """Return HTML of the run's charts and records, shown below its result."""
        if self._run_dir is None:
            return ""
        try:
            charts = registry.notebook_charts(RunFolder.open(self._run_dir))
        except (OSError, LagomError):  # moved or changed since
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
        return f"{self._name or 'a run'}: {ranks}{where}, {lasted(self._seconds)}"


def _own_html(value: Any) -> str:
    """Return the HTML by which ``value`` shows itself in a notebook, as a DataFrame does, or ""."""
    show_html = getattr(value, "_repr_html_", None)
    try:
        return (show_html() or "") if callable(show_html) and not isinstance(value, type) else ""
    except Exception:  # a class of the program's may do anything there
        return ""


def html_table(head: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table as HTML, in which the first cell of each row is its heading."""
    body = "".join(f"<tr>{_cells('th', row[:1])}{_cells('td', row[1:])}</tr>" for row in rows)
    return f"<table style='{_TABLE}'><thead><tr>{_cells('th', head)}</tr></thead><tbody>{body}</tbody></table>"


def _cells(tag: str, texts: Iterable[str]) -> str:
    return "".join(f"<{tag} style='{_CELL}'>{html.escape(text)}</{tag}>" for text in texts)


def lasted(seconds: float) -> str:
    """Return a duration as text, such as "2 min 5 s"."""
    if seconds < 60:
        return f"{seconds:.2f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min {rest} s"


def short(value: Any, limit: int = 60) -> str:
    """Return ``value`` as text of at most ``limit`` characters on one line."""
    if isinstance(value, float):
        return f"{value:.6g}"
    try:
        text = " ".join(repr(value).split())
    except Exception:  # a class of the program's may do anything in __repr__
        text = f"<{type(value).__name__}>"
    return text if len(text) <= limit else text[: limit - 1] + "…"
