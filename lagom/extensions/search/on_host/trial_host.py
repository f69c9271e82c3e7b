"""``serve_trials``: a slot of a search, a host process that runs one trial after another."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import os
import tarfile
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from lagom.disk.settle import keep_files
from lagom.extensions.search.on_host.trial_imports import TrialImports
from lagom.extensions.search.on_host.trial_ranks import TrialRanks
from lagom.extensions.search.on_rank.messages import (
    OutcomePart,
    RunTrial,
    SearchOver,
    SlotJoin,
    TrialEnded,
    TrialReport,
)
from lagom.host.end_reports import first_failure, fit_reports
from lagom.host.rank_host import join_message
from lagom.host.workspace import HostWorkspace
from lagom.wire.client import DriverClient
from lagom.wire.messages import Message, RankReport
from lagom.wire.spec import RunSpec

_PART = 512 << 10  # bytes of an outcome in one message; base64 makes them a third more
_MAX_OUTCOME = 64 << 20  # bytes
_IDLE_S = 3600.0
_SEND_S = 60.0


def serve_trials(
    spec: RunSpec, slot: int, workspace: HostWorkspace, link: DriverClient, ip: str, gpus: Sequence[str] = ()
) -> None:
    """Join the search, and run the trials that the driver sends until it says that the search is over.

    Raises:
        LinkClosed: the driver has ended.
    """
    join = join_message(slot, range(spec.plan.world_size), workspace, ip, None, gpus)
    facts = {each.name: getattr(join, each.name) for each in dataclasses.fields(join)}
    link.send(SlotJoin(**facts, sees_driver=not workspace.scratch))
    unread: list[Message] = []
    imports = TrialImports(spec)

    def fork() -> TrialRanks:
        return TrialRanks(spec, join, workspace, link)

    ranks: TrialRanks | None = fork()
    while True:
        message = unread.pop(0) if unread else link.receive(_IDLE_S)
        if isinstance(message, SearchOver):
            _close(ranks)
            return
        if not isinstance(message, RunTrial):
            continue  # a stop that came after the trial's own end
        if imports.add() or ranks is None or not ranks.begin(message):  # they lack libraries, or were killed
            _close(ranks)
            ranks = fork()
            ranks.begin(message)
        begun, following = time.monotonic(), None
        with contextlib.suppress(OSError):  # no memory or process is left beside the trial: fork them after it
            following = fork()
        reports = ranks.watch.supervise([*(following.pids if following is not None else ()), *imports.pids])
        _report(message, ranks, reports, time.monotonic() - begun, link)
        imports.try_out(next((report.imports for report in reports if isinstance(report, TrialReport)), ()))
        unread += ranks.watch.unread
        ranks.close()
        ranks = following


def _close(ranks: TrialRanks | None) -> None:
    if ranks is not None:
        ranks.close()


def _report(
    trial: RunTrial, ranks: TrialRanks, reports: Sequence[RankReport], seconds: float, link: DriverClient
) -> None:
    """Send what the trial has returned, how it ended, and its files where the driver does not see them."""
    place = ranks.place
    problems = keep_files(place.host_dir, trial.folder or f"{place.host_dir}/kept", str(place.cwd))
    outcome = ranks.outcomes[(first_failure(reports) or reports[0]).rank]
    if (size := os.fstat(outcome).st_size) <= _MAX_OUTCOME:
        _send_file(link, "outcome", outcome)
    else:
        problems.append(
            f"trial {trial.number} returned {size >> 20} MB, which a search does not collect: have the function "
            "save them to a file, which is kept with the trial"
        )
    if os.path.exists(place.host_dir / "kept"):
        with _packed(place.host_dir / "kept") as packed:
            _send_file(link, "files", packed.fileno())
    told = [dataclasses.replace(one, imports=[]) if isinstance(one, TrialReport) else one for one in reports]
    link.send(TrialEnded(reports=fit_reports(told), seconds=seconds, problems=problems))


def _send_file(link: DriverClient, name: str, fd: int) -> None:
    for position in range(0, os.fstat(fd).st_size, _PART):
        data = base64.b64encode(os.pread(fd, _PART, position)).decode()
        link.send(OutcomePart(name=name, data=data), _SEND_S)


def _packed(folder: Path) -> IO[bytes]:
    """Return an open file with a tar of ``folder``; the file has no name."""
    file = tempfile.TemporaryFile(dir=folder.parent)  # noqa: SIM115
    with tarfile.open(fileobj=file, mode="w|") as tar:
        tar.add(folder, arcname=".")
    file.flush()
    return file
