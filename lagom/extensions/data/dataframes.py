"""Spark DataFrames as data sets: Spark writes them as Parquet; where hosts share no folder, small ones are collected.

See Note [DataFrames].
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import io
import os
import re
import shutil
import sys
import tempfile
import threading
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from lagom.errors import DataError
from lagom.extensions.data.parquet.dataframe_ref import CollectedFrame, WrittenFrame
from lagom.spark.spark_session import session_facts

if TYPE_CHECKING:
    from lagom.restart.kept_snapshots import SnapshotFolder

CACHE = "spark.lagom.cacheDir"
"""Spark setting that names the folder to write to; without it, petastorm's setting counts."""
_PETASTORMS = "petastorm.spark.converter.parentCacheDirUrl"
MAX_COLLECTED_BYTES = 64 << 20
"""Size, by Spark's estimate, up to which a frame is collected if no folder is known that all hosts reach."""
MAX_KEPT_FRAMES = 4
"""Number of frames whose files are kept for the next call."""
_ROW_GROUP = 32 << 20
_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def is_frame(value: object) -> bool:
    """Return whether ``value`` is a Spark DataFrame, classic or Connect."""
    return any(
        kind.__name__ == "DataFrame" and kind.__module__.startswith("pyspark.sql.") for kind in type(value).__mro__
    )


