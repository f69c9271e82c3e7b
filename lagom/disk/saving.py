"""``patch_saves_and_downloads``: ``torch.save`` replaces whole files, and downloads run once for each host.

A rank with an overlay (see ``own_disk`` in install.py) writes to its place there, which ``path_to_write`` in
other_ranks.py finds; any other rank writes to the real disk. ``torch.save`` to an open file passes attempt_calls.py
(rank 0) or calls.py instead.
"""

from __future__ import annotations

import functools
import os
import secrets
import shutil
import stat
import sys
import urllib.request
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch

from lagom import disk as files
from lagom.disk.downloads import Downloads
from lagom.patching.import_hooks import on_import
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
