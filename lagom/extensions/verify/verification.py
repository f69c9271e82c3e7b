"""``Verification``: the result of rehearsals, as one table."""

from __future__ import annotations

import html
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lagom.extensions.verify.comparison_row import AgreementLevel, ComparisonRow


@dataclass(frozen=True, kw_only=True, slots=True)
class Verification:
    """The result of rehearsals; its text is a table."""

    name: str
    setting: str
    where: str
    world_size: int
    rows: Sequence[ComparisonRow]
    verdict: str
    """"agrees"; "random": agrees except for random numbers of the ranks' own; "own": agrees except for numbers that the
    program shows; "raises": agrees up to an error with which one process ends too; "unlike": each rank has batches that
    one process never has; "strays": the ranks agree, but the program does not go on from a snapshot as without a loss;
    "differs"; "unsteady": two runs of one process differ already; "fails": a rank fails otherwise than one process;
    "dies": the process of the rehearsal dies."""
    may_run: bool
    """Whether the run may start."""
    told: str
    """The finding and the advice, from ``advise``."""
    seconds: float

    def __str__(self) -> str:
        cells = [self._head(), *(line for row in self.shown_rows() for line in _wrapped(self._cells(row)))]
        widths = [max(len(line[column]) for line in cells) for column in range(4)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells
        ]
        lines.insert(1, "  ".join("-" * width for width in widths))
        told = textwrap.wrap(self.told, _WIDTH, break_long_words=False, break_on_hyphens=False)
        return "\n".join([self._title(), *("  " + line for line in lines), *told])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        def line(cells: Sequence[str], tag: str) -> str:
            told = "".join(f"<{tag} style='text-align:left'>{html.escape(cell)}</{tag}>" for cell in cells)
            return f"<tr>{told}</tr>"

        rows = "".join(line(self._cells(row), "td") for row in self.shown_rows())
        return (
            f"<table><caption style='text-align:left'><b>{html.escape(self._title())}</b></caption>"
            f"<thead>{line(self._head(), 'th')}</thead><tbody>{rows}</tbody></table>"
            f"<p>{html.escape(self.told)}</p>"
        )

    def shown_rows(self) -> list[ComparisonRow]:
        return [row for row in self.rows if row.note or row.level > AgreementLevel.UNKNOWN or row.one != row.ranks]

    def _title(self) -> str:
        return f"{self.name}, rehearsed on {self.where} in {self.seconds:.1f} s"

    def _head(self) -> list[str]:
        other = "the same again" if self.verdict == "unsteady" else f"{self.world_size} ranks, {self.setting}"
        other += ", its draws fixed" if self.verdict == "random" else ""
        return ["", "one process", other, "verdict"]

    def _cells(self, row: ComparisonRow) -> list[str]:
        verdict = _SIGNS[row.level] + (": " if _SIGNS[row.level] and row.note else "") + row.note
        return [row.what, row.one, row.ranks, verdict]


_WIDTH = 118


def _wrapped(cells: list[str]) -> Iterator[list[str]]:
    """Yield the row ``cells``; if its last cell is too long, wrap that text onto further rows."""
    parts = textwrap.wrap(cells[3], 56, break_long_words=False) or [""]
    yield [*cells[:3], parts[0]]
    for part in parts[1:]:
        yield ["", "", "", part]


_SIGNS = {
    AgreementLevel.UNKNOWN: "",
    AgreementLevel.AGREES: "agrees",
    AgreementLevel.OWN: "DIFFERS",
    AgreementLevel.DIFFERS: "DIFFERS",
}


def show(verification: Verification) -> None:
    """Show ``verification`` as a table in a notebook, else as text on standard error."""
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is not None and hasattr(shell, "kernel"):
        ipython.display.display(verification)
    else:
        sys.stderr.write(f"lagom: {verification}\n")
        sys.stderr.flush()


def say_not_rehearsed(name: str) -> None:
    """Tell on standard error that the program is not rehearsed, since it starts a process group of its own."""
    sys.stderr.write(
        f"lagom: {name}: not rehearsed: it, or a module of yours that it uses, starts a process group of its own "
        "(init_process_group, Horovod), and so its ranks are its own business\n"
    )
    sys.stderr.flush()
