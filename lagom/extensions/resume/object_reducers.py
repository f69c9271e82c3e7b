"""``reduce_object``: how objects of torch, tqdm, TensorBoard and Python are pickled that do not pickle as they are."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import io
import logging
import os
import pickle
import stat
import weakref
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.data.dataloader import _BaseDataLoaderIter

from lagom.extensions.observe.tracking.tensorboard import reduce_event_writer
from lagom.extensions.resume.passes.loader_positions import reduce_iterator
from lagom.extensions.resume.progress_bars import reduce_bar
from lagom.extensions.resume.state_pickle import standard_streams


def reduce_object(value: Any) -> Any:
    """Return how to pickle ``value``, as ``__reduce_ex__`` does; NotImplemented to leave that to the pickler.

    Raises:
        PicklingError: if another process could not go on with ``value``, such as a loader's iterator.
    """
    if isinstance(value, _BaseDataLoaderIter):
        return reduce_iterator(value)
    if isinstance(value, torch.Generator):
        return _generator, (str(value.device), value.get_state())
    if isinstance(value, Optimizer):
        return _made, (type(value),), _optimizer_state(value), None, None, _set_optimizer
    if isinstance(value, TreeSpec):
        return _spec_of, (tree_unflatten([0] * value.num_leaves, value),)
    if isinstance(value, io.IOBase):
        return _reduce_file(value)
    if isinstance(value, logging.Handler):
        state = {name: one for name, one in vars(value).items() if name not in ("lock", "stream")}
        return _handler, (type(value), state, getattr(value, "stream", None))
    reduced = reduce_bar(value)
    return reduce_event_writer(value) if reduced is NotImplemented else reduced


def _spec_of(example: Any) -> TreeSpec:
    return tree_flatten(example)[1]  # torch warns when it makes one from a pickle


def _generator(device: str, state: torch.Tensor) -> torch.Generator:
    found = torch.Generator(device)
    found.set_state(state)
    return found


def _made(kind: Any) -> Any:
    return kind.__new__(kind)


def _optimizer_state(optimizer: Optimizer) -> tuple[dict[str, Any], bool]:
    """Return all attributes, with hooks, and whether a scheduler counts steps; torch's ``__getstate__`` has neither."""
    state = dict(vars(optimizer))
    counts = getattr(state.get("step"), "_wrapped_by_lr_sched", False)
    if counts:
        del state["step"]
    return state, counts


def _set_optimizer(optimizer: Optimizer, found: tuple[dict[str, Any], bool]) -> None:
    state, counts = found
    vars(optimizer).update(state)
    optimizer._patch_step_function()
    if counts:
        vars(optimizer)["step"] = _counting(type(optimizer).step, weakref.ref(optimizer))


def _counting(step: Any, optimizer: weakref.ref[Optimizer]) -> Any:
    """Wrap the method ``step`` as torch's schedulers do: the wrapper sets ``_opt_called`` of the optimizer."""

    @functools.wraps(step)
    def counted(*args: Any, **kwargs: Any) -> Any:
        found: Any = optimizer()
        found._opt_called = True
        return step.__get__(found, type(found))(*args, **kwargs)

    counted._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return counted


def _handler(kind: type[logging.Handler], state: dict[str, Any], stream: Any) -> logging.Handler:
    found = kind.__new__(kind)
    vars(found).update(state)
    found.createLock()
    if stream is not None:
        vars(found)["stream"] = stream
    return found


def _reduce_file(file: Any) -> Any:
    stream = standard_streams(file)
    if stream is not NotImplemented:
        return stream
    if file.closed:
        return _closed, ()
    if isinstance(file, (io.BytesIO, io.StringIO)):
        return NotImplemented
    name = file.name
    if not isinstance(name, str) or not isinstance(file, (io.TextIOWrapper, io.BufferedWriter, io.BufferedReader)):
        return NotImplemented
    path = os.path.abspath(name)
    encoding = (file.encoding, file.errors) if isinstance(file, io.TextIOWrapper) else (None, None)
    kind = "b" if encoding[0] is None else ""
    if file.writable():
        if file.readable() or not _grows(file.fileno(), path):
            raise pickle.PicklingError(f"{name} is open and is changed before its end, or is not at {path} any more")
        return _appending, (path, f"a{kind}", *encoding)
    return _reading, (path, f"r{kind}", *encoding, file.tell())


def _grows(fd: int, path: str) -> bool:
    """Return whether the next write to ``fd`` goes to the end of the file at ``path``; a device has no end."""
    here = os.fstat(fd)
    with contextlib.suppress(OSError):
        is_there = os.path.samestat(here, os.stat(path))
        if not is_there or not stat.S_ISREG(here.st_mode) or fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_APPEND:
            return is_there
        return os.lseek(fd, 0, os.SEEK_CUR) == here.st_size
    return False


def _closed() -> Any:
    file = io.StringIO()
    file.close()
    return file


def _appending(path: str, mode: str, encoding: str | None, errors: str | None) -> Any:
    return open(path, mode, encoding=encoding, errors=errors)


def _reading(path: str, mode: str, encoding: str | None, errors: str | None, position: int) -> Any:
    file = open(path, mode, encoding=encoding, errors=errors)  # noqa: SIM115
    file.seek(position)
    return file
