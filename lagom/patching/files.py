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
import urllib.request
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Dataset

from lagom.patching.replace import replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lagom.patching.session import Session

_MEET_S = 10.0
"""How long the first rank of a host may take to come to a save that another rank has come to."""
_WRITE_S = 3600.0
"""How long its writing may take."""


@contextmanager
def shared_files(session: Session) -> Iterator[None]:
    """Have saves written once and whole, and downloads done once, on each host."""
    saves = _Saves(session)
    downloads = _Downloads(session)
    with ExitStack() as stack:
        for owner in (torch, torch.serialization):
            stack.enter_context(replaced(owner, "save", saves.saving(torch.serialization.save)))
        stack.enter_context(replaced(urllib.request, "urlretrieve", downloads.once(urllib.request.urlretrieve)))
        stack.enter_context(downloads.locked_datasets())
        yield


class _Saves:
    """``torch.save`` by the first rank of each host, for all that save to the same path. See Note [One writer]."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._host = hashlib.sha256(f"{socket.gethostname()}:{session.host_dir}".encode()).hexdigest()[:16]
        self._num = 0

    def saving(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def save(obj: object, f: Any, *args: Any, **kwargs: Any) -> None:
            session = self._session
            if not session.distributed or session.store is None or not isinstance(f, (str, os.PathLike)):
                original(obj, f, *args, **kwargs)
                return
            path = os.path.realpath(os.fspath(f))
            key = f"saved/{self._host}/{self._num}"
            self._num += 1
            if session.local_rank != 0 and self._is_written(key, path):
                return
            try:
                if session.local_rank == 0:
                    session.store.set(key, path)
                _write_whole(path, lambda target: original(obj, target, *args, **kwargs))
            finally:
                # Also after a failure: nobody shall wait for a file that does not come.
                if session.local_rank == 0:
                    session.store.set(key + "/done", "")

        return save

    def _is_written(self, key: str, path: str) -> bool:
        """Whether the first rank of the host saves to the same path now; if so, after it has."""
        store = self._session.store
        assert store is not None
        try:
            store.wait([key], timedelta(seconds=_MEET_S))
            if store.get(key).decode() != path:
                return False
            store.wait([key + "/done"], timedelta(seconds=_WRITE_S))
        except RuntimeError:  # it does not come here, or is gone
            return False
        return True


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


# Note [One writer]
# Ranks run the same program, so the n-th save of one rank is the n-th save of the others. A rank that is not the first
# of its host asks the first one's path of that number: where it is the same, it waits until the file is there, and its
# own content, which is equal, is not needed. Where it is another (a temporary folder or a name of the rank's own) or
# the first rank does not come (a save inside a branch on the rank), it writes for itself. Files appear whole under
# their name in any case, by os.replace.
