"""``pickled_scorer``: a ``RowScorer`` as bytes that processes without lagom and without the user's modules can read."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from lagom import accelerators
from lagom.errors import PayloadError
from lagom.extensions.data.column_types import lists, types
from lagom.extensions.scoring import executor_scoring, input_columns, output_columns, row_scorer
from lagom.extensions.scoring.row_scorer import RowScorer
from lagom.program.sources import own_root
from lagom.program.unpicklable import find_unpicklable

MODULES = (executor_scoring, row_scorer, input_columns, output_columns, lists, types, accelerators)
"""lagom's modules that travel by value."""


@contextlib.contextmanager
def pickling_by_value(cloudpickle: Any) -> Iterator[None]:
    """Have ``cloudpickle`` pickle what scores rows, and functions and classes of the user's modules, by value."""
    users = [module for name, module in list(sys.modules.items()) if "." not in name and own_root(name) is not None]
    registered = [
        module for module in (*MODULES, *users) if module.__name__ not in cloudpickle.list_registry_pickle_by_value()
    ]
    with contextlib.ExitStack() as stack:
        for module in registered:
            cloudpickle.register_pickle_by_value(module)
            stack.callback(cloudpickle.unregister_pickle_by_value, module)
        yield


def pickled_scorer(scorer: RowScorer, cloudpickle: Any) -> bytes:
    """Return ``scorer`` as bytes.

    Raises:
        PayloadError: if the model or a function cannot be pickled; the text names the part.
    """
    with pickling_by_value(cloudpickle):
        try:
            pickled: bytes = cloudpickle.dumps(scorer)
        except Exception as error:

            def can_pickle(value: object) -> bool:
                with contextlib.suppress(Exception):
                    return bool(cloudpickle.dumps(value))
                return False

            parts = {name: getattr(scorer, name) for name in ("model", "transform", "postprocess")}
            what = find_unpicklable(parts, can_pickle) or "the model"
            raise PayloadError(f"{what} cannot be sent: {type(error).__name__}: {error}") from error
    return pickled
