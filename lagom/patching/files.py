"""Files: one writer for a path that every rank of a host saves to, and downloads once per host."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import inspect
import os
import pickle
import socket
import stat
import time
import urllib.request
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Dataset

from lagom.patching.replace import replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lagom.patching.session import Session

_WAIT_S = 60.0


@contextmanager
def shared_files(session: Session) -> Iterator[None]:
    """Have saves written once and whole, and downloads done once, on each host."""
    saves = _Saves(session)
    downloads = _Downloads(session)
    with ExitStack() as stack:
        for owner in (torch, torch.serialization):
            stack.enter_context(replaced(owner, "save", saves.saving(torch.serialization.save)))
            stack.enter_context(replaced(owner, "load", saves.loading(torch.serialization.load)))
        stack.enter_context(replaced(urllib.request, "urlretrieve", downloads.once(urllib.request.urlretrieve)))
        stack.enter_context(downloads.locked_datasets())
        yield


class _Saves:
    """``torch.save`` by the first rank of each host; ``torch.load`` waits for what this program saved before."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._host = f"{socket.gethostname()}:{session.host_dir}"
        self._counts: dict[str, int] = {}

    def saving(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def save(obj: object, f: Any, *args: Any, **kwargs: Any) -> None:
            if not self._session.distributed or not isinstance(f, (str, os.PathLike)):
                original(obj, f, *args, **kwargs)
                return
            path = os.path.realpath(os.fspath(f))
            self._counts[path] = self._counts.get(path, 0) + 1
            if self._session.local_rank != 0:
                return
            try:
                _write_whole(path, lambda target: original(obj, target, *args, **kwargs))
            finally:
                # Also after a failure: nobody shall wait for a file that does not come.
                if self._session.store is not None:
                    self._session.store.set(self._key(path), "saved")

        return save

    def loading(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def load(f: Any, *args: Any, **kwargs: Any) -> Any:
            if self._session.distributed and self._session.local_rank != 0 and isinstance(f, (str, os.PathLike)):
                self._wait(os.path.realpath(os.fspath(f)))
            return original(f, *args, **kwargs)

        return load

    def _key(self, path: str) -> str:
        place = hashlib.sha256(f"{self._host}:{path}".encode()).hexdigest()
        return f"saved/{place}/{self._counts[path]}"

    def _wait(self, path: str) -> None:
        store = self._session.store
        if path not in self._counts or store is None:
            return
        key = self._key(path)
        give_up = time.monotonic() + _WAIT_S
        while not store.check([key]) and time.monotonic() < give_up:
            time.sleep(0.005)


def _write_whole(path: str, write: Callable[[str], None]) -> None:
    if os.path.exists(path) and not stat.S_ISREG(os.stat(path).st_mode):
        write(path)  # a device or a pipe cannot be replaced
        return
    partial = f"{path}.{os.getpid()}.partial"
    try:
        write(partial)
        if os.path.exists(path):
            os.chmod(partial, stat.S_IMODE(os.stat(path).st_mode))
        os.replace(partial, path)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(partial)


class _Downloads:
    """One rank of a host after the other: the first downloads, the others find it there."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._held = 0
        self._counts: dict[tuple[str, str], int] = {}
        self._wrapped = ExitStack()

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Held by one rank of the host at a time, and by one that holds it already."""
        if self._held:
            yield
            return
        with open(self._session.host_dir / "download.lock", "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            self._held += 1
            try:
                yield
            finally:
                self._held -= 1

    def once(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """``urlretrieve`` to a named file, on the first rank of the host that comes; the others get its result."""

        @functools.wraps(original)
        def urlretrieve(url: str, filename: Any = None, *args: Any, **kwargs: Any) -> Any:
            if not self._session.distributed or filename is None:
                return original(url, filename, *args, **kwargs)
            path = os.path.abspath(os.fspath(filename))
            key = (url, path)
            self._counts[key] = self._counts.get(key, 0) + 1
            name = hashlib.sha256(f"{url}\n{path}\n{self._counts[key]}".encode()).hexdigest()
            marker = self._session.host_dir / f"download.{name}"
            with self.lock():
                if marker.exists():
                    # Written by this run's own ranks, in a directory of theirs.
                    return filename, pickle.loads(marker.read_bytes())
                result = original(url, filename, *args, **kwargs)
                marker.write_bytes(pickle.dumps(result[1]))
                return result

        return urlretrieve

    @contextmanager
    def locked_datasets(self) -> Iterator[None]:
        """Have data sets with a ``download`` parameter made under the lock; also those whose classes come later."""
        session = self._session

        def init_subclass(cls: Any, /, **kwargs: Any) -> None:
            super(Dataset, cls).__init_subclass__(**kwargs)  # type: ignore[misc]  # cls is a Dataset
            if session.live:
                self._wrap(cls)

        with self._wrapped, replaced(Dataset, "__init_subclass__", classmethod(init_subclass)):
            for cls in _subclasses(Dataset):
                self._wrap(cls)
            yield

    def _wrap(self, cls: type) -> None:
        original = vars(cls).get("__init__")
        if original is None:
            return
        try:
            signature = inspect.signature(original)
        except (TypeError, ValueError):
            return
        if "download" not in signature.parameters:
            return

        @functools.wraps(original)
        def init(dataset: Any, *args: Any, **kwargs: Any) -> None:
            with self.lock() if self._downloads(signature, dataset, args, kwargs) else ExitStack():
                original(dataset, *args, **kwargs)

        self._wrapped.enter_context(replaced(cls, "__init__", init))

    def _downloads(
        self, signature: inspect.Signature, dataset: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        if not self._session.distributed:
            return False
        try:
            bound = signature.bind(dataset, *args, **kwargs)
        except TypeError:
            return False  # the call itself will say so
        bound.apply_defaults()
        return bool(bound.arguments["download"])


def _subclasses(cls: type) -> Iterator[type]:
    sub: type
    for sub in cls.__subclasses__():
        yield sub
        yield from _subclasses(sub)
