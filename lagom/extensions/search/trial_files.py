"""Files of trials: each trial writes to a disk of its own, unless it runs inline.

At the end of a search the files of the best trial, or of an ablation study's first trial, are copied to their places.
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

from lagom.spark.spark_results import extract_files

OUTPUT = "output.txt"
"""Name of the file with the text that rank 0 of a trial printed."""
PACKED = ".files.tar"
"""Name of the tar archive in which a trial's files arrive from another host."""
_TAIL = 15  # lines


def unpack_files(folder: Path) -> None:
    """Unpack and remove the archive ``PACKED`` in the trial's ``folder``, if another host has sent one."""
    if (folder / PACKED).exists():
        with open(folder / PACKED, "rb") as archive:
            extract_files(archive, folder)
        (folder / PACKED).unlink()


def put_in_place(folder: Path) -> list[str]:
    """Copy a trial's files from its ``folder`` to the paths at which the trial wrote them.

    ``keep_files`` in ``disk/settle.py`` has moved them to ``files`` (below the working directory) and ``elsewhere``.
    Return a sentence for each file that could not be copied: an error here would lose the result of all trials.
    """
    problems = []
    for name, root in (("files", os.getcwd()), ("elsewhere", "")):
        for at, folders, files in os.walk(folder / name):
            place = root + at.removeprefix(str(folder / name))
            for file in (*files, *(each for each in folders if os.path.islink(f"{at}/{each}"))):
                problems += _put(f"{at}/{file}", f"{place}/{file}")
    return problems


def _put(source: str, place: str) -> list[str]:
    try:
        os.makedirs(os.path.dirname(place), exist_ok=True)
        if os.path.isdir(place) and not os.path.islink(place):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))  # copy2 would put the file into it
        if os.path.islink(source) and os.path.lexists(place):
            os.unlink(place)
        shutil.copy2(source, place, follow_symlinks=False)
    except OSError as error:
        return [f"{place}, which the best trial wrote, could not be put there: {error.strerror or error}"]
    return []


def last_lines(folder: Path | None) -> str:
    """Return the last lines that rank 0 of a trial printed, indented; "" if there are none, or no ``folder``."""
    if folder is None:
        return ""
    try:
        text = (folder / OUTPUT).read_text(errors="replace")
    except OSError:
        return ""
    return "".join(f"    {line}\n" for line in text.splitlines()[-_TAIL:])
