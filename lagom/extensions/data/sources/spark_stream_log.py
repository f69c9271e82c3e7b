"""``committed_files``: reads the log of a folder that Spark's streaming wrote, to find the committed files.

Source: Spark's ``FileStreamSinkLog`` and ``CompactibleFileStreamLog``, which read the log in the same way.
"""

from __future__ import annotations

import json
import posixpath
import re
from typing import Any
from urllib.parse import unquote

from lagom.errors import DataError

LOG = "_spark_metadata"
_BATCH = re.compile(rf"{LOG}/(\d+)(\.compact)?")


def committed_files(home: Any, folder: str, names: set[str]) -> set[str] | None:
    """Return the paths below ``folder`` of the data files that its log names as committed; None if there is no log.

    Args:
        home: pyarrow's file system.
        names: paths of all files below ``folder``.

    Raises:
        DataError: if the log is incomplete or cannot be read, or names a file that does not exist.
    """
    if LOG not in {name.split("/")[0] for name in names}:
        return None
    paths: dict[str, None] = {}
    try:
        for name in _current(names):
            with home.open_input_stream(f"{folder}/{name}") as source:
                version, *lines = source.read().decode().splitlines()
            if version != "v1":
                raise ValueError(f"{name} has the version {version!r}")
            for status in map(json.loads, lines):
                path = unquote(status["path"])
                if status["action"] == "delete":
                    paths.pop(path, None)
                else:
                    paths[path] = None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _error(folder, f"has a log that cannot be read: {error}") from error
    return {_name(path, names, folder) for path in paths}


def _current(names: set[str]) -> list[str]:
    """Return the log's files to read, in order: the newest compacted file, and all files after it.

    Raises:
        ValueError: if a file of the log is missing.
    """
    batches = {int(told[1]): (bool(told[2]), name) for name in names if (told := _BATCH.fullmatch(name))}
    start = max((number for number, (is_compact, _) in batches.items() if is_compact), default=0)
    later = sorted(number for number in batches if number >= start)
    if not later or later != list(range(start, start + len(later))):
        raise ValueError(f"of its batches there are {later}, beginning with {start}")
    return [batches[number][1] for number in later]


def _name(path: str, names: set[str], folder: str) -> str:
    """Return the name below ``folder`` of the file that the log has as ``path``; the folder may have been moved."""
    parts = path.split("/")
    for start in range(len(parts)):
        if (name := posixpath.join(*parts[start:])) in names:
            return name
    raise _error(folder, f"lacks the file {path}, which its log names")


def _error(folder: str, why: str) -> DataError:
    return DataError(
        f"{folder} was written by Spark's streaming, whose log in {LOG} tells which of its files are committed, and "
        f"{why}; give the list of files"
    )
