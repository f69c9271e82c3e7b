"""``list_runs``: a table of the runs that a folder keeps; ``open_run`` opens one of them by its name."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lagom.errors import LagomError
from lagom.run_folder import RunFolder
from lagom.watch.json_values import damage_named, loaded, text_of
from lagom.watch.retention import is_under_way
from lagom.watch.run_dir import RESULT, RUN
from lagom.watch.upload import is_url, on_disk

_LONGEST = 40  # characters of a result


def list_runs(place: str | os.PathLike[str] | None, num_runs: int) -> str:
    """Return a table of the last ``num_runs`` runs in ``place``, the newest last.

    Raises:
        ValueError: if ``place`` is no folder of this machine.
    """
    top = _folder(place)
    folders = _runs_in(top)
    if not folders:
        return f"there are no runs in {top}"
    rows: list[Sequence[str]] = [("run", "result", "seconds", "ranks", "git")]
    rows += [_row(folder) for folder in folders[-num_runs:]]
    more = len(folders) - len(rows) + 1
    head = [f"{more} older runs are in {top}"] if more > 0 else []
    return "\n".join(head + aligned(rows))


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a line for each of ``rows``, with the cells aligned in columns."""
    # Records of others may have bytes that a terminal obeys.
    shown = [["".join(mark if mark.isprintable() else "?" for mark in cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    return ["  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in shown]


def open_run(run: str | os.PathLike[str], place: str | os.PathLike[str] | None) -> RunFolder:
    """Open the folder of ``run``: a path, or the name of one run in ``place`` or a part of it.

    Raises:
        ValueError: if there is none, the part is in several names, or ``place`` is no folder of this machine.
    """
    path = Path(os.path.expanduser(run))
    if os.path.lexists(path / RUN):
        return RunFolder.open(path)
    if os.sep in os.fspath(run) and path.is_dir():
        raise ValueError(f"{path} is no run: there is no {RUN} in it")
    top = _folder(place)
    folders = [folder for folder in _runs_in(top) if os.fspath(run) in folder.name]
    if len(folders) == 1:
        return RunFolder.open(folders[0])
    if not folders:
        raise ValueError(f"{os.fspath(run)!r} is no run: neither a folder with a {RUN}, nor a name in {top}")
    names = ", ".join(folder.name for folder in folders[-3:])
    raise ValueError(f"{os.fspath(run)!r} is in the names of {len(folders)} runs: {names}; name one of them")


def result_text(folder: RunFolder) -> str:
    """Return how the run in ``folder`` ended, in a few words.

    Raises:
        LagomError: if its record is damaged.
    """
    result = loaded(folder, RESULT)
    if not result:
        return "under way" if is_under_way(folder) else "no end: its driver was killed"
    with damage_named(folder):
        return _outcome_text(result)


def _outcome_text(result: Mapping[str, Any]) -> str:
    if result["outcome"] == "interrupted":
        return text_of(f"interrupted: {result.get('value')}", _LONGEST)
    if result["outcome"] == "returned":
        if result.get("value") is None:
            return "done"
        return text_of(result.get("value"), _LONGEST)
    where = f" on rank {result['rank']}" if result.get("rank") is not None else ""
    return f"{result['error']}{where}"


def checkout_text(git: Mapping[str, Any] | None) -> str:
    """Return the commit and the branch of a run's checkout; "+" stands for changes that are in no commit."""
    if not git:
        return ""
    commit = str(git.get("commit") or "no commit")[:9] + "+" * bool(git.get("changes"))
    return f"{commit} {git['branch']}" if git.get("branch") else commit


def _row(path: Path) -> tuple[str, ...]:
    """Return the cells of a run; of one that is damaged, or that cannot be read, the reason."""
    try:
        folder = RunFolder.open(path)
        try:
            run, result = loaded(folder, RUN), loaded(folder, RESULT)
            with damage_named(folder):
                seconds = f"{result['seconds']:.1f}" if "seconds" in result else ""
                cells = seconds, str(run.get("world_size", "")), checkout_text(run.get("git"))
                return path.name, result_text(folder), *cells
        finally:
            folder.close()
    except (LagomError, OSError) as error:
        return path.name, " ".join(str(error).split()), "", "", ""


def _folder(place: str | os.PathLike[str] | None) -> Path:
    """Return the folder of runs on this machine.

    Raises:
        ValueError: if runs are kept elsewhere, or not at all.
    """
    if place is None or not os.fspath(place):
        raise ValueError("run_dir is None, so runs are not kept; name a folder of runs")
    if is_url(place):
        raise ValueError(f"runs are kept at {os.fspath(place)}; copy them to this machine, and name the folder")
    try:
        return on_disk(place)
    except FileNotFoundError as error:
        raise ValueError(str(error)) from error


def _runs_in(top: Path) -> list[Path]:
    """Return the folders of runs in ``top``, in the order of their names, which begin with the date."""
    return sorted(path.parent for path in top.glob(f"*/{RUN}"))
