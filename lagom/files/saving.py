"""Files: saved whole, by C code where the rank's disk is, and downloads once per host."""

from __future__ import annotations

import email
import fcntl
import functools
import hashlib
import inspect
import os
import shutil
import socket
import stat
import sys
import urllib.request
from contextlib import ExitStack, contextmanager, suppress
from http.client import HTTPMessage
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Dataset

from lagom import files
from lagom.patching.import_hooks import on_import
from lagom.patching.replace import replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

    from lagom.session.session import Session

_MEET_S = 10.0
"""How long the first rank of a host may take to come to a download that another rank has come to."""
_DOWNLOAD_S = 24 * 3600.0
"""How long its downloading may take."""


@contextmanager
def shared_files(session: Session) -> Iterator[None]:
    """Have saves written whole, C code of torch find each rank's files, and downloads done once on each host."""
    downloads = _Downloads(session)
    with ExitStack() as stack:
        for owner in (torch, torch.serialization):
            stack.enter_context(replaced(owner, "save", _saving(torch.serialization.save)))
        stack.enter_context(replaced(torch.jit, "save", _at_place(torch.jit.save, 1, files.written)))
        for scripted in (torch.jit.ScriptModule, torch.jit.RecursiveScriptModule):  # one copies the other's methods
            for name in ("save", "_save_for_lite_interpreter"):
                stack.enter_context(replaced(scripted, name, _at_place(getattr(scripted, name), 1, files.written)))
        stack.enter_context(replaced(torch.jit, "load", _at_place(torch.jit.load, 0, files.found)))
        stack.enter_context(replaced(torch, "from_file", _mapping(torch.from_file)))
        mapping = staticmethod(_mapping(torch.UntypedStorage.from_file))
        stack.enter_context(replaced(torch.UntypedStorage, "from_file", mapping))
        stack.enter_context(replaced(urllib.request, "urlretrieve", downloads.once(urllib.request.urlretrieve)))
        stack.enter_context(downloads.shared_datasets())
        stack.enter_context(on_import({"safetensors": lambda module: _place_safetensors(module, stack)}))
        yield


def _place_safetensors(safetensors: ModuleType, stack: ExitStack) -> None:
    """Say to its writer where to write: it renames a file by a call of the kernel that no function of libc makes."""
    write = _at_place(safetensors.serialize_file, 1, files.written, "filename")
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "safetensors" and hasattr(module, "serialize_file"):
            stack.enter_context(replaced(module, "serialize_file", write))


def _saving(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def save(obj: object, f: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(f, (str, os.PathLike)):
            original(obj, f, *args, **kwargs)
            return
        path = os.fspath(f)
        if files.writes_for_real():
            _write_whole(path, lambda target: original(obj, target, *args, **kwargs))
            return
        try:
            place = files.written(path)
        except OSError:
            place = files.found(path)  # for torch to fail at, in its own way
        try:
            original(obj, place, *args, **kwargs)
        except RuntimeError as error:
            error.args = tuple(_renamed(arg, os.path.dirname(place), os.path.dirname(path)) for arg in error.args)
            raise

    return save


def _renamed(text: object, place: str, path: str) -> object:
    return text.replace(place, path) if isinstance(text, str) and place else text


def _write_whole(given: str, write: Callable[[str], None]) -> None:
    path = os.path.realpath(given)
    if not os.path.isdir(os.path.dirname(path)) or (os.path.exists(path) and not os.path.isfile(path)):
        write(given)  # it cannot be, or is a device or a pipe, which cannot be replaced
        return
    # A folder, since the name of a file goes into it.
    folder = f"{path}.{os.getpid()}.partial"
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


def _at_place(
    original: Callable[..., Any], position: int, place: Callable[[str], str], name: str = "f"
) -> Callable[..., Any]:
    """``original`` with its argument ``name`` at ``position``, where that is a path, replaced by where to find it."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if len(args) > position and isinstance(args[position], (str, os.PathLike)):
            path = place(os.fspath(args[position]))
            return original(*args[:position], path, *args[position + 1 :], **kwargs)
        if isinstance(kwargs.get(name), (str, os.PathLike)):
            kwargs[name] = place(os.fspath(kwargs[name]))
        return original(*args, **kwargs)

    return call


def _mapping(original: Callable[..., Any]) -> Callable[..., Any]:
    """A ``from_file``, which maps a file into memory, to write to it when it is ``shared``."""

    @functools.wraps(original)
    def call(filename: Any, shared: bool | None = None, *args: Any, **kwargs: Any) -> Any:
        place = (files.written if shared else files.found)(os.fspath(filename))
        return original(place, shared, *args, **kwargs)

    return call


class _Downloads:
    """The first rank of a host downloads for all of them; the others find it there."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._host = hashlib.sha256(f"{socket.gethostname()}:{session.host_dir}".encode()).hexdigest()[:16]
        self._held = 0
        self._num = 0
        self._counts: dict[tuple[str, str], int] = {}
        self._wrapped = ExitStack()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """The first rank's comes first, and what it writes is for all; then the others', one after the other."""
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
            if first:  # also after a failure: nobody shall wait for what does not come
                self._say(key + "/done")

    def _say(self, key: str) -> None:
        if self._session.notes is not None:
            self._session.notes.set(key, "")

    def _wait_for(self, key: str) -> None:
        notes = self._session.notes
        if notes is None:
            return
        with suppress(RuntimeError, OSError):  # it does not come here, or is gone: this rank downloads for itself
            notes.wait(key, _MEET_S)
            notes.wait(key + "/done", _DOWNLOAD_S)

    def once(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """``urlretrieve`` to a named file, on the first rank of the host; the others get its result."""

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
        """Have data sets with a ``download`` parameter made in turn; also those whose classes come later."""
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
            return False  # the call itself will say so
        bound.apply_defaults()
        return bool(bound.arguments["download"])


def _subclasses(cls: type) -> Iterator[type]:
    sub: type
    for sub in cls.__subclasses__():
        yield sub
        yield from _subclasses(sub)
