"""``expression``: makes Arrow's expression of ``filters=``; ``counted`` counts the rows that pass it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lagom.extensions.data.column_types.common_types import is_read_as

if TYPE_CHECKING:
    from lagom.extensions.data.parquet.table import RowGroup, Table

_THREADS = 16
"""Number of threads that count; they mostly wait for the file system."""
_MOST = 1 << 16
"""Largest number of rows that are read at a time."""


def expression(filters: Any) -> tuple[Any, list[str]]:
    """Return ``filters`` (lists in pyarrow's notation) as an expression, and the columns that they use."""
    if filters is None:
        return None, []
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    if isinstance(filters, pc.Expression):
        raise ValueError("filters is an expression; say it as [(column, operator, value), ...], or lists of such lists")
    try:
        expression = pq.filters_to_expression(filters)
        terms = filters if isinstance(filters[0], (list,)) else [filters]
        names = [str(term[0]) for conjunction in terms for term in conjunction]
    except (TypeError, ValueError, IndexError) as error:
        raise ValueError(f"filters is {filters!r}; say it as [(column, operator, value), ...]: {error}") from error
    return expression, list(dict.fromkeys(names))


def counted(made: Table, used: list[str]) -> list[RowGroup]:
    """Return the row groups with rows that pass the filter, and the counts of such rows; reads the columns ``used``."""
    import pyarrow as pa

    fields = tuple(field for field in made.fields + made.also if field.name in used)
    asked = replace(made, fields=fields, also=())
    try:
        with ThreadPoolExecutor(_THREADS) as pool:
            parts = list(pool.map(lambda number: _counted_in(asked, number), range(len(made.files))))
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowKeyError) as error:
        raise ValueError(f"filters cannot be applied: {error}") from error
    return [group for part in parts for group in part if group.num_rows]


def _counted_in(asked: Table, number: int) -> list[RowGroup]:
    """Count the rows that pass the filter in file ``number``: by Arrow, which knows statistics, or by reading."""
    import pyarrow as pa
    import pyarrow.dataset as ds

    file = asked.files[number]
    form = ds.ParquetFileFormat(coerce_int96_timestamp_unit="us")
    fields = pa.schema(asked.partition_fields())
    partition = None
    for field in fields:
        value = file.value(field)
        here = ds.field(field.name) == value if value.is_valid else ds.field(field.name).is_null()
        partition = here if partition is None else partition & here
    row_groups = []
    for place, group in enumerate(asked.groups):
        if group.file != number:
            continue
        part = form.make_fragment(file.path, asked.home, partition_expression=partition, row_groups=[group.index])
        stored = part.physical_schema
        here = [field for field in asked.fields if field.name in stored.names]
        is_plain = asked.mapped is None and number not in asked.deleted
        if not is_plain or not all(is_read_as(stored.field(field.name).type, field.type) for field in here):
            read = asked.batches(asked.open(number).parquet, place, _MOST, threads=False)
            row_groups.append(replace(group, num_rows=sum(map(len, read))))
            continue
        names = (*stored.names, *fields.names)
        added = pa.schema([field for field in asked.fields if field.name not in names])
        schema = pa.unify_schemas([stored, fields, added])
        count = part.scanner(schema=schema, filter=asked.filter).count_rows()
        # If the partition alone answers the filter, Arrow counts the rows of the whole file.
        row_groups.append(replace(group, num_rows=min(count, group.num_rows)))
    return row_groups
