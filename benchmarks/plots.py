"""Draws the plots of docs/performance.md from the tables of figures in other pages of docs/.

    python -m benchmarks.plots

A plot has no figures of its own: after a benchmark has run again, change its table, and then run this command.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).parent.parent / "docs"
_LAGOM, _OTHER, _REFERENCE = "#0072b2", "#b0b0b0", "#444444"
_WIDTH, _LEFT, _RIGHT, _ROW, _TOP = 700, 300, 80, 26, 46


class Plot(NamedTuple):
    """A bar chart of one column, or of one row, of a table in docs/."""

    file: str
    title: str
    page: str
    header: str
    """Begin of the table's first line, by which the table is found; no other table of the page begins so."""
    column: int
    unit: str
    reference: tuple[str, float] | None = None
    """Name and value of the contender to which the figures are relative, drawn as another bar; None without one."""


PLOTS = (
    Plot(
        "performance_step.svg",
        "Time of a training step on 2 ranks, an MLP of 10 million parameters (DDP by hand = 1; less is better)",
        "decisions/063-benchmark-against-ddp-in-turns.md",
        "|  | MLP 2-100-100-1 |",
        3,
        "",
        ("DDP by hand over gloo", 1.0),
    ),
    Plot(
        "performance_epoch.svg",
        "Epochs of a small network on 2 ranks, times as fast as one process (more is better)",
        "appendix/measurements.md",
        "|  | 64 samples per rank |",
        2,
        " x",
        ("one process", 1.0),
    ),
    Plot(
        "performance_loading.svg",
        "An epoch of PNGs decoded by 2 workers, seconds (less is better)",
        "decisions/070-loading-once-a-host.md",
        "| setting | seconds an epoch |",
        1,
        " s",
    ),
    Plot(
        "performance_rows.svg",
        "Shuffled rows of 20 columns from Parquet, thousands a second (more is better)",
        "appendix/measurements.md",
        "| table | in order |",
        -1,
        "",
    ),
    Plot(
        "performance_exchange.svg",
        "Sum of 16 MB over 2 ranks of a host, microseconds (less is better)",
        "appendix/measurements.md",
        "| all_reduce of |",
        -1,
        " us",
    ),
    Plot(
        "performance_search.svg",
        "A search over 100 empty trials, 2 at a time, seconds (less is better)",
        "appendix/measurements.md",
        "|  | 100 empty trials |",
        1,
        " s",
    ),
)
_ROWS: Mapping[str, tuple[str, Mapping[int, str]]] = {
    "performance_rows.svg": ("20 float32 columns", {2: "lagom", 5: "petastorm 0.12.1"}),
    "performance_exchange.svg": ("16 MB", {1: "lagom, its own exchanges", 2: "lagom, torch.distributed", 3: "gloo"}),
}
"""First cell of the drawn row, and names of its drawn columns, for plots of one row."""


def main() -> None:
    """Write all plots."""
    for plot in PLOTS:
        (DOCS / plot.file).write_text(drawn(plot))


def drawn(plot: Plot) -> str:
    """Return ``plot`` as SVG with a white background, so that it can be read on light and dark pages."""
    bars = dict(figures(plot))
    if plot.reference is not None:
        bars = {plot.reference[0]: plot.reference[1], **bars}
    height = _TOP + _ROW * len(bars) + 10
    scale = (_WIDTH - _LEFT - _RIGHT) / max(bars.values())
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img"',
        f'aria-label="{html.escape(plot.title)}" font-family="sans-serif" font-size="13" fill="#222">',
        f'<rect width="{_WIDTH}" height="{height}" fill="#fff"/>',
        f'<text x="10" y="22" font-weight="bold" font-size="12">{html.escape(plot.title)}</text>',
    ]
    for number, (name, value) in enumerate(bars.items()):
        y, width = _TOP + _ROW * number, max(value * scale, 1.0)
        colour = _LAGOM if "lagom" in name or "ranks that share" in name else _OTHER
        if plot.reference is not None and name == plot.reference[0]:
            colour = _REFERENCE
        parts += [
            f'<text x="{_LEFT - 8}" y="{y + 14}" text-anchor="end">{html.escape(name)}</text>',
            f'<rect x="{_LEFT}" y="{y}" width="{width:.1f}" height="19" fill="{colour}"/>',
            f'<text x="{_LEFT + width + 6:.1f}" y="{y + 14}">{value:,.10g}{plot.unit}</text>',
        ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def figures(plot: Plot) -> Iterator[tuple[str, float]]:
    """Return the names and numbers that ``plot`` shows."""
    rows = list(table(plot.page, plot.header))
    if plot.file in _ROWS:
        wanted, columns = _ROWS[plot.file]
        (row,) = (row for row in rows if row[0] == wanted)
        yield from ((name, number(row[column])) for column, name in columns.items())
    else:
        yield from ((re.sub(r" \(.*\)", "", row[0]), number(row[plot.column])) for row in rows)


def table(page: str, header: str) -> Iterator[list[str]]:
    """Return the rows of the table of ``page`` that begins with ``header``.

    Raises:
        ValueError: if there is not one such table.
    """
    lines = (DOCS / page).read_text().splitlines()
    starts = [at for at, line in enumerate(lines) if line.replace("| |", "|  |", 1).startswith(header)]
    if len(starts) != 1:
        raise ValueError(f"{page} has {len(starts)} tables that begin with {header!r}; want one")
    for line in lines[starts[0] + 2 :]:
        if not line.startswith("|"):
            return
        yield [cell.strip().strip("`") for cell in line.strip("|").split("|")]


def number(cell: str) -> float:
    """Return the first number of ``cell``, which a range in brackets may follow."""
    return float(cell.replace(",", "").split()[0])


if __name__ == "__main__":
    main()
