"""``PetastormDataLoader``: loads batches of a data set that petastorm or Spark wrote, without petastorm."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from lagom.extensions.data.parquet.dataset import ParquetDataset
from lagom.extensions.data.parquet.parquet_loader import ParquetLoader
from lagom.extensions.data.parquet.transforms import Transform, collate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path


class TransformSpec:
    """A transform of rows, with petastorm's interface.

    Args:
        func: function of a row, which is a dict of numpy values by field; or, for plain Parquet, of a pandas DataFrame
            with the rows of a batch. It returns the same type.
        edit_fields: fields that ``func`` changes; not needed here.
        removed_fields: fields to remove after ``func``.
        selected_fields: fields to keep after ``func``, in this order.

    Raises:
        ValueError: if ``removed_fields`` and ``selected_fields`` are both given.
    """

    def __init__(
        self,
        func: Callable[[Any], Any] | None = None,
        edit_fields: Sequence[Any] | None = None,
        removed_fields: Sequence[str] | None = None,
        selected_fields: Sequence[str] | None = None,
    ) -> None:
        if removed_fields is not None and selected_fields is not None:
            raise ValueError("removed_fields and selected_fields are both given; say one of them")
        self.func = func
        self.edit_fields = list(edit_fields or [])
        self.removed_fields = list(removed_fields or [])
        self.selected_fields = selected_fields


_FILTERS = "use filters=[(column, operator, value)] here, or petastorm's own make_reader"
_EPOCHS = "here each `for` over the loader is an epoch"
_DIVIDED = "lagom itself divides the rows over the ranks"
_WORKERS = "num_workers=, of torch's DataLoader, is the number of processes that read"
_QUEUE = "rows are read ahead within window_bytes=; prefetch_factor=, of torch's DataLoader, is for its workers"
_MIXED = "shuffle=True mixes rows of streams= places within window_bytes="
_CACHE = "there is no cache: copy the data set to a local disk, or raise window_bytes= to keep a small table in memory"
_HOME = "pass ParquetDataset(path, filesystem=...), with a file system of pyarrow or fsspec, in place of the path"
_SENT = "nothing is pickled between reader and loader here; leave it out"
_INSTEAD = {
    "predicate": _FILTERS,
    "rowgroup_selector": _FILTERS,
    "num_epochs": _EPOCHS,
    "cur_shard": _DIVIDED,
    "shard_count": _DIVIDED,
    "shard_seed": f"{_DIVIDED}, and seed= gives their order",
    "workers_count": _WORKERS,
    "reader_pool_type": _WORKERS,
    "results_queue_size": _QUEUE,
    "shuffle_row_drop_partitions": _MIXED,
    **dict.fromkeys(
        ("cache_type", "cache_location", "cache_size_limit", "cache_row_size_estimate", "cache_extra_settings"), _CACHE
    ),
    "inmemory_cache_all": _CACHE,
    "rows_capacity": _CACHE,
    "hdfs_driver": _HOME,
    "storage_options": _HOME,
    "filesystem": _HOME,
    "pyarrow_serialize": _SENT,
    "zmq_copy_buffers": _SENT,
    "convert_early_to_numpy": "values are numpy's already when transform_spec's function gets them; leave it out",
    "transform_fn": "collate_fn= makes a batch of rows, and transform_spec= is a function of rows",
    "reader": "pass the path or URL of the data set instead",
    "dataset_url": "pass it as the first argument, dataset",
    "dataset_url_or_urls": "pass it as the first argument, dataset",
}
"""Options that are not taken, and what there is in their place."""


class PetastormDataLoader(ParquetLoader):
    """Loads batches of a Parquet data set: dicts of tensors by field, with lists for texts.

    Args:
        dataset: a path, a URL or a list of these, or a ``ParquetDataset`` (a DataFrame in the config becomes one). If
            petastorm wrote the data set, cells are decoded by its schema.
        batch_size: rows of a batch.
        transform_spec: a function or a ``TransformSpec``, also petastorm's own. The function gets the types that
            petastorm would give it, with None for nulls (NaN for floats), unless ``nulls`` is set, here or in the data
            set.
        schema_fields: the fields to read: names, regular expressions that match names, or petastorm's fields.
        shuffle: whether each epoch has another order; True by default, as petastorm shuffles by default.
        shuffle_row_groups: petastorm's option, like ``shuffle_rows``; see ``shuffling_queue_capacity``.
        shuffling_queue_capacity: petastorm's option; it matters only whether it is 0. If it is 0 and
            ``shuffle_row_groups`` and ``shuffle_rows`` are False, rows come in the order of the files, also with
            ``shuffle=True``.
        seed: as for ``ParquetLoader``, like ``drop_last``.
        filters: as for ``ParquetDataset``, like ``nulls``, ``ragged``, ``window_bytes`` and ``streams``. With a
            function, ``ragged`` is "list" if it is not set.
        options: further options of torch's ``DataLoader``; ``collate_fn`` gets the rows of a batch, each a mapping.

    Raises:
        Exception: as ``ParquetLoader`` and ``ParquetDataset``.
    """

    def __init__(
        self,
        dataset: str | Path | Sequence[str | Path] | ParquetDataset,
        batch_size: int = 1,
        transform_spec: Any = None,
        *,
        schema_fields: Sequence[Any] | None = None,
        shuffle: bool = True,
        shuffle_row_groups: bool = True,
        shuffle_rows: bool = False,
        shuffling_queue_capacity: int = 0,
        seed: int | None = None,
        drop_last: bool = False,
        filters: Any = None,
        nulls: Any = None,
        ragged: Any = None,
        window_bytes: int | None = None,
        streams: int | None = None,
        **options: Any,
    ) -> None:
        spec = transform_spec if hasattr(transform_spec, "func") else TransformSpec(transform_spec)
        if not callable(spec.func) and spec.func is not None:
            raise ValueError(f"transform_spec is {transform_spec!r}; it is a function or a TransformSpec")
        if "columns" in options:
            raise ValueError(f"columns is ParquetDataset's; here it is schema_fields={options['columns']!r}")
        for name in sorted(options.keys() & _INSTEAD.keys()):
            raise ValueError(f"{name} is an option of petastorm's readers; {_INSTEAD[name]}")
        transforms = spec.func is not None
        given = None
        if isinstance(dataset, ParquetDataset):
            nulls = dataset.nulls if nulls is None and dataset.nulls != "error" else nulls
            ragged = dataset.ragged if ragged is None and dataset.ragged != "error" else ragged
            given = dataset.columns
        patterns = None if schema_fields is None else _patterns(schema_fields)
        data = (_FunctionDataset if transforms else ParquetDataset)(
            dataset,
            columns=functools.partial(_columns, patterns, given, None if transforms else spec),
            filters=filters,
            nulls=nulls if nulls is not None else "mask" if transforms else "error",
            ragged=ragged if ragged is not None else "list" if transforms else "error",
            window_bytes=window_bytes,
            streams=streams,
        )
        if transforms:
            data.transform = Transform(spec, is_petastorm=data.table.schema is not None, nulls_are_none=nulls is None)
            options.setdefault("collate_fn", collate)
        mixed = shuffle and (shuffle_row_groups or shuffle_rows or shuffling_queue_capacity > 0)
        super().__init__(data, batch_size, mixed, seed=seed, drop_last=drop_last, **options)


def _patterns(fields: Any) -> list[str | re.Pattern[str]]:
    """Return the names, or patterns of names, of ``schema_fields``."""
    is_many = isinstance(fields, Iterable) and not isinstance(fields, (str, bytes)) and not hasattr(fields, "name")
    found: list[Any] = [getattr(field, "name", field) for field in fields] if is_many else [None]
    if not all(isinstance(one, (str, re.Pattern)) for one in found):
        raise ValueError(
            f"schema_fields is {fields!r}; it is a list of names, regular expressions or fields. Sequences of rows "
            "(NGram) are read by petastorm's own readers: see docs/data.md"
        )
    return found


class _FunctionDataset(ParquetDataset):
    """A data set for the function of a transform, which gets values in their own types."""

    _keeps_types = True


def _columns(
    patterns: Sequence[str | re.Pattern[str]] | None, given: list[str] | None, spec: Any, names: list[str]
) -> list[str]:
    """Return the columns to read: those that ``spec`` drops without a function are not read at all.

    Args:
        patterns: names and patterns of ``schema_fields``; None: the columns ``given``, or all.
        spec: a ``TransformSpec`` without a function; None if there is a function.
        names: all columns of the files.
    """
    found = _matching(patterns, names) if patterns is not None else names if given is None else given
    if spec is None:
        return found
    for name in spec.selected_fields or ():
        if name not in found:
            raise ValueError(f"selected_fields names {name!r}, and there are {found}")
    removed = set(spec.removed_fields or ())
    selected = spec.selected_fields
    return [name for name in found if name not in removed] if selected is None else list(selected)


def _matching(patterns: Sequence[str | re.Pattern[str]], names: list[str]) -> list[str]:
    for pattern in patterns:
        if not any(re.fullmatch(pattern, name) for name in names):
            raise ValueError(f"schema_fields names {pattern!r}, and there are {names}")
    return [name for name in names if any(re.fullmatch(pattern, name) for pattern in patterns)]
