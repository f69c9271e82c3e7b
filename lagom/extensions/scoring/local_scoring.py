"""Applies a model to tables in this process: Arrow's, pandas', and Parquet files row group by row group."""

from __future__ import annotations

import os
import posixpath
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from lagom.extensions.data.parquet.prefetch import Prefetcher
from lagom.extensions.data.parquet.table import Table, table
from lagom.extensions.data.sources.files import file_system_of
from lagom.extensions.scoring.output_columns import batch_of_pandas
from lagom.extensions.scoring.row_scorer import RowScorer

if TYPE_CHECKING:
    import pandas  # type: ignore[import-untyped]

    Make = Callable[..., RowScorer]
    """``Predictor.scorer``."""

_READ_ROWS = 1 << 16


def score_table(make: Make, data: Any) -> Any:
    """Return an Arrow table, or a record batch, with the outputs as further columns."""
    import pyarrow as pa

    rows = pa.Table.from_batches([data]) if isinstance(data, pa.RecordBatch) else data
    scorer = make(rows.schema.names, lambda names, present, is_needed: rows.select(list(names)))
    return _with_outputs(rows, scorer.schema, _scores(scorer, rows))


def score_pandas(make: Make, data: pandas.DataFrame) -> pandas.DataFrame:
    """Return a DataFrame of pandas with the outputs as further columns; NaN counts as a null in it."""
    read: list[Any] = []

    def sample(columns: Sequence[str], present: Sequence[str], is_needed: bool) -> Any:
        read.append(batch_of_pandas(data, columns))
        return read[0]

    scorer = make([str(name) for name in data.columns], sample)
    outputs = scorer.score_pandas(read[0], data.index)
    return data.assign(**{name: outputs[name] for name in outputs})


def score_path(make: Make, path: str, to: str | os.PathLike[str] | None) -> Any:
    """Return the rows of Parquet files, or a Delta table, with the outputs; see ``score_parquet``."""
    return score_parquet(make, table([path], None, None, None), to)


def score_parquet(make: Make, rows: Table, to: str | os.PathLike[str] | None) -> Any:
    """Return the rows of ``rows`` with the outputs, as an Arrow table; with ``to``, write them to this file instead.

    Raises:
        ValueError: if ``to`` exists.
    """
    import pyarrow as pa

    schema = pa.schema(list(rows.fields))

    def sample(names: Sequence[str], present: Sequence[str], is_needed: bool) -> Any:
        batches = (batch.select(list(names)) for batch in _batches(rows))
        first = batch = next(batches)
        while not _has_row(batch, present) and (following := next(batches, None)) is not None:
            batch = following
        return batch if _has_row(batch, present) else first

    scorer = make(schema.names, sample)
    whole = pa.schema([*schema, *scorer.schema])
    scored = _scored_batches(scorer, rows, whole)
    return pa.Table.from_batches(scored, whole) if to is None else _write(scored, whole, os.fspath(to))


def _scored_batches(scorer: RowScorer, rows: Table, schema: Any) -> Iterator[Any]:
    import pyarrow as pa

    first, ahead = 0, Prefetcher(_batches(rows))
    try:
        for batch in ahead:
            outputs = scorer.score(batch, first)
            first += len(batch)
            yield pa.RecordBatch.from_arrays([*batch.columns, *outputs], schema=schema)
    finally:
        ahead.close()


def _batches(rows: Table) -> Iterator[Any]:
    opened, file = None, -1
    for number, group in enumerate(rows.groups):
        if group.file != file:
            opened, file = rows.open(group.file).parquet, group.file
        yield from rows.batches(opened, number, _READ_ROWS, threads=True)


def _write(batches: Iterator[Any], schema: Any, to: str) -> str:
    """Write ``batches`` as one Parquet file, which has its name only when it is whole."""
    import pyarrow.parquet as pq
    from pyarrow import fs

    home, path = file_system_of(to)
    if home.get_file_info(path).type != fs.FileType.NotFound:
        raise ValueError(f"{to} exists already; remove it, or give another name as to=")
    if posixpath.dirname(path):
        home.create_dir(posixpath.dirname(path), recursive=True)
    part = f"{path}.{uuid.uuid4().hex[:8]}.part"
    try:
        with home.open_output_stream(part) as stream, pq.ParquetWriter(stream, schema) as writer:
            for batch in batches:
                writer.write_batch(batch)
        home.move(part, path)
    except BaseException:
        if home.get_file_info(part).type != fs.FileType.NotFound:
            home.delete_file(part)
        raise
    return to


def _scores(scorer: RowScorer, rows: Any) -> list[Any]:
    """Return the outputs for an Arrow table in memory, as chunked arrays.

    Raises:
        ScoringError: for nulls, with their number in the whole table, and for rows that cannot be scored.
    """
    import pyarrow as pa

    rows = rows.select(list(dict.fromkeys([*scorer.columns, *scorer.key])))
    scorer.check_nulls(rows)
    first, batches = 0, []
    for batch in rows.to_batches():
        batches.append(scorer.score(batch, first))
        first += len(batch)
    return [pa.chunked_array([arrays[n] for arrays in batches], each.type) for n, each in enumerate(scorer.schema)]


def _has_row(batch: Any, present: Sequence[str]) -> bool:
    """Return whether a row of ``batch`` has no null in the columns ``present``."""
    return len(batch) > 0 and (not present or len(batch.select(list(present)).drop_null()) > 0)


def _with_outputs(rows: Any, schema: Any, outputs: Sequence[Any]) -> Any:
    for each, column in zip(schema, outputs, strict=True):
        rows = rows.append_column(each, column)
    return rows