def write_frame(provided: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return ``provided`` with each data set that is a DataFrame replaced by an object that builds it on a rank.

    Return ``provided`` itself if there is none.

    Raises:
        ValueError: if a column cannot be a tensor.
        DataError: if there is no folder to write a frame to, and it cannot be collected: it is too large, its size is
            unknown, or Spark is older than 4.
    """
    frames = {name: provided[name] for name in ("train_set", "test_set") if is_frame(provided.get(name))}
    if not frames:
        return provided
    arguments = {**provided, **{name: _replace_frame(frame, name) for name, frame in frames.items()}}
    if "dataset" in arguments:
        arguments["dataset"] = [arguments["train_set"], arguments["test_set"]]
    return arguments


def _replace_frame(frame: Any, name: str) -> Any:
    _check_types(frame, name)
    folder = cache_folder(frame.sparkSession)
    if folder is None:
        return _collect(frame, name)
    with _lock:
        kept = _find_written(frame)
        if kept is None:
            kept = _WrittenFrame(frame, _inputs(frame), _write(frame, folder))
        else:
            kept_frames.remove(kept)
        kept_frames.append(kept)
        written = kept.written() or WrittenFrame(kept.url)
        kept.written = weakref.ref(written)
        unused = [one for one in kept_frames if one.written() is None]
        for old in unused[: max(0, len(kept_frames) - MAX_KEPT_FRAMES)]:
            kept_frames.remove(old)
            _delete(old.url)
    return written


@dataclass(eq=False)
class _WrittenFrame:
    """Remembers where a DataFrame has been written as Parquet, and from which input files."""

    frame: Any
    inputs: list[tuple[str, int, int]] | None
    url: str
    written: Callable[[], WrittenFrame | None] = lambda: None
    """Returns the object that calls in progress have of the frame; None if there is no such call."""


kept_frames: list[_WrittenFrame] = []
"""Frames in the order of their last use."""
_lock = threading.Lock()


@contextlib.contextmanager
def frames_of_run(provided: Mapping[str, Any], snapshots: SnapshotFolder | None) -> Iterator[None]:
    """Keep the files of frames among ``provided``, a run's arguments, if the run can be resumed after the context.

    If it was resumed and cannot be resumed again, remove them.
    """
    is_resumed = _can_be_resumed(snapshots)
    try:
        yield
    finally:
        if _can_be_resumed(snapshots):
            _keep_for_resume(provided)
        elif is_resumed:
            _remove_resumed(provided)


def _can_be_resumed(snapshots: SnapshotFolder | None) -> bool:
    return snapshots is not None and snapshots.newest() is not None


def _keep_for_resume(provided: Mapping[str, Any]) -> None:
    urls = _urls(provided)
    with _lock:
        kept_frames[:] = [one for one in kept_frames if one.url not in urls]
        _made_here[:] = [folder for folder in _made_here if f"file://{folder}" not in map(os.path.dirname, urls)]


def _remove_resumed(provided: Mapping[str, Any]) -> None:
    with _lock:
        here = {one.url for one in kept_frames}
    for url in _urls(provided) - here:
        _delete(url)


def _urls(provided: Mapping[str, Any]) -> set[str]:
    return {value.url for value in provided.values() if isinstance(value, WrittenFrame)}


def _find_written(frame: Any) -> _WrittenFrame | None:
    inputs = _inputs(frame)
    for kept in kept_frames:
        if _exists(kept.url) and (kept.frame is frame or (inputs and inputs == kept.inputs)):
            with contextlib.suppress(Exception):  # ``sameSemantics`` raises for a frame of another session
                if kept.inputs == inputs and kept.frame.sameSemantics(frame):
                    return kept
    return None


def _inputs(frame: Any) -> list[tuple[str, int, int]]:
    """Return URL, time of change (ns) and bytes of each input file; two zeros for a file on another machine."""
    found = []
    for url in sorted(frame.inputFiles()):
        parts = urlsplit(url)
        time_ns, size = 0, 0
        if parts.scheme in ("", "file"):
            with contextlib.suppress(OSError):
                stat = os.stat(parts.path)
                time_ns, size = stat.st_mtime_ns, stat.st_size
        found.append((url, time_ns, size))
    return found


def cache_folder(session: Any) -> str | None:
    """Return the folder to write to, or None if no folder is known that all hosts see."""
    for key in (CACHE, _PETASTORMS):
        folder = session.conf.get(key, None)
        if folder:
            return str(folder).rstrip("/")
    return _here() if session_facts(session).one_machine else None


_made_here: list[str] = []


def _here() -> str:
    if not _made_here:
        _made_here.append(tempfile.mkdtemp(prefix="lagom-frames-"))
    return f"file://{_made_here[0]}"


def _write(frame: Any, folder: str) -> str:
    url = f"{folder}/lagom-{uuid.uuid4().hex}"
    frame.write.option("parquet.block.size", _ROW_GROUP).parquet(url)
    return url


def _collect(frame: Any, name: str) -> Any:
    size = _estimate(frame)
    if size is None or size > MAX_COLLECTED_BYTES:
        told = "of unknown size" if size is None else f"of {size >> 20} MB by Spark's estimate"
        raise DataError(
            f"{name} is a DataFrame {told}, and there is no folder known that driver and executors share: set "
            f"spark.conf.set({CACHE!r}, url) to one, such as hdfs:///tmp/lagom or s3://bucket/lagom"
        )
    if not hasattr(frame, "toArrow"):
        raise DataError(
            f"{name} is a DataFrame of Spark 3.5, which cannot be collected, and no folder is known that driver and "
            f"executors share: set spark.conf.set({CACHE!r}, url) to one, such as hdfs:///tmp/lagom"
        )
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    table = frame.toArrow()
    pq.write_table(table, sink, row_group_size=max(1, -(-len(table) // 32)), compression="none")
    content = np.frombuffer(sink.getvalue(), np.uint8)
    return CollectedFrame(content, hashlib.blake2b(content.data, digest_size=16).hexdigest())


def _estimate(frame: Any) -> int | None:
    """Return the frame's size in bytes by Spark's statistics of the optimised plan, or None if these have no size."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        frame.explain(mode="cost")
    matched = re.search(r"sizeInBytes=([\d.]+) (\w+)", text.getvalue())
    if matched is None or matched[2] not in _UNITS:
        return None
    return int(float(matched[1]) * _UNITS[matched[2]])


def _check_types(frame: Any, name: str) -> None:
    for field in frame.schema.jsonValue()["fields"]:
        if (wrong := unsupported_part(field["type"])) is not None:
            raise ValueError(
                f"{name} is a DataFrame whose column {field['name']!r} has the type {wrong}, which cannot be a tensor; "
                f"leave it out with drop({field['name']!r}), or have Spark make numbers of it"
            )


def unsupported_part(kind: Any) -> str | None:
    """Return the part of a Spark type that cannot be a tensor; None if the whole type can be one.

    ``column_entries`` in ``column_types/tensor_columns.py`` makes the same decision for the types of the Parquet
    files that Spark writes. Its module imports torch, which the driver must not. So this function must accept every
    type that ``column_entries`` accepts, except intervals, which Spark writes as plain integers.

    Args:
        kind: the type as in ``DataType.jsonValue()``: a text, or a dict for arrays, structs and other nested types.
    """
    if isinstance(kind, str):
        return kind if kind in ("variant", "void") or "interval" in kind else None
    if kind["type"] == "array":
        return _unsupported_inside(kind["elementType"])
    inner = {
        "struct": lambda: [field["type"] for field in kind["fields"]],
        "udt": lambda: [kind["sqlType"]],
    }.get(kind["type"])
    if inner is None:
        return str(kind["type"])
    return next(filter(None, map(unsupported_part, inner())), None)


def _unsupported_inside(kind: Any) -> str | None:
    """Return the part of an array's element type that cannot be in a tensor, or None."""
    if isinstance(kind, str):
        return f"array<{kind}>" if kind.startswith(("string", "binary", "char", "varchar")) else unsupported_part(kind)
    return _unsupported_inside(kind["elementType"]) if kind["type"] == "array" else f"array<{kind['type']}>"


def _exists(url: str) -> bool:
    parts = urlsplit(url)
    return parts.scheme != "file" or os.path.exists(parts.path)


def _delete(url: str) -> None:
    parts = urlsplit(url)
    if parts.scheme == "file":
        shutil.rmtree(parts.path, ignore_errors=True)
        return
    try:
        from pyarrow import fs

        home, path = fs.FileSystem.from_uri(re.sub("^s3[an]:", "s3:", url))
        home.delete_dir(path)
    except Exception as error:
        sys.stderr.write(f"lagom: {url}, which a DataFrame was written to, could not be removed: {error}\n")


@atexit.register
def _clean_up(pid: int = os.getpid()) -> None:
    """Remove all files of frames; do nothing in a fork of the process that wrote them."""
    if os.getpid() != pid:
        return
    while kept_frames:
        _delete(kept_frames.pop().url)
    while _made_here:
        shutil.rmtree(_made_here.pop(), ignore_errors=True)


@contextlib.contextmanager
def forget_frames() -> Iterator[None]:
    """Remove the files of all frames at the end of the context."""
    try:
        yield
    finally:
        _clean_up()


# Note [DataFrames]
#
# Ranks read Parquet. A frame is written to the folder that a setting of the session names (spark.lagom.cacheDir), or,
# if Spark runs on this machine, to a temporary folder. If there is neither, a frame that is small by Spark's own
# estimate is collected through Arrow and travels with the payload as one file.
#
# A later frame uses the same files if Spark's `sameSemantics` finds the two frames equal and their input files are the
# same. Spark compares folders, not their content, so lagom also compares the names of the files, and times and sizes of
# local files. A frame without input files (a query of a database, an RDD) equals only itself, the same object. The
# files of the last few frames are kept, and those of all frames whose calls are in progress; all are removed when the
# process ends. If a run ends early and has a snapshot, its files stay for the process that resumes it.
