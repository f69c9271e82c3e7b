"""``Upload``: a run's folder, copied to where a URL says, now and then and at its end."""

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

_EVERY_S = 10.0
_PARTS = 10
"""What has changed is copied again after this many times as long as that took: objects cannot be appended to."""
_TRIES = 3

log = logging.getLogger("lagom")


def is_url(place: str | os.PathLike[str]) -> bool:
    """Whether ``place`` is not on a disk of this machine."""
    text = os.fspath(place)
    if text.startswith("dbfs:/") and os.path.isdir("/dbfs"):
        return False
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", text) is not None and not text.startswith("file:/")


def on_disk(place: str | os.PathLike[str]) -> Path:
    """The path that a place which is no URL stands for; Databricks mounts ``dbfs:/`` at ``/dbfs``."""
    text = re.sub(r"^file:/+", "/", os.fspath(place))
    return Path(re.sub(r"^dbfs:/+", "/dbfs/", text)).expanduser()


class Upload:
    """Copies a folder of this machine, which it makes and removes.

    What has not been copied yet when the driver is killed is lost: that of the last ten seconds, or more where copying
    takes longer than one.

    Args:
        url: of a folder for runs, for fsspec, or else for pyarrow.
        name: of this run's folder in it, which nothing has yet.

    Raises:
        Exception: whatever the file system has against making the folder.
    """

    def __init__(self, url: str, name: str) -> None:
        before, mark, after = url.partition("?")
        self.url = f"{before.rstrip('/')}/{name}"
        """Without what may follow it: that may hold a secret."""
        self._system, root = _opened(f"{before.rstrip('/')}{mark}{after}")
        self._root = f"{root.rstrip('/')}/{name}"
        self._system.makedirs(self._root, exist_ok=True)
        self.folder = Path(tempfile.mkdtemp(prefix="lagom-run-")).resolve()
        self._removed = weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        self._sent: dict[Path, tuple[int, int]] = {}
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Of a run that is over, with its `Result`; the copy on this machine stays the original's."""
        return {name: vars(self)[name] for name in ("url", "folder", "_system", "_root")}

    def begin(self) -> None:
        """Copy what there is, and from now on what changes.

        Raises:
            Exception: whatever the file system has against the first copy.
        """
        self._send()
        self._thread = threading.Thread(target=self._go_on, name="lagom-records", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Copy the rest; where that cannot be, the folder stays, and the user is told."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        for number in range(_TRIES):
            try:
                self._send()
                return
            except Exception as error:
                if number == _TRIES - 1:
                    self._removed.detach()
                    log.warning(
                        "the run's folder could not be copied to %s (%s: %s); it is in %s on this machine",
                        self.url,
                        type(error).__name__,
                        error,
                        self.folder,
                    )
            time.sleep(number + 1)

    def send(self, path: Path) -> None:
        """Copy one file of the folder."""
        relative = path.relative_to(self.folder).as_posix()
        target = f"{self._root}/{relative}"
        self._system.makedirs(target.rpartition("/")[0], exist_ok=True)
        self._system.put_file(os.fspath(path), target)

    def _send(self) -> None:
        for path in sorted(self.folder.rglob("*")):
            if path.name.startswith(".") or not path.is_file():  # being written
                continue
            status = path.stat()
            state = (status.st_mtime_ns, status.st_size)
            if self._sent.get(path) != state:
                self.send(path)
                self._sent[path] = state

    def _go_on(self) -> None:
        pause_s, said = _EVERY_S, False
        while not self._over.wait(pause_s):
            began = time.monotonic()
            try:
                self._send()
            except Exception as error:
                if not said:
                    log.warning("%s takes nothing at the moment: %s: %s", self.url, type(error).__name__, error)
                said = True
            pause_s = max(_EVERY_S, _PARTS * (time.monotonic() - began))


@functools.cache
def _opened(url: str) -> tuple[Any, str]:
    """fsspec's file system for ``url``, and the path there; pyarrow's where fsspec has none installed for it."""
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
