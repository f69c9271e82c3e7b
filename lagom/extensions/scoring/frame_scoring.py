"""``score_frame``: applies a model to a Spark DataFrame, as a column of an Arrow UDF. See Note [Columns, not rows]."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lagom.extensions.data.sources.files import locate
from lagom.extensions.scoring import executor_scoring
from lagom.extensions.scoring.by_value import MODULES, pickled_scorer
from lagom.extensions.scoring.output_columns import spark_type
from lagom.extensions.scoring.row_scorer import RowScorer
from lagom.launch import active_session
from lagom.spark.spark import task_by_value
from lagom.spark.spark_master import start_session
from lagom.spark.spark_session import session_facts

SAMPLE_ROWS = 2
_ARTIFACT_BYTES = 1 << 20
_STRUCT = "__lagom_outputs"


def score_frame(make: Callable[..., RowScorer], frame: Any) -> Any:
    """Return the DataFrame with a column for each output of the model; Spark computes them when it needs them.

    Args:
        make: returns the scorer for a table, as ``Predictor.scorer``.
    """
    from pyspark.sql import functions

    def sample(names: Sequence[str], present: Sequence[str], is_needed: bool) -> Any:
        some = frame.select(*map(_column, names))
        if present and is_needed:
            some = some.dropna(subset=list(map(_quoted, present)))
        return _collected(some.limit(SAMPLE_ROWS if is_needed else 0))

    scorer = make(frame.columns, sample, "the first rows")
    names = list(dict.fromkeys([*scorer.columns, *scorer.key]))
    facts = session_facts(frame.sparkSession)
    payload, digest = _sent(scorer, frame.sparkSession, can_broadcast=facts.broadcasts)
    with facts.python_of_tasks():
        if not hasattr(functions, "arrow_udf"):
            return _by_batches(frame, scorer, payload, digest, names)
        fields = ", ".join(f"{_quoted(each.name)}: {spark_type(each.type)}" for each in scorer.schema)
        is_one = len(scorer.schema) == 1
        function = task_by_value(executor_scoring.column_scoring, MODULES)(payload, digest, names)
        kind = spark_type(scorer.schema[0].type) if is_one else f"struct<{fields}>"
        udf: Any = vars(functions)["arrow_udf"](_annotated(function, len(names)), kind)
        outputs = udf.asNondeterministic()(*map(_column, names))
    if is_one:
        return frame.select("*", outputs.alias(scorer.schema.names[0]))
    return frame.select("*", outputs.alias(_STRUCT)).select("*", f"{_STRUCT}.*").drop(_STRUCT)


def score_path(make: Callable[..., RowScorer], path: str, to: str | os.PathLike[str] | None) -> Any:
    """Return the rows of Parquet files, or of a table, as a DataFrame with the outputs; with ``to``, write them.

    Raises:
        DataError: if the driver cannot see that the files are current: a folder of Delta has rows that are deleted.
    """
    session = active_session() or start_session()
    table = locate([path]).table
    table_format = "parquet" if table is None else table.format
    scored = score_frame(make, session.read.format(table_format).load(path))
    if to is None:
        return scored
    scored.write.parquet(os.fspath(to))
    return os.fspath(to)


def _annotated(function: Any, num_columns: int) -> Any:
    """Return ``function`` with the annotations by which Spark knows a function of an iterator of Arrow arrays."""
    import typing

    import pyarrow as pa

    given = pa.Array if num_columns == 1 else tuple[pa.Array, ...]
    function.__annotations__ = {"batches": typing.Iterator[given], "return": typing.Iterator[pa.Array]}  # type: ignore[valid-type]
    return function


def _by_batches(frame: Any, scorer: RowScorer, payload: Any, digest: str, names: Sequence[str]) -> Any:
    from pyspark.sql.types import StructType

    fields = ", ".join(f"{_quoted(each.name)} {spark_type(each.type)}" for each in scorer.schema)
    added = frame.sparkSession.createDataFrame([], fields).schema
    function = task_by_value(executor_scoring.batch_scoring, MODULES)(payload, digest, names)
    return frame.mapInArrow(function, StructType([*frame.schema.fields, *added.fields]))


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def _column(name: str) -> Any:
    from pyspark.sql import functions

    return functions.col(_quoted(name))


def _collected(frame: Any) -> Any:
    import pyarrow as pa

    table = frame.toArrow() if hasattr(frame, "toArrow") else pa.Table.from_batches(frame._collect_as_arrow())
    return table.combine_chunks().to_batches()[0] if len(table) else pa.RecordBatch.from_pylist([], table.schema)


def _sent(scorer: RowScorer, session: Any, *, can_broadcast: bool) -> tuple[Any, str]:
    """Return what executors read the pickled scorer from, and its digest."""
    from pyspark import cloudpickle

    content = pickled_scorer(scorer, cloudpickle)
    digest = hashlib.blake2b(content, digest_size=16).hexdigest()
    if can_broadcast:
        return session.sparkContext.broadcast(content), digest
    if len(content) < _ARTIFACT_BYTES:
        return content, digest
    with tempfile.TemporaryDirectory(prefix="lagom-model-") as folder:
        path = Path(folder, f"lagom-model-{digest}")
        path.write_bytes(content)
        session.addArtifacts(str(path), file=True)
    return path.name, digest


# Note [Columns, not rows]
#
# mapInArrow would send all columns to Python and back, and Spark could neither leave out columns that nobody reads nor
# move a filter below it. A UDF gets the columns of the model alone, and the others stay in the JVM as they are, also
# those of types that Arrow does not have. Spark has UDFs over Arrow's arrays since 4.1; before it is mapInArrow.
#
# The UDF counts as not deterministic. Otherwise Spark computes it twice for each row where a filter reads the outputs.
