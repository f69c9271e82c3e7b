"""Resources that a host gives to its ranks: a folder of the run, the payload, modules, and a working directory."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import shutil
import socket
import tarfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lagom.program.user_folder import user_folder
from lagom.wire.framing import anonymous_file
from lagom.wire.spec import RunSpec

_UNUSED_S = 7 * 24 * 3600.0  # then an unused version of lagom that a driver sent here is removed


@dataclass(frozen=True, kw_only=True, slots=True)
class HostWorkspace:
    """Names the folders, the payload and the import path that the ranks on one host use."""

    host_dir: Path
    cwd: Path
    scratch: bool
    """Whether rank 0's files in ``cwd``, a folder of the run and not the driver's, have to be sent to the driver."""
    payload_fd: int
    sys_path: list[str]
    packages: str = ""
    """Folder with packages that the driver has sent, for those that are not installed here; "" without any."""

    @property
    def host(self) -> str:
        """Identifier of this host in the run; containers that share no files count as separate hosts."""
        stat = self.host_dir.stat()
        return f"{socket.gethostname()}|{stat.st_dev}:{stat.st_ino}"


@contextmanager
def host_workspace(
    spec: RunSpec, payload_fd: int | None = None, take_payload: Callable[[str], None] | None = None
) -> Iterator[HostWorkspace]:
    """Prepare a folder for ``spec``, shared with the run's other host processes here; the last one removes the folder.

    Args:
        payload_fd: file of the payload; None to take the payload from ``spec``, this host's files, Spark or the driver.
        take_payload: writes the payload that Spark has broadcast to a file; None if Spark has broadcast none.

    Raises:
        LinkClosed: if the payload or the snapshot does not arrive.
        OSError: if the driver cannot be reached for a large payload, or the folder cannot be made.
    """
    with contextlib.ExitStack() as stack:
        host_dir = stack.enter_context(_shared_folder(spec.run_id))
        driver_here = payload_fd is not None or _is_drivers_host(spec)
        if (code := Path(__file__).parents[2]).parent == base_dir():
            stack.callback(os.close, _lock_shared(code))
        if payload_fd is None:
            payload_fd = _payload(spec, host_dir, driver_here, take_payload)
            stack.callback(os.close, payload_fd)
        _take_snapshot(spec, host_dir)
        cwd = Path(spec.cwd)
        scratch = not (driver_here and os.access(cwd, os.R_OK | os.X_OK))
        if scratch:
            cwd = host_dir / "files"
            cwd.mkdir(exist_ok=True)
        sys_path = list(spec.sys_path) if driver_here else [str(_unpacked(spec.modules_zip, host_dir, "modules"))]
        # By its name, the folder counts as installed: what lies there is not the user's own.
        packages = str(_unpacked(spec.packages_zip, host_dir, "site-packages")) if spec.packages_zip else ""
        scratch = scratch and spec.plan.rehearsal is None  # a rehearsal discards its files
        yield HostWorkspace(
            host_dir=host_dir,
            cwd=cwd,
            scratch=scratch,
            payload_fd=payload_fd,
            sys_path=sys_path,
            packages=packages,
        )


def remove_leftovers() -> None:
    """Remove what killed processes have left: folders of runs and of executors' fork servers.

    Also remove versions of lagom that have not been used for ``_UNUSED_S``.
    """
    for path in base_dir().glob("code-*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _UNUSED_S:
                _remove_unused(path)
    for path in base_dir().glob("run-*"):
        # A folder without ``.alive`` is just being made, and its maker retries, or its remover was killed.
        _remove_unused(path)
    with locked_servers():
        for path in base_dir().glob("server-*"):
            _remove_unused(path)


def _remove_unused(path: Path) -> None:
    with contextlib.suppress(OSError):
        lock = os.open(path / ".alive", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(lock)


def _lock_shared(path: Path) -> int:
    """Keep ``_remove_unused`` from removing the folder ``path`` until the returned descriptor is closed."""
    lock = os.open(path / ".alive", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_SH)
    return lock


@contextmanager
def locked_servers() -> Iterator[None]:
    """Be the only process of this user that looks for a fork server of an executor, starts or removes one."""
    lock = os.open(base_dir(), os.O_RDONLY)  # the folder itself, so that no file is left
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def base_dir() -> Path:
    """Return this user's folder for runs in progress, which only the user may enter; make it if it is missing.

    Raises:
        OSError: if it cannot be made.
    """
    return Path(user_folder())


def pack_files(workspace: HostWorkspace, fd: int) -> bool:
    """Write the files of the scratch working directory to ``fd`` as a tar; return False if there are none."""
    if not workspace.scratch or not any(workspace.cwd.iterdir()):
        return False
    with os.fdopen(os.dup(fd), "wb") as file, tarfile.open(fileobj=file, mode="w|") as tar:
        tar.add(workspace.cwd, arcname=".")
    return True


@contextmanager
def _shared_folder(run_id: str) -> Iterator[Path]:
    remove_leftovers()
    path = base_dir() / f"run-{run_id}"
    while True:
        path.mkdir(mode=0o700, exist_ok=True)
        try:
            # Every host process of the run has a shared lock; the one that gets an exclusive lock is the last.
            lock = _lock_shared(path)
        except FileNotFoundError:  # another host process removed the folder in between
            continue
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock), os.stat(path / ".alive")):
                break
        os.close(lock)
    try:
        yield path
    finally:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _is_drivers_host(spec: RunSpec) -> bool:
    """Return whether this host sees the driver's files: only there does the driver's token file open by its path."""
    try:
        with open(spec.token, "rb") as file:
            return file.read(64).startswith(spec.run_id.encode())
    except OSError:
        return False


def _payload(spec: RunSpec, host_dir: Path, driver_here: bool, take_payload: Callable[[str], None] | None) -> int:
    if spec.payload is not None:
        fd = anonymous_file("payload")
        with os.fdopen(os.dup(fd), "wb") as file:
            file.write(spec.payload)
        return fd
    if driver_here:
        with open(spec.token, "rb") as file:
            path = file.read(4096).decode().split("\n")[1]
        return os.open(path, os.O_RDWR)
    path = str(host_dir / "payload")
    with open(host_dir / ".payload-lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one host process fetches, the others find the file
        if not os.path.exists(path):
            if take_payload is not None:
                take_payload(path + ".part")
            elif spec.address is None:
                raise ConnectionError(
                    "the data is too large to travel inside the job, and this host cannot reach the driver"
                )
            else:
                from lagom.wire.fetch import fetch_payload

                fetch_payload(spec, path + ".part")
            os.replace(path + ".part", path)
    return os.open(path, os.O_RDWR)


def _take_snapshot(spec: RunSpec, host_dir: Path) -> None:
    """Copy the snapshot that the ranks go on from to this host, if it does not see the run's folder."""
    place = spec.snapshots
    if place is None or not place.sha256 or place.folder.is_here():
        return
    from lagom.restart.kept_snapshots import FETCHED
    from lagom.wire.fetch import fetch_snapshot

    path = str(host_dir / FETCHED)
    with open(host_dir / ".snapshot-lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not os.path.exists(path):
            fetch_snapshot(spec, path + ".part")
            os.replace(path + ".part", path)


def _unpacked(archive: bytes, host_dir: Path, name: str) -> Path:
    """Return the folder ``name`` with the content of the zip ``archive``, which the host's first process unpacks."""
    path = host_dir / name
    with open(host_dir / f".{name}-lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            path.mkdir()
            if archive:
                zipfile.ZipFile(io.BytesIO(archive)).extractall(path)
    return path
