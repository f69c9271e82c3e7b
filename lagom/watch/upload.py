"""``Upload``: copies a run's folder to a URL, from time to time and at the end of the run."""

from __future__ import annotations

import functools
import logging
import os
import re
import shutil
import tempfile
import threading
import time
import weakref
from pathlib import Path
from typing import Any

from lagom.errors import LagomError

EVERY_S = 10.0
_PARTS = 10
"""After an upload, wait at least this many times as long as it took, since changed files are copied as a whole."""
_TRIES = 3
RUN, SNAPSHOTS = "run.json", "snapshots"
"""The file of a run's folder that is there from the beginning, and the folder of its snapshots."""

log = logging.getLogger("lagom")


def is_url(place: str | os.PathLike[str]) -> bool:
    """Return whether ``place`` is not on a disk of this machine."""
    text = os.fspath(place)
    if text.startswith("dbfs:/") and os.path.isdir("/dbfs"):
        return False
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", text) is not None and not text.startswith("file:/")


def on_disk(place: str | os.PathLike[str]) -> Path:
    """Return the path of a place that is no URL; Databricks mounts ``dbfs:/`` at ``/dbfs``.

    Raises:
        FileNotFoundError: if the path is below a home folder that is not known.
    """
    text = re.sub(r"^dbfs:/+", "/dbfs/", re.sub(r"^file:/+", "/", os.fspath(place)))
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise FileNotFoundError(f"{text} is below a home folder, and this user has none; set HOME") from error


class Upload:
    """Copies a temporary folder of this machine to a URL; makes the folder, and removes it.

    If the driver is killed, the URL lacks the records of the last ten seconds, or of more if a copy takes longer than
    one second. The folder then stays on this machine.

    Args:
        url: URL of the folder of runs, which fsspec opens, or else pyarrow.
        name: name of this run's folder there, which does not exist yet.

    Raises:
        Exception: the file system's error when the folder cannot be made.
    """

    def __init__(self, url: str, name: str) -> None:
        self._open(url, name)
        self.file_system.makedirs(self.root, exist_ok=True)

    @classmethod
    def again(cls, url: str) -> Upload:
        """Return an upload to the folder of a run that is there already.

        Raises:
            ValueError: if it is not there.
            LagomError: if nothing here can read such URLs.
            Exception: the file system's error.
        """
        copied = cls.__new__(cls)
        try:
            copied._open(url, "")
        except ImportError as error:
            kind = url.partition(":")[0]
            raise LagomError(f"{kind}: cannot be read here: {error}; install what fsspec needs for it") from error
        if not copied.file_system.exists(f"{copied.root}/{RUN}"):
            raise ValueError(f"there is no run at {copied.url}")
        return copied

    def _open(self, url: str, name: str) -> None:
        before, mark, after = url.partition("?")
        self.url = f"{before.rstrip('/')}/{name}".rstrip("/")
        """URL without its query, which may hold a secret."""
        self.file_system, root = _opened(f"{before.rstrip('/')}{mark}{after}")
        self.root = f"{root.rstrip('/')}/{name}".rstrip("/")
        """The folder in the file system."""
        self.folder = Path(tempfile.mkdtemp(prefix="lagom-run-")).resolve()
        self._removed = weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        self._sent: dict[Path, tuple[int, int]] = {}
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle with a ``Result``: the folder on this machine stays with the original object."""
        return {name: vars(self)[name] for name in ("url", "folder", "file_system", "root")}

    def begin(self) -> None:
        """Copy the folder now, and its changes from now on.

        Raises:
            Exception: the file system's error in the first copy.
        """
        self.send_changes()
        self._thread = threading.Thread(target=self._send_until_over, name="lagom-records", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Copy the rest; if that fails, keep the folder and warn the user."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        for number in range(_TRIES):
            try:
                self.send_changes()
                return
            except Exception as error:
                if number == _TRIES - 1:
                    self.keep(f" ({type(error).__name__}: {error})")
            time.sleep(number + 1)

    def keep(self, why: str = "") -> None:
        """Keep the folder on this machine, since its files could not be copied, and warn the user."""
        self._removed.detach()
        log.warning(
            "the run's folder could not be copied to %s%s; it is in %s on this machine", self.url, why, self.folder
        )

    def send(self, path: Path) -> None:
        """Copy one file of the folder."""
        relative = path.relative_to(self.folder).as_posix()
        target = f"{self.root}/{relative}"
        self.file_system.makedirs(target.rpartition("/")[0], exist_ok=True)
        self.file_system.put_file(os.fspath(path), target)

    def fetch(self) -> None:
        """Copy the records at the URL to this machine, without snapshots."""
        for name in self.file_system.find(self.root):
            path = self.folder / name[len(self.root) :].lstrip("/")
            if self._is_sent(path) and ".." not in path.parts:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                self.file_system.get_file(name, os.fspath(path))
                self._sent[path] = _state_of(path)

    def send_changes(self) -> None:
        """Copy the files that are new, or have changed since they were last copied."""
        for path in sorted(self.folder.rglob("*")):
            if not self._is_sent(path) or not path.is_file():
                continue
            state = _state_of(path)
            if self._sent.get(path) != state:
                self.send(path)
                self._sent[path] = state

    def _is_sent(self, path: Path) -> bool:
        """Return whether ``path`` is a complete record; not a partial file, nor a snapshot (see ``SnapshotCopies``)."""
        return path != self.folder and not path.name.startswith(".") and self.folder / SNAPSHOTS not in path.parents

    def _send_until_over(self) -> None:
        pause_s, said = EVERY_S, False
        while not self._over.wait(pause_s):
            began = time.monotonic()
            try:
                self.send_changes()
            except Exception as error:
                if not said:
                    log.warning("%s takes nothing at the moment: %s: %s", self.url, type(error).__name__, error)
                said = True
            pause_s = max(EVERY_S, _PARTS * (time.monotonic() - began))


def _state_of(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_mtime_ns, status.st_size


@functools.cache
def _opened(url: str) -> tuple[Any, str]:
    """Return fsspec's file system for ``url`` and the path there; pyarrow's if fsspec's is not installed."""
    import fsspec

    try:
        system, path = fsspec.core.url_to_fs(url)
    except ImportError as missing:
        try:
            from fsspec.implementations.arrow import ArrowFSWrapper
            from pyarrow import fs

            system, path = fs.FileSystem.from_uri(re.sub("^s3[an]:", "s3:", url))
        except Exception:
            raise missing from None
        return ArrowFSWrapper(system), path
    return system, path
