"""``RunRecords``: writes the records of a run into a folder: settings, output, progress, pictures, result."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import datetime
import functools
import json
import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Concatenate, ParamSpec

from lagom.digests import record_text
from lagom.errors import LagomError, PlanError
from lagom.run_folder import RunFolder
from lagom.watch.driver_facts import driver_facts
from lagom.watch.git_info import GitCheckout
from lagom.watch.json_values import as_json, loaded, loaded_lines
from lagom.watch.messages import Timeline
from lagom.watch.retention import Retention, lock_run
from lagom.watch.spans import TIMELINES, unpack_spans
from lagom.watch.upload import RUN as RUN
from lagom.watch.upload import Upload, is_url, on_disk
from lagom.wire.messages import Join, ProgressReport

RESULT, PROGRESS = "result.json", "progress.jsonl"
_PARTS = 500
"""A rank's next progress report is recorded after the run's time so far, divided by this number.

So a long run has some thousands of reports of each rank, instead of one for every second.
"""
_PER_PROCESS = ("where", "world_size", "gpu", "ranks_per_slot")
"""Facts that a process which goes on with a run may change."""
MAX_LOG_BYTES = 256 << 20
"""Largest number of bytes of a rank's output that are kept."""

log = logging.getLogger("lagom")
P = ParamSpec("P")


def _harmless(method: Callable[Concatenate[RunRecords, P], None]) -> Callable[Concatenate[RunRecords, P], None]:
    """Wrap ``method``: log its first error, and record nothing more, since a full disk must not make a run fail."""

    @functools.wraps(method)
    def guarded(self: RunRecords, /, *args: P.args, **options: P.kwargs) -> None:
        if self.broken:
            return
        try:
            method(self, *args, **options)
        except Exception as error:
            self.broken = True
            log.warning("nothing more is kept of this run in %s: %s: %s", self.folder, type(error).__name__, error)

    return guarded


