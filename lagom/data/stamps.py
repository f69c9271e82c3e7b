"""When local files were written, so that one that is written again is found, also where its size stays the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lagom.errors import DataError


class Stamps:
    """Of the files of a data set, as they were when it was made.

    They go along to other processes of this host. Another host may have the files by copies of its own, and there a
    file is as it was when it was first read.
    """

    def __init__(self) -> None:
        self._boot = _boot()
        self._times: dict[str, int] = {}

    def check(self, home: Any, path: str) -> None:
        """Make sure that the file at ``path`` of the file system ``home`` was not written since the first call.

        Stores have no files that change, or tell it late and slowly: nothing is done there.

        Raises:
            DataError: when it was, or is gone.
        """
        if home.type_name != "local":
            return
        # Not by os.stat: the disk that pyarrow reads is what counts.
        try:
            written = home.get_file_info(path).mtime_ns
        except OSError as error:
            raise DataError(f"{path} cannot be looked at: {error}") from error
        if written is None:
            raise DataError(f"{path} is gone; it was there when the data set was made")
        if self._times.setdefault(path, written) != written:
            raise DataError(
                f"{path} was written again since the data set was made; make the ParquetDataset anew, and write to "
                "another folder while one is read"
            )

    def __setstate__(self, state: dict[str, Any]) -> None:
        boot = _boot()
        self.__dict__.update(state if state["_boot"] == boot else {"_boot": boot, "_times": {}})


def _boot() -> str:
    """Of this host since it was started; empty where the system does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
