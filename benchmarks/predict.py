"""Measures rows per second of scoring a Spark DataFrame: lagom, PySpark's predict_batch_udf, MLflow's spark_udf.

    python -m benchmarks.predict [--scale 0.1] [--only numbers] [--rounds 3] [--cores 2]

"numbers" is a small MLP over 2 million rows of 20 float columns, "pictures" a small CNN over 20,000 rows of a column of
3 x 32 x 32 floats. All contenders score the same Parquet files in one session of Spark local[2], and Spark adds up the
scores. They take turns in rounds, since the machine's speed can change within minutes; a round before does not count,
in which Python workers start and import torch. CPU seconds are those of Spark and its Python workers. Ratios compare
contenders of one round; the tables have medians of the rounds, and the least and the most.

predict_batch_udf gets the 20 columns in the way of its documentation, as one array, and in a faster one, as 20
arguments that the function puts side by side. MLflow has the model in its flavour for PyTorch, and in the one that
``Predictor.save_mlflow`` writes.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import nn

from lagom import Predictor

ROWS = {"numbers": 2_000_000, "pictures": 20_000}
BATCH = {"numbers": 4096, "pictures": 512}
"""Rows of a call of the model, for all contenders."""
NAMES = [f"c{number}" for number in range(20)]
SHAPE = (3, 32, 32)
FILES = 4
PEERS = ("predict_batch_udf", "predict_batch_udf, 20 arguments", "MLflow spark_udf")
OWN = "lagom"


class Cost(NamedTuple):
    """Seconds by the clock, and of the processors, of one pass over the table."""

    seconds: float
    cpu_s: float


def mlp() -> nn.Module:
    """Return the model for "numbers"."""
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))


def cnn() -> nn.Module:
    """Return the model for "pictures"."""
    convolutions = [nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2), nn.ReLU()]
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(16 * 7 * 7, 1))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print a table for each model; return 0 if no peer takes less CPU time than lagom, else 1."""
    args = _arguments(argv)
    held = True
    with tempfile.TemporaryDirectory() as scratch, _session(args.cores) as spark:
        for table in [args.only] if args.only else ROWS:
            num_rows = int(ROWS[table] * args.scale)
            _write(f"{scratch}/{table}", table, num_rows)
            frame = spark.read.parquet(f"{scratch}/{table}")
            contenders = _contenders(table, spark, frame, f"{scratch}/{table}-models")
            print(f"\n{table}: {num_rows} rows, {args.rounds} rounds")
            rounds = _rounds(contenders, args.rounds)
            for name in contenders:
                seconds, cpu_s = (median(values) for values in zip(*(one[name] for one in rounds), strict=True))
                print(f"  {name:34} {num_rows / seconds:12,.0f} rows/s {seconds:7.2f} s {cpu_s:7.2f} CPU s")
            held = _judged(rounds) and held
    return 0 if held else 1


def _rounds(contenders: dict[str, Callable[[], Any]], num_rounds: int) -> list[dict[str, Cost]]:
    """Return the costs of all contenders by round, without the first; check that their sums agree."""
    found = []
    for number in range(num_rounds + 1):
        costs, sums = {}, {}
        for name in _turned(list(contenders), number):
            began, cpu_s = time.perf_counter(), _cpu_s()
            sums[name] = contenders[name]().collect()[0][0]
            costs[name] = Cost(time.perf_counter() - began, _cpu_s() - cpu_s)
        np.testing.assert_allclose(list(sums.values()), sums[OWN], rtol=1e-4)
        found.append(costs)
    return found[1:]


def _turned(names: list[str], number: int) -> list[str]:
    return names[number % len(names) :] + names[: number % len(names)]


def _judged(rounds: Sequence[dict[str, Cost]]) -> bool:
    """Print how many times as fast as the faster peer lagom is; return whether it is not slower."""
    ratios = [min(one[name].seconds for name in PEERS if name in one) / one[OWN].seconds for one in rounds]
    cpu = [min(one[name].cpu_s for name in PEERS if name in one) / one[OWN].cpu_s for one in rounds]
    for what, some in (("as fast as the faster peer", ratios), ("less CPU time than the peer with the least", cpu)):
        print(f"  lagom: {median(some):.2f} ({min(some):.2f} to {max(some):.2f}) times {what}")
    holds = median(cpu) >= 1  # the clock depends on what else the machine does
    print(f"  no more CPU time than the peer with the least: {'holds' if holds else 'MISSED'}")
    return holds