class RunRecords:
    """Writes during the run, so that the records of a run that was killed can be read as well."""

    def __init__(
        self,
        folder: RunFolder | Path,
        facts: Mapping[str, Any],
        upload: Upload | None = None,
        retention: Retention | None = None,
        began: float | None = None,
    ) -> None:
        """Write to ``folder``, which may hold the records of an earlier process of the same run.

        With ``retention``, older runs beside ``folder`` are removed when this run ends. Seconds are counted from the
        monotonic time ``began``, by default from now on.

        Raises:
            OSError: if nothing can be written there, or another process writes to ``folder``.
            LagomError: if ``folder`` is a path, and other users can write there.
            Exception: the error of the URL's file system, with ``upload``.
        """
        folder = folder if isinstance(folder, RunFolder) else RunFolder.open_own(folder)
        self.run_folder = folder
        """Folder on this machine; it stays this one if its path leads elsewhere later."""
        self.folder = folder.path
        """Path of the folder."""
        self._retention = retention
        self._held = contextlib.ExitStack()
        self._held.enter_context(lock_run(folder))
        self.upload = upload
        """Upload to ``run_dir``, if ``run_dir`` is a URL; else None."""
        self.broken = False
        self._timelines: RunFolder | None = None
        self.earlier_s = self._seconds_before()
        """Seconds that earlier processes of the same run took."""
        self._started = (time.monotonic() if began is None else began) - self.earlier_s
        source = facts.get("source")
        self._checkout = GitCheckout(Path(source).parent if source else Path.cwd())
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        about = {**driver_facts(), "git": self._checkout.facts()}
        self._facts = self._loaded(RUN)
        if self._facts:
            changed = {name: facts[name] for name in _PER_PROCESS if name in facts}
            self._process = {"time": now, "from": "the beginning", **changed, **about}
            self._facts |= {**changed, "resumed": [*self._facts.get("resumed", ()), self._process]}
            self._set_timelines_aside()
        else:
            self._process = self._facts = {**facts, "started": now, **about}
        self._failures_before = self._facts.get("failures", [])
        self._facts |= {"ranks": {}, "failures": self._failures_before}
        self._joined_before = "seconds_to_join" in self._facts
        """Whether ranks of an earlier attempt have joined."""
        self._goes_on, self._timed = bool(self._facts.get("resumed")), set[int]()
        """Whether there was an earlier attempt, and ranks whose speed in the present one is known."""
        self._num_pictures = 0
        self._writing = threading.Lock()
        self._logs: dict[int, IO[bytes]] = {}
        self._sizes: dict[int, int] = {}
        self._kept_at: dict[int, float] = {}
        self._progress: IO[bytes] | None = None
        self._write(RUN, self._facts)
        if upload is not None:
            upload.begin()

    def _loaded(self, name: str) -> dict[str, Any]:
        """Return a record of an earlier process of the run; empty if there is none, or only a damaged one."""
        try:
            return loaded(self.run_folder, name)
        except LagomError as error:
            log.warning("%s; it is begun anew", error)
            return {}

    def _seconds_before(self) -> float:
        """Return the seconds that the run has taken by its result or its last progress report, whichever is more."""
        times = [self._loaded(RESULT).get("seconds", 0.0)]
        times += [line.get("seconds", 0.0) for line in loaded_lines(self.run_folder, PROGRESS) if line is not None]
        return max(one for one in times if isinstance(one, (int, float)))

    @_harmless
    def joined(self, join: Join, last: bool = True) -> None:
        """Record a task's ranks; write them at once for the ``last`` task, else rarely: a thousand writes are slow."""
        place = {"host": join.host_name, "ip": join.ip, "task": join.task, "python": join.python, "torch": join.torch}
        for number, rank in enumerate(join.ranks):
            device = {"gpu": join.gpus[number]} if number < len(join.gpus) else {}
            self._facts["ranks"][str(rank)] = {**place, **device}
        if not self._joined_before:
            self._facts["seconds_to_join"] = round(time.monotonic() - self._started, 3)
        number = len(self._facts["ranks"])
        if last or number & (number - 1) == 0:
            self._write(RUN, self._facts)

    @_harmless
    def started(self, pids: Mapping[str, int]) -> None:
        """Record the process of each rank of one task, as its host numbers them."""
        for rank, pid in pids.items():
            self._facts["ranks"].setdefault(rank, {})["pid"] = pid
        num = sum("pid" in one for one in self._facts["ranks"].values())
        if num == len(self._facts["ranks"]) or num & (num - 1) == 0:
            self._write(RUN, self._facts)

    @_harmless
    def goes_on(self, place: str) -> None:
        """Record the place from which this process goes on with a run of an earlier one."""
        self._process["from"] = place
        self._write(RUN, self._facts)

    @_harmless
    def lost(self, failures: Sequence[Mapping[str, Any]]) -> None:
        """Record ``failures``, all losses so far since this process has begun or resumed the run."""
        self._facts["failures"] = [*self._failures_before, *failures]
        self._write(RUN, self._facts)

    @_harmless
    def note(self, name: str, value: Any) -> None:
        """Record a fact under ``name``."""
        if self._facts.get(name) != value:
            self._facts[name] = value
            self._write(RUN, self._facts)

    @_harmless
    def begin_again(self, world_size: int) -> None:
        """Record a new attempt of ``world_size`` ranks."""
        self._facts |= {"ranks": {}, "world_size": world_size}
        self._joined_before = "seconds_to_join" in self._facts
        self._goes_on, self._timed = True, set()
        self._set_timelines_aside()

    def _set_timelines_aside(self) -> None:
        """Rename the folder of an earlier attempt's spans, which have other clocks and numbers of exchanges."""
        if self.run_folder.exists(TIMELINES):
            number = 1 + sum(name.startswith(f"{TIMELINES}-lost-") for name in self.run_folder.names())
            self.run_folder.rename(TIMELINES, f"{TIMELINES}-lost-{number}")
        self._timelines = None

    @_harmless
    def wrote(self, rank: int, data: bytes) -> None:
        """Record ``data`` that a rank wrote to standard output or error."""
        size = self._sizes.get(rank, 0)
        self._sizes[rank] = size + len(data)
        if size >= MAX_LOG_BYTES:
            return
        file = self._logs.get(rank)
        if file is None:
            file = self._logs[rank] = self._appended(f"rank-{rank}.log")
        file.write(data)
        if size + len(data) >= MAX_LOG_BYTES:
            file.write(f"\n[lagom] more than {MAX_LOG_BYTES >> 20} MB; the rest is not kept\n".encode())

    @_harmless
    def progressed(self, progress: ProgressReport) -> None:
        """Record some of a rank's progress reports; leave out a speed that counts samples of an earlier attempt."""
        rank = progress.rank
        if self._goes_on and rank not in self._timed:
            if progress.samples:
                self._timed.add(rank)
            progress = dataclasses.replace(progress, rate=None)
        now = time.monotonic()
        if now - self._kept_at.get(rank, 0.0) < (now - self._started) / _PARTS:
            return
        self._kept_at[rank] = now
        if self._progress is None:
            self._progress = self._appended(PROGRESS)
        kept = {name: value for name, value in dataclasses.asdict(progress).items() if name != "ticks"}
        line = json.dumps({"seconds": round(now - self._started, 3), **kept})
        self._progress.write(f"{line}\n".encode())

    @_harmless
    def timed(self, block: Timeline) -> None:
        """Record a rank's spans."""
        if self._timelines is None:
            make = not self.run_folder.exists(TIMELINES)
            self._timelines = self.run_folder.subfolder(TIMELINES, make=make)
        with self._appended(f"rank-{block.rank}.jsonl", self._timelines) as file:
            file.write(f"{unpack_spans(block.data)}\n".encode())

    def showed(self, png: str) -> Path | None:
        """Record a picture of the program, given as base64; return its file, or None if it could not be kept."""
        with contextlib.suppress(OSError, ValueError):
            self._num_pictures += 1
            name = f"picture-{self._num_pictures}.png"
            self.run_folder.write(name, base64.b64decode(png, validate=True))
            return self.folder / name
        return None

    @_harmless
    def complete(self, write: Callable[[RunFolder], None]) -> None:
        """Call ``write`` with the run's folder, to which it adds files that are made of the records."""
        write(self.run_folder)

    @_harmless
    def said(self, text: str) -> None:
        """Record a message that the user was shown."""
        with self._appended("lagom.log") as file:
            file.write((text.rstrip("\n") + "\n").encode(errors="backslashreplace"))

    @_harmless
    def ended(
        self, outcome: Mapping[str, Any], seconds: float | None = None, parts: Mapping[str, float] | None = None
    ) -> None:
        """Record the outcome of the run, and the seconds that it and its ``parts`` took; by default until now."""
        took: dict[str, Any] = {"seconds": round(time.monotonic() - self._started, 3) if seconds is None else seconds}
        took |= {"timings": dict(parts)} if parts is not None else {}
        self._facts |= took
        self._checkout.finish()
        self._process["git"] = self._checkout.facts()
        self._write(RUN, self._facts)
        self._write(RESULT, {**outcome, **took})

    def close(self) -> None:
        """Stop writing, remove older runs, unlock the folder, and upload the rest."""
        self._checkout.finish()
        self._close()
        self._held.close()
        if self.upload is not None:
            self.upload.finish()

    @_harmless
    def _close(self) -> None:
        for file in self._logs.values():
            file.close()
        if self._progress is not None:
            self._progress.close()
        self._logs, self._progress = {}, None
        if self._retention is not None:
            self._retention.remove_older(self.folder.parent)

    def _write(self, name: str, what: Mapping[str, Any]) -> None:
        with self._writing:
            self.run_folder.write(name, record_text(as_json(what, hide=name == RUN), indent=2) + "\n")

    def _appended(self, name: str, folder: RunFolder | None = None) -> IO[bytes]:
        """Open the file ``name`` to append to it, without a buffer."""
        fd = (folder or self.run_folder).open_file(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        return open(fd, "ab", buffering=0)


def records(
    run_dir: str | os.PathLike[str] | None, is_default: bool, facts: Mapping[str, Any], began: float | None = None
) -> RunRecords | None:
    """Make a new folder under ``run_dir``, and return its writer; None if nothing is to be recorded.

    If the default folder cannot be written to, warn and return None.

    Args:
        is_default: whether ``run_dir`` is the default, in which older runs are removed.
        began: monotonic time of the call.

    Raises:
        PlanError: when ``run_dir`` was asked for and cannot be written to.
        ValueError: when an environment variable for older runs has a wrong value.
    """
    if run_dir is None or not os.fspath(run_dir):
        return None
    now = datetime.datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
    name = re.sub(r"[^\w.-]+", "-", str(facts["name"]))[:60]
    name = f"{now}-{name}-{secrets.token_hex(3)}"
    if is_url(run_dir):
        return _elsewhere(os.fspath(run_dir), name, facts, began)
    retention = Retention.from_environment() if is_default else None
    try:
        return RunRecords(RunFolder.make(on_disk(run_dir) / name), facts, retention=retention, began=began)
    except OSError as error:
        text = f"run_dir is {os.fspath(run_dir)!r}, and nothing can be written there: {error}"
        if is_default:
            log.warning("%s; nothing is kept of this run. Set run_dir, or run_dir=None", text)
            return None
        raise PlanError(f"{text}; name another folder, or None to keep nothing") from error


def _elsewhere(url: str, name: str, facts: Mapping[str, Any], began: float | None) -> RunRecords:
    try:
        upload = Upload(url, name)
        return RunRecords(RunFolder.open(upload.folder), facts, upload, began=began)
    except Exception as error:  # each file system has errors of its own
        kind = url.partition(":")[0]
        raise PlanError(
            f"run_dir is {url.partition('?')[0]!r}, and nothing can be written there: {type(error).__name__}: {error}; "
            f"install what fsspec needs for {kind}:, see to the credentials, or name another place, or None for nothing"
        ) from error
