"""``FileVersions``: remembers when files were written, to notice files that are overwritten, even with equal size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lagom.errors import DataError


class FileVersions:
    """Modification times of a data set's files, from the time when the data set was made.

    The times travel to other processes of this host with the pickle. Another host may have its own copies of local
    files, so there a file's time is taken when the file is first opened.
    """

    def __init__(self) -> None:
        self._boot = boot_id()
        self._times: dict[str, int] = {}
        self._stored: dict[str, int | None] = {}

    def look(self, home: Any, path: str) -> None:
        """Check that the file at ``path`` of the file system ``home`` has not been written since the first call.

        For an object store this is a request; times there are compared in whole seconds.

        Raises:
            DataError: if the file was written again or its time cannot be read, or a local file is gone.
        """
        if home.type_name == "local":
            self.check(home, path)
            return
        written = _written(home, path)
        seen = self._stored.setdefault(path, None if written is None else written // 10**9)
        if written is not None and seen is not None and written // 10**9 != seen:
            raise _again(path)

    def check(self, home: Any, path: str) -> None:
        """Check a local file as ``look`` does; do nothing for other file systems, where a check takes time.

        Raises:
            DataError: if the file was written again, or is gone.
        """
        if home.type_name != "local":
            return
        # os.stat would see the rank's overlay; pyarrow reads the real disk.
        written = _written(home, path)
        if written is None:
            raise DataError(f"{path} is gone; it was there when the data set was made")
        if self._times.setdefault(path, written) != written:
            raise _again(path)

    def __setstate__(self, state: dict[str, Any]) -> None:
        boot = boot_id()
        self.__dict__.update(state if state["_boot"] == boot else {**state, "_boot": boot, "_times": {}})


def _written(home: Any, path: str) -> int | None:
    """Return the modification time in nanoseconds; None if the file is gone or its file system has no times."""
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


def boot_id() -> str:
    """Return the id that this host got when it was booted; an empty text if the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
