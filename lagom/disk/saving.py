"""``patch_saves_and_downloads``: ``torch.save`` replaces whole files, and downloads run once for each host.

A rank with an overlay (see ``own_disk`` in install.py) writes to its place there, which ``path_to_write`` in
other_ranks.py finds; any other rank writes to the real disk. ``torch.save`` to an open file passes attempt_calls.py
(rank 0) or calls.py instead.
"""

from __future__ import annotations

import email
import fcntl
import functools
import hashlib
import inspect
import os
import secrets
import shutil
import socket
import stat
import sys
import types
import urllib.request
from contextlib import ExitStack, contextmanager, suppress
from http.client import HTTPMessage
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Dataset

from lagom import disk as files
from lagom.patching.importers import on_import
from lagom.patching.replace import replaced
from lagom.restart.written_files import partial_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

    from lagom.session.session import Session


@contextmanager
def patch_saves_and_downloads(session: Session) -> Iterator[None]:
    """Patch ``torch.save`` to replace a file only by a complete one, and downloads so that a host runs them once.

    The writer of safetensors is redirected to the rank's own disk.
    """
    downloads = Downloads(session)
    with ExitStack() as stack:
        for owner in (torch, torch.serialization):
            stack.enter_context(replaced(owner, "save", _saving(torch.serialization.save)))
        stack.enter_context(replaced(urllib.request, "urlretrieve", downloads.once(urllib.request.urlretrieve)))
        stack.enter_context(downloads.shared_datasets())
        stack.enter_context(on_import({"safetensors": lambda module: _place_safetensors(module, stack)}))
        yield


def _place_safetensors(safetensors: ModuleType, stack: ExitStack) -> None:
    """Redirect safetensors' writer to the rank's own disk.

    The writer renames a file by a system call of its own, so the replaced functions of libc do not see the rename.
    """
    original = safetensors.serialize_file

    @functools.wraps(original)
    def write(tensor_dict: Any, filename: Any, *args: Any, **kwargs: Any) -> Any:
        with _place_to_write(os.fspath(filename)) as place:
            return original(tensor_dict, place, *args, **kwargs)

    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "safetensors" and hasattr(module, "serialize_file"):
            stack.enter_context(replaced(module, "serialize_file", write))


def _saving(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def save(obj: object, f: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(f, (str, os.PathLike)):
            original(obj, f, *args, **kwargs)
            return
        write = _write_whole if files.writes_for_real() else _write_to_overlay
        write(os.fspath(f), lambda target: original(obj, target, *args, **kwargs))

    return save


def _write_to_overlay(path: str, write: Callable[[str], None]) -> None:
    """Write ``path`` on a rank with an overlay; if ``write`` fails, ``path`` stays as it was, as on the real disk."""
    with ExitStack() as stack:
        try:
            place = stack.enter_context(_place_to_write(path))
        except OSError:
            place = files.path_to_read(path)  # the path cannot be written: torch raises its own error for this place
        try:
            _write_whole(place, write)
        except RuntimeError as error:
            error.args = tuple(_renamed(arg, os.path.dirname(place), os.path.dirname(path)) for arg in error.args)
            raise


@contextmanager
def _place_to_write(path: str) -> Iterator[str]:
    """Yield the place where C code must write ``path``; if the block fails, remove a file that was new."""
    target = os.path.realpath(path)
    is_new = not os.path.exists(target)
    place = files.path_to_write(path)
    try:
        yield place
    except BaseException:
        with suppress(OSError):
            # A real file that is not empty stays: another process has written it meanwhile.
            if is_new and (place not in (path, target) or os.path.getsize(target) == 0):
                os.unlink(target)
        raise


def _renamed(text: object, place: str, path: str) -> object:
    return text.replace(place, path) if isinstance(text, str) and place else text


def _write_whole(given: str, write: Callable[[str], None]) -> None:
    path = os.path.realpath(given)
    if not os.path.isdir(os.path.dirname(path)) or (os.path.exists(path) and not os.path.isfile(path)):
        write(given)  # the folder does not exist, or a device or a pipe cannot be replaced
        return
    # The partial file is in a folder of its own and has the final name, since torch.save writes the name into the file.
    # The folder's name is new: a killed run with this pid may have left one, and another thread may save to this path.
    folder = partial_folder(os.path.join(os.path.dirname(path), secrets.token_hex(4)))
    partial = f"{folder}/{os.path.basename(path)}"
    try:
        os.mkdir(folder)
    except PermissionError:
        write(given)
        return
    try:
        write(partial)
        if os.path.exists(path):
            os.chmod(partial, stat.S_IMODE(os.stat(path).st_mode))
        os.replace(partial, path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


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
