"""``OutcomeCollector``: puts outcomes and files together from the rows of a Spark job."""

from __future__ import annotations

import functools
import json
import logging
import mmap
import os
import tarfile
from collections.abc import Mapping, Sequence
from typing import IO, Any

from lagom.digests import digest_of
from lagom.driver.protocol import Outcome
from lagom.driver.run import RunView
from lagom.errors import LagomError
from lagom.program.payload import unpack
from lagom.wire.framing import anonymous_file
from lagom.wire.messages import RankReport, from_json

log = logging.getLogger("lagom")

_FILTER: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
"""Argument of ``extract`` against paths out of the folder; Python up to 3.10.11 and 3.11.3 does not know it."""


class OutcomeCollector:
    """Makes the outcomes of all ranks from the rows of a job and the files that the channel received."""

    def __init__(self, rows: Sequence[Any], run: RunView) -> None:
        self._run = run
        self._reports: dict[int, RankReport] = {}
        self._parts: dict[str, dict[int, bytes]] = {}
        self._digests: dict[str, str] = {}
        for row in rows:
            self._take(row)

    @property
    def all_returned(self) -> bool:
        """Return whether the function has returned on every rank, as it may while a loss ends the attempt."""
        reports = self._run.reports | self._reports
        return len(reports) == self._run.plan.world_size and all(report.ok for report in reports.values())

    def outcomes(self) -> list[Outcome]:
        """Return an outcome for each rank, in rank order; a rank without a report counts as stopped.

        Raises:
            LagomError: if tasks were lost, outcomes are missing without any failure, or an outcome arrived damaged.
        """
        failures = {report.rank: report for report in reversed(self._run.failures())}
        ranks = range(self._run.plan.world_size)
        reports = self._run.reports | self._reports | failures
        failed = [report for report in reports.values() if report.has_failed]
        missing = sorted(set(ranks) - set(reports))
        if (failed or missing) and all(report.consequence for report in failed):
            if (lost := self._run.lost()) is not None:
                raise lost
            if not failed:
                raise LagomError(f"no outcome arrived from ranks {missing}, and no error either")
        complete = [
            reports.get(rank) or RankReport(rank=rank, ok=False, stopped=True, consequence=True) for rank in ranks
        ]
        return [Outcome(rank=rank, report=report, load=self._loader(rank)) for rank, report in enumerate(complete)]

    def unpack_files(self, folder: str) -> None:
        """Extract the files that rank 0 wrote under its working directory into ``folder``, if any have come.

        Raises:
            LagomError: if the archive of the files arrived damaged.
        """
        fd = self._file("files-0")
        if fd is not None:
            with os.fdopen(fd, "rb") as file:
                extract_files(file, folder)

    def _take(self, row: Any) -> None:
        name = f"{row['name']}-{row['rank']}"
        self._parts.setdefault(name, {})[row["part"]] = bytes(row["data"])
        if row["part"] != 0:
            return
        report = from_json(json.loads(row["report"]))
        assert isinstance(report, RankReport)
        if report.sha256:
            self._digests[name] = report.sha256
        for message in report.output:
            self._run.say(message)
        if row["name"] == "outcome":
            self._reports[row["rank"]] = report

    def _loader(self, rank: int) -> Any:
        name = f"outcome-{rank}"
        if name in self._digests:
            mapped = _mapped(self._file(name))
            return functools.cache(lambda: unpack(mapped))
        data = b"".join(part for _, part in sorted(self._parts.get(name, {}).items()))
        return functools.cache(lambda: _unpacked(data))

    def _file(self, name: str) -> int | None:
        """Return a descriptor of the file that arrived as ``name``, positioned at its start; None without one."""
        if name in self._digests:
            fd = os.dup(self._run.channel.delivered[name])
            os.lseek(fd, 0, os.SEEK_SET)
            if digest_of(fd) != self._digests[name]:
                raise LagomError(f"{name} arrived damaged: its digest is not the one that Spark brought")
            return fd
        if name not in self._parts:
            return None
        fd = anonymous_file(name)
        for _, part in sorted(self._parts[name].items()):
            os.write(fd, part)
        os.lseek(fd, 0, os.SEEK_SET)
        return fd


def extract_files(archive: IO[bytes], folder: str | os.PathLike[str]) -> None:
    """Extract the files that rank 0 wrote from the tar ``archive`` into ``folder``.

    A file that cannot be extracted, such as a link that leads out of the folder, is only logged.
    """
    with tarfile.open(fileobj=archive) as tar:
        for member in tar:
            _put(tar, member, folder)


def _put(tar: tarfile.TarFile, member: tarfile.TarInfo, folder: str | os.PathLike[str]) -> None:
    try:
        if not _FILTER:
            _check(member)
        tar.extract(member, folder, **_FILTER)
    except (OSError, tarfile.TarError) as error:
        log.warning("%s, which rank 0 wrote, was not put into %s: %s", member.name, folder, error)


def _check(member: tarfile.TarInfo) -> None:
    paths = [member.name, member.linkname if member.islnk() or member.issym() else ""]
    if any(os.path.isabs(path) or ".." in path.split("/") for path in paths) or member.isdev():
        raise tarfile.TarError("it is a device, or leads out of the folder")


def _unpacked(data: bytes) -> Mapping[str, Any]:
    # Unpickle from a bytearray, so that arrays in the result are writable.
    return unpack(bytearray(data)) if data else {"error": None}


def _mapped(fd: int | None) -> memoryview:
    """Map the file into memory and close ``fd``; the mapping lives as long as the view.

    The file is not copied into memory: of a failed attempt, only the outcome of the first failed rank is ever loaded.
    """
    assert fd is not None
    try:
        return memoryview(
            mmap.mmap(fd, os.fstat(fd).st_size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        )
    finally:
        os.close(fd)
