"""When files were written, so that one that is written again is found, also where its size stays the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lagom.errors import DataError


class FileVersions:
    """Of the files of a data set, as they were when it was made.

    They go along to other processes. Another host may have local files by copies of its own, and there a file is as it
    was when it was first read.
    """

    def __init__(self) -> None:
        self._boot = _boot()
        self._times: dict[str, int] = {}
        self._stored: dict[str, int | None] = {}

    def look(self, home: Any, path: str) -> None:
        """Make sure that the file at ``path`` of the file system ``home`` was not written since the first call.

        That is a request to a store, which has times in whole seconds as a rule.

        Raises:
            DataError: when it was, or is gone.
        """
        if home.type_name == "local":
            self.check(home, path)
            return
        written = _written(home, path)
        seen = self._stored.setdefault(path, None if written is None else written // 10**9)
        if written is not None and seen is not None and written // 10**9 != seen:
            raise _again(path)

    def check(self, home: Any, path: str) -> None:
        """The same where files are local, which are looked at in no time; nothing where they are not.

        Raises:
            DataError: when the file was written again, or is gone.
        """
        if home.type_name != "local":
            return
        # Not by os.stat: the disk that pyarrow reads is what counts.
        written = _written(home, path)
        if written is None:
            raise DataError(f"{path} is gone; it was there when the data set was made")
        if self._times.setdefault(path, written) != written:
            raise _again(path)

    def __setstate__(self, state: dict[str, Any]) -> None:
        boot = _boot()
        self.__dict__.update(state if state["_boot"] == boot else {**state, "_boot": boot, "_times": {}})


def _written(home: Any, path: str) -> int | None:
    """In nanoseconds; None where the file is gone, or the file system does not say."""
    try:
        written: int | None = home.get_file_info(path).mtime_ns
    except OSError as error:
        raise DataError(f"{path} cannot be looked at: {error}") from error
    return written


def _again(path: str) -> DataError:
    return DataError(
        f"{path} was written again since the data set was made; make the ParquetDataset anew, and write to another "
        "folder while one is read"
    )


def _boot() -> str:
    """Of this host since it was started; empty where the system does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
