"""Functions that Spark's Python workers run: outputs of a model for batches of columns, or for whole batches of rows.

See Note [Scoring by value] in row_scorer.py.
"""

from __future__ import annotations

import os
import pickle
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

_KEPT = "lagom_scorers_of_this_process"
_MOST_KEPT = 2


def column_scoring(payload: Any, digest: str, names: Sequence[str]) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Return a function of an iterator of Arrow arrays, or of tuples of them, that yields the outputs as one array.

    Args:
        payload: the pickled ``RowScorer``: Spark's broadcast, its bytes, or the name of one of Spark's files.
        digest: names the payload.
        names: names of the columns in the tuples.
    """

    def run(batches: Iterator[Any]) -> Iterator[Any]:
        import pyarrow as pa

        scorer, where, first = _scorer(payload, digest), _place(), 0
        for columns in batches:
            given = columns if isinstance(columns, tuple) else (columns,)
            batch = pa.RecordBatch.from_arrays(list(given), names=list(names))
            outputs = scorer.score(batch, first, where)
            first += len(batch)
            yield outputs[0] if len(outputs) == 1 else pa.StructArray.from_arrays(outputs, scorer.schema.names)

    return run


def batch_scoring(payload: Any, digest: str, names: Sequence[str]) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Return a function of an iterator of record batches that yields them with the outputs; see ``column_scoring``."""

    def run(batches: Iterator[Any]) -> Iterator[Any]:
        import pyarrow as pa

        scorer, where, first = _scorer(payload, digest), _place(), 0
        for batch in batches:
            outputs = scorer.score(batch.select(list(names)), first, where)
            first += len(batch)
            yield pa.RecordBatch.from_arrays(
                [*batch.columns, *outputs], names=[*batch.schema.names, *scorer.schema.names]
            )

    return run


def _scorer(payload: Any, digest: str) -> Any:
    """Return the scorer of ``payload``, which a worker process loads once for all of its tasks."""
    kept = vars(sys.modules.setdefault(_KEPT, types.ModuleType(_KEPT))).setdefault("scorers", {})
    if digest not in kept:
        while len(kept) >= _MOST_KEPT:
            del kept[next(iter(kept))]
        scorer = pickle.loads(_content(payload))
        scorer.device = scorer.device or _device_of_task(scorer.find_accelerator())
        kept[digest] = scorer
    return kept[digest]


def _content(payload: Any) -> bytes:
    if isinstance(payload, str):
        from pyspark import SparkFiles

        with open(os.path.join(SparkFiles.getRootDirectory(), payload), "rb") as file:
            return file.read()
    return payload if isinstance(payload, bytes) else payload.value


def _place() -> str:
    from pyspark import TaskContext

    context = TaskContext.get()
    return "" if context is None else f"partition {context.partitionId()}"


def _device_of_task(kind: Any) -> str | None:
    """Return the accelerator of a kind that Spark has given the task, else one by the partition's number; or None."""
    import torch
    from pyspark import TaskContext

    context = TaskContext.get()
    if context is None or kind is None:
        return None
    count = int(torch.get_device_module(kind).device_count())
    gpus = context.resources().get("gpu")
    address = gpus.addresses[0] if gpus is not None and gpus.addresses else ""
    number = int(address) if address.isdigit() and int(address) < count else context.partitionId() % max(1, count)
    return f"{kind.type}:{0 if gpus is not None and not address.isdigit() else number}"