def _contenders(table: str, spark: Any, frame: Any, models: str) -> dict[str, Callable[[], Any]]:
    """Return a function for each contender, which gives the DataFrame with the sum of all scores."""
    from pyspark.sql import functions

    torch.manual_seed(0)
    model = (mlp() if table == "numbers" else cnn()).eval()
    total = functions.sum
    predictor = (
        Predictor(model, inputs=NAMES, batch_size=BATCH[table])
        if table == "numbers"
        else Predictor(model, transform=_shaped, inputs=["x"], batch_size=BATCH[table])
    )
    columns = [functions.col(name) for name in frame.columns]
    array = functions.array(*columns) if table == "numbers" else functions.col("x")
    shape = [len(NAMES)] if table == "numbers" else list(SHAPE)
    batched = _batch_udf(model, BATCH[table], shape)
    saved = _mlflow_model(model, table, f"{models}/torch")
    predictor.save_mlflow(f"{models}/lagom", example=frame.limit(5))
    flavour, own = (_spark_udf(spark, path) for path in (saved, f"{models}/lagom"))
    scored = predictor.predict(frame)
    found: dict[str, Callable[[], Any]] = {
        OWN: lambda: scored.agg(total("prediction")),
        "predict_batch_udf": lambda: frame.agg(total(batched(array))),
        "MLflow spark_udf": lambda: frame.agg(total(flavour(functions.struct(*columns) if len(shape) == 1 else array))),
        "MLflow spark_udf, lagom's model": lambda: frame.agg(total(own(functions.struct(*columns)))),
    }
    if table == "numbers":
        each = _batch_udf(model, BATCH[table], None)
        found["predict_batch_udf, 20 arguments"] = lambda: frame.agg(total(each(*columns)))
    return found


def _shaped(batch: Any) -> Any:
    return batch["x"].view(-1, *SHAPE)


def _batch_udf(model: nn.Module, batch_size: int, shape: list[int] | None) -> Any:
    from pyspark.ml.functions import predict_batch_udf
    from pyspark.sql.types import FloatType

    def make() -> Callable[..., Any]:
        def predict(*inputs: Any) -> Any:
            x = inputs[0] if len(inputs) == 1 else np.stack(inputs, 1)
            with torch.inference_mode():
                return model(torch.from_numpy(np.ascontiguousarray(x, np.float32)))[:, 0].numpy()

        if shape is not None:
            return lambda x: predict(x)
        # PySpark counts the parameters of the function.
        names = ", ".join(NAMES)
        made: Callable[..., Any] = eval(f"lambda {names}: predict({names})", {"predict": predict})
        return made

    return predict_batch_udf(
        make, return_type=FloatType(), batch_size=batch_size, input_tensor_shapes=None if shape is None else [shape]
    )


def _mlflow_model(model: nn.Module, table: str, path: str) -> str:
    import mlflow.pytorch
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, Schema, TensorSpec

    inputs = (
        Schema([ColSpec("float", name) for name in NAMES])
        if table == "numbers"
        else Schema([TensorSpec(np.dtype(np.float32), (-1, *SHAPE))])
    )
    outputs = Schema([TensorSpec(np.dtype(np.float32), (-1, 1))])
    signature = ModelSignature(inputs, outputs)
    mlflow.pytorch.save_model(
        model, path, signature=signature, pip_requirements=["torch"], serialization_format="pickle"
    )
    return path


def _spark_udf(spark: Any, path: str) -> Any:
    import mlflow.pyfunc

    return mlflow.pyfunc.spark_udf(spark, path, result_type="float", env_manager="local")


def _write(folder: str, table: str, num_rows: int) -> None:
    Path(folder).mkdir()
    random = np.random.default_rng(0)
    for part in range(FILES):
        count = num_rows // FILES
        if table == "numbers":
            columns: dict[str, Any] = {name: random.standard_normal(count).astype(np.float32) for name in NAMES}
        else:
            width = int(np.prod(SHAPE))
            values = pa.array(random.standard_normal(count * width).astype(np.float32))
            columns = {"x": pa.ListArray.from_arrays(pa.array(np.arange(count + 1, dtype=np.int32) * width), values)}
        pq.write_table(pa.table(columns), f"{folder}/part-{part}.parquet", row_group_size=max(1, count // 4))


def _cpu_s() -> float:
    """Return the CPU seconds of all descendants of this process: Spark, and its Python workers."""
    ticks, parents = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        parents[int(path.parent.name)] = int(fields[1])
        ticks[int(path.parent.name)] = sum(map(int, fields[11:15]))
    found = {os.getpid()}
    while new := {child for child, parent in parents.items() if parent in found} - found:
        found |= new
    return sum(ticks[one] for one in found - {os.getpid()}) / os.sysconf("SC_CLK_TCK")


def _session(cores: int) -> Any:
    from pyspark.sql import SparkSession

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.master(f"local[{cores}]").config("spark.ui.enabled", "false")
    for key, value in (("spark.log.level", "ERROR"), ("spark.driver.memory", "2g")):
        builder = builder.config(key, value)
    return builder.getOrCreate()


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=1.0, help="of the tables")
    parser.add_argument("--rounds", type=int, default=3, help="in which all contenders run in turn")
    parser.add_argument("--only", choices=list(ROWS))
    parser.add_argument("--cores", type=int, default=2, help="of Spark")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
