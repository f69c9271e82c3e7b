"""Settings of the driver's process, as plain values, which ranks apply to their processes; reading imports no library.

- Python: the recursion limit, which a rank only raises.
- torch: default dtype, gradient mode, determinism, precisions, anomaly detection, cuDNN, print options.
- numpy: print options, and the handling of floating-point errors.
- logging: levels of loggers, and handlers that write to standard output or error.
- warnings: all filters except those that raise errors, since lagom's own code would raise them too.
- notebooks: the source of cells, for tracebacks and ``inspect.getsource``, and the name ``display``, which needs no
  import in a notebook.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib
import linecache
import logging
import os
import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

_MAX_SOURCES = 1 << 19  # most characters of cells
_CUDNN = ("enabled", "benchmark", "deterministic", "allow_tf32")
Settings = Mapping[str, Any]


def process_settings() -> dict[str, Any]:
    """Return the settings of this process."""
    found: dict[str, Any] = {"recursion": sys.getrecursionlimit(), "logging": _logging(), "warnings": list(_filters())}
    found["cells"] = _cells()
    found["display"] = hasattr(builtins, "display")
    if (torch := sys.modules.get("torch")) is not None:
        found["torch"] = _of_torch(torch)
    if (numpy := sys.modules.get("numpy")) is not None:
        found["numpy"] = {"print": numpy.get_printoptions(), "errors": numpy.geterr()}
    return found


def library_settings() -> dict[str, Any]:
    """Return ``process_settings`` without loggers and cells; the level of ``logging.disable`` is kept."""
    return process_settings() | {"logging": {"disabled": logging.root.manager.disable, "loggers": {}}, "cells": {}}


def set_process_settings(settings: Settings) -> None:
    """Apply ``settings``, which ``process_settings`` of another process returned; empty settings change nothing."""
    if not settings:
        return
    sys.setrecursionlimit(max(sys.getrecursionlimit(), settings["recursion"]))
    for name, text in settings["cells"].items():
        # Without a modification time, ``linecache`` does not look for a file.
        linecache.cache.setdefault(name, (len(text), None, text.splitlines(keepends=True), name))
    if settings["display"] and not hasattr(builtins, "display"):
        vars(builtins)["display"] = _display
    _set_logging(settings["logging"])
    if list(_filters()) != settings["warnings"]:
        _set_filters(settings["warnings"])
    if "torch" in settings:
        _set_torch(settings["torch"])
    if "numpy" in settings:
        import numpy

        with contextlib.suppress(TypeError):  # another version of numpy on the executors may lack an option
            numpy.set_printoptions(**settings["numpy"]["print"])
        numpy.seterr(**settings["numpy"]["errors"])


def _display(*objects: Any, **options: Any) -> Any:
    """Display ``objects`` by IPython; print them if this Python has no IPython."""
    try:
        from IPython.display import display
    except ImportError:
        return print(*objects, sep="\n")
    return display(*objects, **options)  # type: ignore[no-untyped-call]


def _of_torch(torch: Any) -> dict[str, Any]:
    printing = torch._tensor_str.PRINT_OPTS
    names = ("precision", "threshold", "edgeitems", "linewidth", "sci_mode")
    return {
        "dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "grad": torch.is_grad_enabled(),
        "deterministic": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        "precision": torch.get_float32_matmul_precision(),
        "anomalies": (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        "cudnn": {name: getattr(torch.backends.cudnn, name) for name in _CUDNN},
        "print": {name: getattr(printing, name) for name in names},
    }


def _set_torch(found: Settings) -> None:
    import torch

    from lagom.patching.dynamo import set_deterministic

    torch.set_default_dtype(getattr(torch, found["dtype"]))
    torch.set_grad_enabled(found["grad"])
    set_deterministic(*found["deterministic"])
    torch.set_float32_matmul_precision(found["precision"])
    anomalies, check_nan = found["anomalies"]
    torch.autograd.set_detect_anomaly(anomalies, check_nan=check_nan)
    for name, value in found["cudnn"].items():
        if getattr(torch.backends.cudnn, name) != value:
            setattr(torch.backends.cudnn, name, value)
    torch.set_printoptions(**found["print"])


def _logging() -> dict[str, Any]:
    """Return ``logging.disable``'s level, and level, propagation, disabling and handlers of each changed logger.

    Loggers are keyed by name, "" for the root; lagom's own are left out.
    """
    loggers = {"": logging.getLogger()} | {
        name: one for name, one in logging.Logger.manager.loggerDict.items() if isinstance(one, logging.Logger)
    }
    settings = {}
    for name, logger in loggers.items():
        handlers = [told for handler in logger.handlers if (told := _handler(handler)) is not None]
        told_of = (logger.level, logger.propagate, logger.disabled, handlers)
        if name.partition(".")[0] != "lagom" and told_of != (logging.NOTSET, True, False, []):
            settings[name] = told_of
    return {"disabled": logging.root.manager.disable, "loggers": settings}


def _handler(handler: logging.Handler) -> tuple[str, int, tuple[str, str | None, str] | None] | None:
    if type(handler) is not logging.StreamHandler:
        return None
    streams = {"stdout": (sys.stdout, sys.__stdout__), "stderr": (sys.stderr, sys.__stderr__)}
    stream = next((name for name, ours in streams.items() if any(handler.stream is one for one in ours)), None)
    if stream is None:
        return None
    layout = handler.formatter
    if layout is None or type(layout) is not logging.Formatter:
        return stream, handler.level, None
    kind: Any = type(layout._style)
    style = next((key for key, (one, _) in logging._STYLES.items() if one is kind), "%")
    return stream, handler.level, (str(layout._fmt), layout.datefmt, style)


def _set_logging(found: Settings) -> None:
    if logging.root.manager.disable != found["disabled"]:
        logging.disable(found["disabled"])
    for name, (level, propagate, disabled, handlers) in found["loggers"].items():
        logger = logging.getLogger(name)
        if logger.level != level:  # ``setLevel`` writes to all loggers: a forked process then copies their memory
            logger.setLevel(level)
        logger.propagate, logger.disabled = propagate, disabled
        # torch's loggers may have a handler already, for the stream object that had this descriptor before the fork.
        here = [one for one in logger.handlers if isinstance(one, logging.StreamHandler)]
        for stream, own_level, layout in handlers:
            target = getattr(sys, stream)
            handler = next((one for one in here if _file_of(one.stream) == _file_of(target)), None)
            if handler is None:
                handler = logging.StreamHandler(target)
                logger.addHandler(handler)
            else:
                here.remove(handler)
                handler.setStream(target)
            handler.setLevel(own_level)
            if layout is not None:
                handler.setFormatter(logging.Formatter(layout[0], layout[1], layout[2]))


def _file_of(stream: Any) -> Any:
    """Return the descriptor of the file that ``stream`` writes to, or ``stream`` itself if it has no file."""
    try:
        return stream.fileno()
    except (AttributeError, OSError, ValueError):
        return stream


def _filters() -> Iterator[tuple[str, str, str, str, str, int]]:
    for action, message, category, module, line in warnings.filters:
        texts = [one.pattern if isinstance(one, re.Pattern) else one or "" for one in (message, module)]
        if action != "error" and isinstance(category, type):
            yield action, texts[0], category.__module__, category.__qualname__, texts[1], line


def _set_filters(found: list[tuple[str, str, str, str, str, int]]) -> None:
    for action, message, home, name, module, line in reversed(found):
        try:
            category = getattr(importlib.import_module(home), name) if home in sys.modules else None
        except AttributeError:  # the class was defined in the notebook, or is missing in this version of its module
            category = None
        if isinstance(category, type) and issubclass(category, Warning):
            warnings.filterwarnings(action, message, category, module, line)  # type: ignore[arg-type]


def _cells() -> dict[str, str]:
    """Return sources without a file, keyed by their code objects' file name; the newest ones if there are too many."""
    cells: dict[str, str] = {}
    room = _MAX_SOURCES
    for name, entry in reversed(list(linecache.cache.items())):
        if len(entry) == 4 and not name.startswith("<frozen") and not os.path.exists(name):
            text = "".join(entry[2])
            room -= len(text)
            if room < 0:
                break
            cells[name] = text
    return cells
