"""``process_state``: settings of torch, of logging and of the process that a program may change while it runs."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from lagom.accelerators import current_accelerator
from lagom.patching.dynamo import set_deterministic

_CUDNN = ("enabled", "benchmark", "deterministic", "allow_tf32")


def process_state(before: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings; of threads, environment, signals and loggers only what differs from ``before``.

    Args:
        before: the ``first_settings`` of this process.
    """
    threads = torch.get_num_threads()
    return {
        "grad": torch.is_grad_enabled(),
        "dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "precision": torch.get_float32_matmul_precision(),
        "threads": threads if threads != before["threads"] else None,
        "cwd": _from(before["cwd"], os.getcwd()),
        "autocast": {kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _kinds()},
        "cudnn": {name: getattr(torch.backends.cudnn, name) for name in _CUDNN},
        "next_hook": RemovableHandle.next_id,
        "environ": {name: os.environ.get(name) for name in _changed(before["environ"], os.environ)},
        "argv": list(sys.argv),
        "signals": {number: one for number, one in _handlers().items() if one != before["signals"].get(number)},
        "loggers": {name: one for name, one in _logger_settings().items() if one != before["loggers"].get(name)},
    }


def _kinds() -> Sequence[str]:
    """Return the kinds of devices that autocast has settings for in this torch: the CPU, and its accelerator if any."""
    accelerator = current_accelerator()
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)


def set_process_state(state: Mapping[str, Any], before: Mapping[str, Any]) -> None:
    """Set the settings that ``process_state`` has returned; this process had the ``first_settings`` ``before``."""
    torch.set_grad_enabled(state["grad"])
    torch.set_default_dtype(state["dtype"])
    set_deterministic(state["deterministic"], state["warn_only"])
    torch.set_float32_matmul_precision(state["precision"])
    if state["threads"] is not None:
        torch.set_num_threads(state["threads"])
    os.chdir(os.path.join(before["cwd"], state["cwd"]))
    for kind in _kinds():  # a snapshot may come from a machine with another kind of accelerator
        if kind in state["autocast"]:
            is_enabled, dtype = state["autocast"][kind]
            torch.set_autocast_enabled(kind, is_enabled)
            torch.set_autocast_dtype(kind, dtype)
    for name, value in state["cudnn"].items():
        setattr(torch.backends.cudnn, name, value)
    RemovableHandle.next_id = max(RemovableHandle.next_id, state["next_hook"])  # a used id would replace its hook
    for name, value in state["environ"].items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    sys.argv[:] = state["argv"]
    for number, handler in state["signals"].items():
        signal.signal(number, handler)
    for name, (level, handlers, propagates, is_disabled) in state["loggers"].items():
        logger = logging.getLogger(name)
        logger.setLevel(level)
        logger.handlers[:] = handlers
        logger.propagate, logger.disabled = propagates, is_disabled


def first_settings() -> dict[str, Any]:
    """Return threads, working directory, loggers, environment and signal handlers as they are now.

    Called before the program runs: a snapshot keeps only what differs from these, since each rank has its own.
    """
    return {
        "threads": torch.get_num_threads(),
        "cwd": os.getcwd(),
        "loggers": _logger_settings(),
        "environ": dict(os.environ),
        "signals": _handlers(),
    }


def _from(first: str, now: str) -> str:
    """Return ``now``, relative to ``first`` if it is inside: on some hosts each attempt has another ``first``."""
    return os.path.relpath(now, first) if f"{now}/".startswith(f"{first}/") else now


def _handlers() -> dict[int, Any]:
    """Return the handlers of signals by number, without those that C code has set."""
    found = {number: signal.getsignal(number) for number in signal.valid_signals()}
    return {number: handler for number, handler in found.items() if handler is not None}


def _changed(before: Mapping[str, str], now: Mapping[str, str]) -> set[str]:
    return {name for name in {*before, *now} if before.get(name) != now.get(name)}


def _logger_settings() -> dict[str, Any]:
    """Return level, handlers and switches of all loggers but lagom's own, by name; "" is the root."""
    return {name: (one.level, list(one.handlers), one.propagate, one.disabled) for name, one in _loggers()}


def _loggers() -> Iterator[tuple[str, logging.Logger]]:
    yield "", logging.getLogger()
    for name, one in logging.Logger.manager.loggerDict.items():
        if isinstance(one, logging.Logger) and name.partition(".")[0] != "lagom":
            yield name, one
