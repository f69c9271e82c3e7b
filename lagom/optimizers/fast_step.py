"""``skip_profiler_ranges``: lets optimizers and loaders skip their profiler ranges while no profiler runs."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import profiler
from torch.autograd.profiler import record_function

from lagom.patching.replace import replaced

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def skip_profiler_ranges() -> Iterator[None]:
    """Skip torch's profiler ranges in ``step``, ``zero_grad`` and a loader's ``next`` while no profiler runs.

    A range takes about 10 us even without a profiler; the step of a small model takes only ten times as long.
    """
    with replaced(profiler, "record_function", _ProfiledRange):
        yield


class _ProfiledRange(record_function):
    """Replaces torch's ``record_function``; does nothing while no profiler runs, or while torch.compile traces."""

    def __init__(self, name: str, args: str | None = None) -> None:
        # Without torch's own ``__init__``, which torch.compile refuses to trace.
        self.name = name
        self.args = args
        self.run_callbacks_on_exit = True
        self.record = None
        self._cupti_monitor_external_id = None  # attribute in torch 2.13
        self._cuspy_external_id = None  # attribute in torch 2.15

    def __enter__(self) -> Any:
        if torch.compiler.is_compiling() or not torch.autograd._profiler_enabled():
            return self
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        if self.record is not None:
            super().__exit__(*error)
            self.record = None
