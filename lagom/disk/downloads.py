"""``Downloads``: the first rank of a host downloads for all ranks of the host."""

from __future__ import annotations

import email
import fcntl
import functools
import hashlib
import inspect
import os
import socket
import types
from contextlib import ExitStack, contextmanager, suppress
from http.client import HTTPMessage
from typing import TYPE_CHECKING, Any

from torch.utils.data import Dataset

from lagom import disk as files
from lagom.patching.replace import replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lagom.session.session import Session

_MEET_S = 10.0
"""Seconds that the first rank of a host may take to reach a download that another rank has reached."""
_DOWNLOAD_S = 24 * 3600.0
"""Seconds that the first rank's download may take."""


class Downloads:
    """Lets the first rank of a host download for all its ranks; the other ranks wait, and then find the files."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._host = hashlib.sha256(f"{socket.gethostname()}:{session.host_dir}".encode()).hexdigest()[:16]
        self._held = 0
        self._num = 0
        self._counts: dict[tuple[str, str], int] = {}
        self._wrapped = ExitStack()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Run the block on one rank of the host at a time: first on the first rank, whose files all ranks see."""
        if self._held or not self._session.distributed:
            yield
            return
        key = f"download/{self._host}/{self._num}"
        self._num += 1
        first = self._session.local_rank == 0
        if first:
            self._say(key)
        else:
            self._wait_for(key)
        self._held += 1
        try:
            with open(self._session.host_dir / "download.lock", "w") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                with files.downloading() if first else ExitStack():
                    yield
        finally:
            self._held -= 1
            if first:  # also after a failure, so that no rank waits in vain
                self._say(key + "/done")

    def _say(self, key: str) -> None:
        if self._session.notes is not None:
            self._session.notes.set(key, "")

    def _wait_for(self, key: str) -> None:
        notes = self._session.notes
        if notes is None:
            return
        with suppress(RuntimeError, OSError):  # the first rank does not come, or has ended: this rank downloads itself
            notes.wait(key, _MEET_S)
            notes.wait(key + "/done", _DOWNLOAD_S)

    def once(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``urlretrieve``: to a named file, the first rank of the host downloads, and all get its result."""

        @functools.wraps(original)
        def urlretrieve(url: str, filename: Any = None, *args: Any, **kwargs: Any) -> Any:
            if not self._session.distributed or filename is None:
                return original(url, filename, *args, **kwargs)
            path = os.path.abspath(os.fspath(filename))
            key = (url, path)
            self._counts[key] = self._counts.get(key, 0) + 1
            name = hashlib.sha256(f"{url}\n{path}\n{self._counts[key]}".encode()).hexdigest()
            marker = self._session.host_dir / f"download.{name}"
            with self.turn():
                if marker.exists() and os.path.exists(path):
                    return filename, email.message_from_bytes(marker.read_bytes(), _class=HTTPMessage)
                result = original(url, filename, *args, **kwargs)
                if self._session.local_rank == 0:
                    marker.write_bytes(result[1].as_bytes())
                return result

        return urlretrieve

    @contextmanager
    def shared_datasets(self) -> Iterator[None]:
        """In the block, construct data sets with ``download=True`` by ``turn``, also of classes defined later."""
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
        if original is None or _cannot_download(original):
            return
        try:
            signature = inspect.signature(original)
        except (TypeError, ValueError):
            return
        if "download" not in signature.parameters:
            return

        @functools.wraps(original)
        def init(dataset: Any, /, *args: Any, **kwargs: Any) -> None:
            with self.turn() if self._downloads(signature, dataset, args, kwargs) else ExitStack():
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
            return False  # the constructor will raise the same error
        bound.apply_defaults()
        return bool(bound.arguments["download"])


def _cannot_download(function: object) -> bool:
    """Return whether ``function`` certainly has no parameter ``download``; faster than ``inspect.signature``."""
    if not isinstance(function, types.FunctionType) or vars(function):  # ``functools.wraps`` leaves attributes
        return False
    return "download" not in function.__code__.co_varnames


def _subclasses(cls: type) -> Iterator[type]:
    sub: type
    for sub in cls.__subclasses__():
        yield sub
        yield from _subclasses(sub)
