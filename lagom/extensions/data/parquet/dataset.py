"""``ParquetDataset``: a data set of torch over a folder of Parquet files."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterable
from dataclasses import replace
from numbers import Integral
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from torch.utils.data import Dataset

from lagom.extensions.data.column_types.petastorm_codecs import cells_for_function, codec
from lagom.extensions.data.column_types.tensor_columns import ColumnEntry, check_policies, column_entries, policy
from lagom.extensions.data.column_types.values import RowSpan, filled, joined
from lagom.extensions.data.parquet import table
from lagom.extensions.data.parquet.batches import TableBatchSampler
from lagom.extensions.data.parquet.reader import TableReader
from lagom.extensions.data.parquet.rows import Row, Rows
from lagom.extensions.data.parquet.shard import DEFAULT_STREAMS, Epoch, Positions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

_WINDOW_BYTES = 256 << 20
"""Default of ``window_bytes``."""
_generation = 0
"""Number of forks between the first process and this one; reading it is cheaper than asking for the process id."""


def _forked() -> None:
    global _generation
    _generation += 1


os.register_at_fork(after_in_child=_forked)


def _check(source: Any, columns: Any, window_bytes: int, streams: int) -> None:
    for name, number in (("window_bytes", window_bytes), ("streams", streams)):
        if isinstance(number, bool) or not isinstance(number, Integral):
            raise ValueError(f"{name} is {number!r}; it is a whole number")
    if isinstance(columns, str):
        raise ValueError(f"columns is {columns!r}; say [{columns!r}], a list of names")
    if source is None or isinstance(source, bytes):
        raise ValueError(f"the data set is {source!r}; it is a path, a URL or a list of these")
    if window_bytes < 1 or streams < 1:
        raise ValueError(f"window_bytes is {window_bytes} and streams {streams}; both are at least 1")


class Origin(NamedTuple):
    """The sources of a data set, as the user gave them."""

    sources: list[str]
    filters: Any
    filesystem: Any


class ParquetDataset(Dataset[Any]):
    """Rows of Parquet files, in the order of the sources, and within a folder of the files' names.

    ``DataLoader(dataset, batch_size=64)`` yields dicts of tensors by column, made without a loop over rows. To train on
    a table that does not fit into ``window_bytes``, use ``ParquetLoader(dataset, 64, shuffle=True)``, which reads each
    row group once. ``DataLoader(dataset, shuffle=True)`` would decode row groups again and again for single rows.

    Args:
        source: a folder or file, or a list of these: paths, or URLs that pyarrow or fsspec know (s3:, gs:, hdfs:, ...).
            Or another ``ParquetDataset``, whose files are read; its columns, filters, ``window_bytes`` and ``streams``
            hold unless others are given.
        columns: names of columns, in the wanted order, or a function that chooses from all names; None: all.
        filters: rows to keep, in pyarrow's notation: ``[("x", ">", 0), ...]`` for "and", a list of such lists for "or".
            Row groups that cannot contain such rows are not read.
        nulls: how to treat nulls: "error", a number to replace them, "nan", "" (texts), "mask" (adds an entry
            ``NAME__valid``), or a dict of these by column.
        ragged: how to treat lists of different lengths: "error", "pad" (with zeros, to the longest of a batch), "list"
            (a list of tensors), or a dict of these by column.
        window_bytes: memory of each process for the rows that are shuffled together and for the open pages of one row
            group per stream, or for rows that stay in memory when they are read by index; 256 MB if not given. More
            shuffles better.
        streams: number of places of the table from which a shuffled batch takes rows; 8 if not given. If batches are
            split over ranks whose number divides ``streams``, only one rank reads a row group, as a rule; docs/data.md
            says more.
        filesystem: pyarrow's or fsspec's file system; then ``source`` is a path in it.

    Raises:
        DataError: if there is nothing to read, or files cannot be read or do not fit together.
        LagomError: if pyarrow is not installed, or for a Delta table deltalake.
        ValueError: for a wrong setting, such as a column that does not exist or whose type cannot become a tensor.
    """

    origin: Origin
    _keeps_types = False
    """Whether values keep the types that they have in the file, for the function of a transform."""

    def __init__(
        self,
        source: str | Path | Sequence[str | Path] | ParquetDataset,
        *,
        columns: table.Columns | None = None,
        filters: Any = None,
        nulls: Any = "error",
        ragged: Any = "error",
        window_bytes: int | None = None,
        streams: int | None = None,
        filesystem: Any = None,
    ) -> None:
        window_bytes = getattr(source, "window_bytes", _WINDOW_BYTES) if window_bytes is None else window_bytes
        streams = getattr(source, "streams", DEFAULT_STREAMS) if streams is None else streams
        _check(source, columns, window_bytes, streams)
        self.origin = _origin(source, filters, filesystem)
        if columns is None and isinstance(source, ParquetDataset):
            columns = source.columns
        self.nulls = nulls
        self.ragged = ragged
        self.window_bytes = window_bytes
        self.streams = streams
        self.table = table.table(self.origin.sources, columns, self.origin.filters, self.origin.filesystem)
        names = [field.name for field in self.table.fields]
        check_policies(nulls, ragged, names)
        fields = self.table.schema or {}
        self._entries: list[tuple[str, list[ColumnEntry]]] = []
        for field in self.table.fields:
            name = field.name
            chosen = policy(ragged, name)
            decoder = codec(fields[name], chosen, is_own=self._keeps_types) if name in fields else None
            cells = cells_for_function(fields.get(name)) if self._keeps_types else None
            self._entries.append((name, column_entries(field, policy(nulls, name), chosen, decoder, cells)))
        self._num_rows = sum(self.table.counts)
        self.constants: dict[str, Any] = dict(source.constants) if isinstance(source, ParquetDataset) else {}
        """Columns that have one value in all rows, whatever the files have."""
        self.transform: Callable[[Rows], Any] | None = None
        """Function that is applied to the rows of each batch before a loader collates them."""
        self._reader: tuple[int, TableReader] | None = None
        self._generation = _generation

    @property
    def lagom_resizes(self) -> bool:
        """Whether the transform may change the number of rows of a batch; then ranks exchange their numbers of rows."""
        return bool(getattr(self.transform, "resizes", False))

    @property
    def columns(self) -> list[str]:
        """Names of the columns."""
        return [name for name, _ in self._entries]

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, index: int) -> Any:
        """Return the row at ``index``: values by column, or the transform's result for it."""
        row = self.__getitems__([index])[0]
        return row.dict() if isinstance(row, Row) else row

    def __getitems__(self, index: Positions | Sequence[int]) -> Any:
        """Return the transformed rows at ``index``: numbers of rows, or positions in an epoch of ``batches()``.

        Raises:
            DataError: if a file has changed or cannot be read, or a row cannot be a tensor.
            IndexError: if the table has no such row.
        """
        spans = self._spans(index)
        rows = Rows([filled(span, self.constants) for span in spans] if self.constants else spans)
        return rows if self.transform is None else self.transform(rows)

    def _spans(self, index: Positions | Sequence[int]) -> list[RowSpan]:
        if isinstance(index, Positions):
            return self._reading().rows(index.epoch, index.places)
        picked = np.array(index, np.int64)
        picked[picked < 0] += self._num_rows
        if len(picked) and not 0 <= picked.min() <= picked.max() < self._num_rows:
            raise IndexError(f"a row of {index} is not in a table of {self._num_rows}")
        places = None if self._fits else _steps(picked)
        if places is None:
            return self._reading().pick(picked)
        # Equal steps come from a sequential sampler, or from a rank's share of its batches: read ahead.
        window = max(1, min(self.window_bytes, 8 << 20) // self.table.row_bytes)
        found = self._reading().rows(Epoch(-1, 0, 0, None, 1, window), places)
        # A copy: the program may change its batch in place, and then read the same rows of the block again.
        return [RowSpan(joined([span.cut() for span in found]), 0, len(places), 1)]

    def batches(
        self, batch_size: int, *, shuffle: bool = False, seed: int | None = None, drop_last: bool = False
    ) -> TableBatchSampler:
        """Return a batch sampler, for ``DataLoader(dataset, batch_sampler=dataset.batches(64, shuffle=True))``.

        Args:
            batch_size: rows of a batch.
            shuffle: whether each epoch has another order.
            seed: seed of the orders; None: drawn from torch's global generator at the first epoch.
            drop_last: whether to leave out a last batch that is shorter.
        """
        return TableBatchSampler(
            self.table,
            batch_size,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            window_bytes=self.window_bytes,
            streams=self.streams,
        )

    def close(self) -> None:
        """End the threads that read ahead."""
        if self._reader is not None and self._reader[0] == _generation:
            self._reader[1].close()
        self._reader = None

    @property
    def _fits(self) -> bool:
        return self._num_rows * self.table.row_bytes <= self.window_bytes

    def _reading(self) -> TableReader:
        # A forked process has none of its parent's threads, so it needs a reader of its own.
        if self._reader is None or self._reader[0] != _generation:
            table = self.table
            if self._generation != _generation:
                # A forked process must not share its parent's connections to a store either.
                table = replace(table, home=pickle.loads(pickle.dumps(table.home)))
            self._reader = _generation, TableReader(table, self._entries, self.window_bytes)
        return self._reader[1]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_reader": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _generation=_generation)


def _origin(source: Any, filters: Any, filesystem: Any) -> Origin:
    if isinstance(source, ParquetDataset):
        sources, known, home = source.origin
        if filters is not None and known is not None:
            raise ValueError("filters are given, and the data set has some already; say all of them in one place")
        return Origin(sources, known if filters is None else filters, home if filesystem is None else filesystem)
    sources = [os.fspath(one) for one in _paths(source)]
    if not sources:
        raise ValueError("the list of files is empty")
    return Origin(sources, filters, filesystem)


def _paths(source: Any) -> list[Any]:
    if isinstance(source, (str, os.PathLike)):
        return [source]
    kind = type(source)
    if kind.__module__.partition(".")[0] == "petastorm":  # a reader, which would yield its rows here
        raise ValueError(
            f"the data set is a {kind.__name__} of petastorm; pass the path or URL that it reads: lagom reads the "
            "files itself, and takes most of a reader's options (schema_fields=, transform_spec=, filters=, ...)"
        )
    paths = list(source) if isinstance(source, Iterable) else [source]
    for path in paths:
        if not isinstance(path, (str, os.PathLike)):
            raise ValueError(f"the data set is {source!r:.80}; it is a path, a URL or a list of these")
    return paths


def _steps(index: NDArray[np.int64]) -> range | None:
    """Return ``index`` as a range, if it increases in equal steps of at most 4096; else None."""
    if len(index) < 2:
        return None
    step = int(index[1] - index[0])
    if step < 1 or step > 4096 or (np.diff(index) != step).any():
        return None
    return range(int(index[0]), int(index[-1]) + 1, step)
