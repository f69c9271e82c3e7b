"""``Upload``: copies a run's folder to a URL, now and then and at its end."""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import shutil
import socket
import tempfile
import threading
import time
import weakref
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from lagom.errors import LagomError

EVERY_S = 10.0
_PARTS = 10
"""Wait this many times the last upload's duration before the next; objects cannot be appended to."""
_TRIES = 3
_DRIVER = "driver.json"
"""Names the process that copies a run which can be resumed, and until when it counts as alive without a sign."""
_ORDER = (".jsonl", ".json")
"""Kinds of files that are copied after others: descriptions are of files that are there then."""

log = logging.getLogger("lagom")


def is_url(place: str | os.PathLike[str]) -> bool:
    """Return whether ``place`` is not on a disk of this machine."""
    text = os.fspath(place)
    if text.startswith("dbfs:/") and os.path.isdir("/dbfs"):
        return False
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", text) is not None and not text.startswith("file:/")


def on_disk(place: str | os.PathLike[str]) -> Path:
    """Return the path of a place that is no URL; Databricks mounts ``dbfs:/`` at ``/dbfs``."""
    text = re.sub(r"^file:/+", "/", os.fspath(place))
    return Path(re.sub(r"^dbfs:/+", "/dbfs/", text)).expanduser()


class Upload:
    """Copies a folder of this machine, which it makes and removes.

    Records that are not copied yet when the driver is killed are lost: those of the last ten seconds, or of more if
    copying takes longer than one.

    Args:
        url: folder for runs, for fsspec, or else for pyarrow.
        name: name of this run's folder in it, which does not exist yet.

    Raises:
        Exception: the file system's error when the folder cannot be made.
    """

    def __init__(self, url: str, name: str) -> None:
        self._open(url, name)
        self.file_system.makedirs(self._root, exist_ok=True)

    @classmethod
    def again(cls, url: str) -> Upload:
        """Return an upload to the folder of a run that is there already, and is copied to this machine first.

        Raises:
            ValueError: if there is no folder.
            LagomError: if another process seems to copy the run there.
            Exception: the file system's error.
        """
        found = cls.__new__(cls)
        found._open(url, "")
        if not found.file_system.isdir(found._root):
            raise ValueError(f"there is no run at {found.url}")
        found._check_driver()
        found._fetch()
        return found

    def _open(self, url: str, name: str) -> None:
        before, mark, after = url.partition("?")
        self.url = f"{before.rstrip('/')}/{name}".rstrip("/")
        """URL without its query, which may hold a secret."""
        self.file_system, root = _opened(f"{before.rstrip('/')}{mark}{after}")
        self._root = f"{root.rstrip('/')}/{name}".rstrip("/")
        self.folder = Path(tempfile.mkdtemp(prefix="lagom-run-")).resolve()
        self._removed = weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        self._sent: dict[Path, tuple[int, int]] = {}
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._signs = False

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of an ended run, with its `Result`; the original keeps the copy on this machine."""
        return {name: vars(self)[name] for name in ("url", "folder", "file_system", "_root")}

    def begin(self) -> None:
        """Copy the folder now, and its changes from now on.

        Raises:
            Exception: the file system's error in the first copy.
        """
        self.send_changes()
        self._thread = threading.Thread(target=self._go_on, name="lagom-records", daemon=True)
        self._thread.start()

    def give_signs(self) -> None:
        """Say at the URL from now on that this process goes on with the run, so that no other does."""
        self._signs = True
        self._sign(EVERY_S)

    def finish(self) -> None:
        """Copy the rest; if that fails, keep the folder and warn the user."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        with suppress(FileNotFoundError):
            os.unlink(self.folder / _DRIVER)
        for number in range(_TRIES):
            try:
                self.send_changes()
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
        self.file_system.makedirs(target.rpartition("/")[0], exist_ok=True)
        self.file_system.put_file(os.fspath(path), target)

    def send_changes(self) -> None:
        """Copy what has changed, and remove at the URL what was copied and is not here any more."""
        paths = sorted(self.folder.rglob("*"), key=_turn)
        found = {path for path in paths if not path.name.startswith(".") and path.is_file()}  # others are being written
        for path in (path for path in paths if path in found):
            with suppress(FileNotFoundError):  # removed meanwhile
                state = _state_of(path)
                if self._sent.get(path) != state:
                    self.send(path)
                    self._sent[path] = state
        self._remove(self._sent.keys() - found)

    def _remove(self, paths: Iterable[Path]) -> None:
        for path in sorted(paths):
            with suppress(FileNotFoundError):
                self.file_system.rm_file(f"{self._root}/{path.relative_to(self.folder).as_posix()}")
            del self._sent[path]

    def _go_on(self) -> None:
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
            self._sign(pause_s)

    def _sign(self, pause_s: float) -> None:
        """Have the next copy say that this process lives; count on it for twice as long as that may take."""
        if self._signs:
            sign = {"host": socket.gethostname(), "pid": os.getpid(), "until": time.time() + 2 * (EVERY_S + pause_s)}
            partial = self.folder / f".{_DRIVER}"
            partial.write_text(json.dumps(sign))
            partial.replace(self.folder / _DRIVER)

    def _check_driver(self) -> None:
        """Raise LagomError if a process has said lately that it goes on with the run, and may still live."""
        try:
            sign = json.loads(self.file_system.cat_file(f"{self._root}/{_DRIVER}"))
        except FileNotFoundError:
            return
        except ValueError as error:
            raise LagomError(
                f"the run at {self.url} is going on: {_DRIVER} is just being written there; if its driver is dead, "
                "remove it"
            ) from error
        left_s = sign["until"] - time.time()
        if left_s <= 0 or (sign["host"] == socket.gethostname() and not os.path.exists(f"/proc/{sign['pid']}")):
            return
        raise LagomError(
            f"the run at {self.url} is going on in process {sign['pid']} on {sign['host']}, or was lately; if that "
            f"process is dead, call again in {left_s:.0f} s"
        )

    def _fetch(self) -> None:
        """Copy what is at the URL to this machine."""
        for name in self.file_system.find(self._root):
            path = self.folder / name[len(self._root) :].lstrip("/")
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.file_system.get_file(name, os.fspath(path))
            path.chmod(0o600)
            self._sent[path] = _state_of(path)


def _turn(path: Path) -> tuple[int, Path]:
    """Return what sorts files in the order in which they are copied."""
    return _ORDER.index(path.suffix) + 1 if path.suffix in _ORDER else 0, path


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
