"""``lagom.extensions.compat.petastorm``: petastorm 0.12.1 as it is, beside the pyarrow and numpy of today."""

from __future__ import annotations

import decimal
import importlib
import inspect
import io
import os
import pickle
import subprocess
import sys
from collections import defaultdict
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from pyspark.sql import types as t

import lagom
import lagom.extensions.compat.petastorm
from lagom import experiment
from lagom.config import TorchDistributedConfig
from lagom.extensions.compat.compatible import compatible
from lagom.extensions.compat.petastorm import travel
from lagom.session.session import Session
from lagom.world import Place, place_set
from tests.extensions.data.tables import numbers
from tests.extensions.data.write_rows import image, schema, write
from tests.ranks import alone, run_ranks

# What petastorm makes tensors of; torch says so once in a process.
pytestmark = pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")


def rows(reader: Any) -> list[int]:
    with reader:
        return sorted(int(row.id) for row in reader)


def saved(cells: list[Any]) -> Any:
    """Cells as NdarrayCodec writes them."""
    found: list[Any] = []
    for cell in cells:
        file = io.BytesIO()
        if cell is not None:
            np.save(file, cell)
        found.append(None if cell is None else file.getvalue())
    return pa.array(found)


def test_readers_of_all_kinds_read_what_petastorm_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", "")  # opencv, where it is installed, sets it and leaves it
    from petastorm import make_reader
    from petastorm.predicates import in_lambda

    url = write(tmp_path / "table", [[3, 4], [5]]).as_uri()
    for pool in ("thread", "dummy"):
        with make_reader(url, reader_pool_type=pool, workers_count=2) as reader:
            found = {int(row.id): row.image for row in reader}
        assert sorted(found) == list(range(12))
        assert all(np.array_equal(cells, image(number)) for number, cells in found.items())
    assert rows(make_reader(url, predicate=in_lambda(["id"], lambda one: one % 2 == 0))) == [0, 2, 4, 6, 8, 10]
    shards = [rows(make_reader(url, cur_shard=shard, shard_count=3)) for shard in range(3)]
    assert sorted(number for shard in shards for number in shard) == list(range(12))
    assert all(shards)


def test_folders_stand_for_columns_and_filters_choose_them(tmp_path: Path) -> None:
    from petastorm import make_batch_reader

    for day in (1, 2):
        folder = tmp_path / "table" / f"day={day}"
        folder.mkdir(parents=True)
        pq.write_table(pa.table({"id": [day * 10, day * 10 + 1]}), folder / "part-0.parquet")
    (tmp_path / "table" / "_SUCCESS").touch()
    url = (tmp_path / "table").as_uri()
    with make_batch_reader(url) as reader:
        found = [pair for batch in reader for pair in zip(batch.day, batch.id, strict=True)]
    assert sorted(found) == [(1, 10), (1, 11), (2, 20), (2, 21)]
    with make_batch_reader(url, filters=[("day", "=", 2)]) as reader:
        assert sorted(number for batch in reader for number in batch.id) == [20, 21]
    with pytest.raises(ValueError, match="'id' is none of the partitions"):
        make_batch_reader(url, filters=[("id", "=", 20)])


def test_loaders_of_petastorm_give_tensors(tmp_path: Path) -> None:
    from petastorm import TransformSpec, make_batch_reader, make_reader
    from petastorm.pytorch import BatchedDataLoader, DataLoader

    url = write(tmp_path / "table", [[3, 4], [5]]).as_uri()
    with DataLoader(make_reader(url), 5) as loader:
        batches = list(loader)
    assert [tuple(batch["image"].shape) for batch in batches] == [(5, 2, 3), (5, 2, 3), (2, 2, 3)]
    plain = numbers(tmp_path / "plain", [[3, 4], [5]]).as_uri()
    spec = TransformSpec(lambda frame: frame.assign(row=frame["row"] * 2), removed_fields=["x", "y"])
    with BatchedDataLoader(make_batch_reader(plain, transform_spec=spec), 12) as loader:
        (found,) = loader
    assert list(found) == ["row"]
    assert sorted(found["row"].tolist()) == list(range(0, 24, 2))


def test_nobody_else_sees_another_pyarrow_or_numpy() -> None:
    importlib.import_module("petastorm")
    assert pq.ParquetDataset.__module__ == "pyarrow.parquet.core"
    assert not any(hasattr(pa, name) for name in ("localfs", "filesystem", "hdfs", "LocalFileSystem"))
    assert not hasattr(pq, "ParquetDatasetPiece")
    assert not hasattr(np, "unicode_")
    for name in ("pyarrow.filesystem", "pyarrow.hdfs"):
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(name)


@pytest.mark.parametrize("make", ["make_reader", "make_batch_reader"])
def test_every_rank_reads_all_rows_where_it_has_whole_batches(make: str, tmp_path: Path) -> None:
    url = write(tmp_path / "table", [[9, 2], [5], [3, 1]]).as_uri()

    def train(train_set: Any) -> Any:
        import petastorm

        torch.manual_seed(0)
        model = torch.nn.Linear(1, 1).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
        ids = []
        with getattr(petastorm, make)(train_set, reader_pool_type="dummy", shuffle_row_groups=False) as reader:
            for row in reader:
                ids.append(torch.as_tensor(row.id).tolist())
                optimizer.zero_grad()
                model(torch.as_tensor(row.id).double().view(-1, 1)).square().mean().backward()
                optimizer.step()
        return ids, model.weight.item()

    def on(world_size: int) -> Any:
        config = TorchDistributedConfig(train_set=url, world_size=world_size, launcher="local")
        return experiment.lagom(train, config).per_rank

    assert on(2) == on(1) * 2


def test_a_program_of_petastorms_reads_its_shard_on_each_rank(tmp_path: Path) -> None:
    url = write(tmp_path / "table", [[9, 2], [5], [3, 1]]).as_uri()

    def train(module: Any, hparams: Any, train_set: Any) -> Any:
        from petastorm import make_reader  # which has lagom mend it, here as in a plain call
        from petastorm.pytorch import DataLoader

        model = module(6, 1).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=hparams["lr"])
        seen: list[list[int]] = []
        for _ in range(3):
            seen.append([])
            with DataLoader(make_reader(train_set, workers_count=2), batch_size=2) as loader:
                for batch in loader:
                    seen[-1] += batch["id"].tolist()
                    optimizer.zero_grad()
                    model(batch["image"].flatten(1)).square().mean().backward()
                    optimizer.step()
        return {"seen": seen, "weight": model.weight.sum().item()}

    config = TorchDistributedConfig(
        module=torch.nn.Linear, hparams={"lr": 0.1}, train_set=url, world_size=2, launcher="local", batches="split"
    )
    first, second = experiment.lagom(train, config).per_rank
    assert first["weight"] == second["weight"]
    for ours, theirs in zip(first["seen"], second["seen"], strict=True):
        # A rank that is at its end gets its last batch again, cut to a row that counts nowhere.
        assert set(ours) | set(theirs) == set(range(20))
        assert not set(ours) & set(theirs)


@pytest.mark.parametrize(
    "world_size", [pytest.param(1, marks=pytest.mark.soak), pytest.param(2, marks=pytest.mark.soak), 3]
)
def test_batches_of_all_shards_make_one(tmp_path: Path, world_size: int) -> None:
    from petastorm import make_batch_reader, make_reader
    from petastorm.pytorch import BatchedDataLoader, DataLoader, InMemBatchedDataLoader

    url = write(tmp_path / "table", [[9, 2], [5], [3, 1]]).as_uri()
    plain = numbers(tmp_path / "plain", [[9, 2], [5], [3, 1]]).as_uri()

    def run(session: Session) -> Any:
        place = Place(session.rank, session.world_size, session.rank, session.world_size, divides_batches=True)
        with place_set(place):
            model = torch.nn.Linear(6, 1).double()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            options: Any = {"reader_pool_type": "dummy", "shuffle_row_groups": False}
            for batch in InMemBatchedDataLoader(make_batch_reader(plain, **options), 99, num_epochs=2):
                optimizer.zero_grad()
                model(torch.outer(batch["x"], torch.arange(6.0).double())).square().mean().backward()
                optimizer.step()
            for _ in range(3):  # one step each: the order of shards does not show
                with DataLoader(make_reader(url, **options), batch_size=99) as loader:
                    for batch in loader:
                        optimizer.zero_grad()
                        model(batch["image"].flatten(1)).square().mean().backward()
                        optimizer.step()
            with BatchedDataLoader(make_batch_reader(plain, **options), 99) as loader:
                ids = [number for batch in loader for number in batch["row"].tolist()]
        return [p.detach() for p in model.parameters()], ids

    weights, everything = alone(run)
    found = run_ranks(world_size, run)
    for theirs, _ in found:
        torch.testing.assert_close(theirs, weights, rtol=0, atol=0 if world_size == 1 else 1e-12)
    assert sorted(number for _, ids in found for number in ids) == sorted(everything) == list(range(20))


def test_ranks_with_other_numbers_of_batches_in_memory_take_the_same_steps(tmp_path: Path) -> None:
    from petastorm import make_batch_reader
    from petastorm.pytorch import InMemBatchedDataLoader

    plain = numbers(tmp_path / "plain", [[9], [5], [3]]).as_uri()

    def run(session: Session) -> tuple[float, list[int]]:
        with place_set(Place(session.rank, session.world_size, session.rank, session.world_size, divides_batches=True)):
            model = torch.nn.Linear(1, 1).double()
            ids: list[int] = []
            for batch in InMemBatchedDataLoader(make_batch_reader(plain, reader_pool_type="dummy"), 2):
                model(batch["x"][:, None]).square().mean().backward()
                ids += batch["row"].tolist()
            assert model.weight.grad is not None
            return model.weight.grad.item(), ids

    (first, ours), (second, theirs) = run_ranks(2, run)
    assert first == second
    assert set(ours) | set(theirs) == set(range(17))


@pytest.mark.soak
def test_in_a_run_it_is_there_when_asked_for_and_nothing_stays() -> None:
    before = list(sys.meta_path)
    with compatible():
        assert len(sys.meta_path) == len(before) + 1
    assert sys.meta_path == before
    code = """
import sys
from lagom.extensions.compat.compatible import compatible
with compatible():
    assert "lagom.extensions.compat.petastorm" not in sys.modules
    import petastorm
    print(petastorm.__version__)
import petastorm.pytorch
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.returncode) == ("0.12.1", 0), done.stderr


@pytest.mark.soak
def test_processes_without_lagom_import_it_too(tmp_path: Path) -> None:
    url = write(tmp_path / "table", [[3, 4]]).as_uri()
    code = f"""
import sys
sys.modules["lagom"] = None
import petastorm.unischema
assert "site-packages" in petastorm.__file__
with petastorm.make_reader({url!r}, reader_pool_type="process", workers_count=1) as reader:
    print(sorted(int(row.id) for row in reader))
"""
    env = os.environ | {"PYTHONPATH": travel.archive()}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=env, check=False
    )
    assert done.stdout.strip() == str(list(range(7))), done.stderr


@pytest.mark.parametrize(("version", "told"), [("0.13.1", "petastorm 0.13.1 loses rows"), ("0.9.8", "lagom knows")])
def test_other_petastorms_are_refused_by_name(tmp_path: Path, version: str, told: str) -> None:
    (tmp_path / "petastorm").mkdir()
    (tmp_path / "petastorm" / "__init__.py").write_text("print('has run')")
    info = tmp_path / f"petastorm-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: petastorm\nVersion: {version}\n")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import lagom.extensions.compat.petastorm; import petastorm"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == ""
    assert f"ImportError: petastorm {'is ' if 'knows' in told else ''}{version}" in done.stderr
    assert told in done.stderr
    assert "pip install petastorm==0.12.1" in done.stderr


@pytest.mark.parametrize(
    "pickled",
    [
        b"cos\nsystem\n(S'touch harmed'\ntR.",
        b"cbuiltins\neval\n(S'1'\ntR.",
        b"c__builtin__\ngetattr\n(S'1'\nS'real'\ntR.",
        b"cnumpy\nload\n(S'1'\ntR.",
        b"cpyspark.cloudpickle\nloads\n(S'1'\ntR.",
        b"cpetastorm.etl.legacy\nrestricted_loads\n(S'1'\ntR.",
        b"cpetastorm.unischema\ndict_to_spark_row\n(S'1'\ntR.",
        b"cpetastorm.unischema\nos.system\n(S'1'\ntR.",
    ],
)
def test_a_pickle_of_a_data_set_runs_nothing(pickled: bytes) -> None:
    from petastorm.etl.legacy import depickle_legacy_package_name_compatible as loads

    with pytest.raises(pickle.UnpicklingError, match="no part of a schema"):
        loads(pickled)


def test_schemas_and_indexes_are_unpickled(tmp_path: Path) -> None:
    from petastorm.etl.legacy import depickle_legacy_package_name_compatible as loads
    from petastorm.etl.rowgroup_indexers import SingleFieldIndexer

    found = loads(pickle.dumps(schema()))
    assert list(found.fields) == ["id", "image"]
    assert type(found.fields["image"].codec).__name__ == "NdarrayCodec"
    index = SingleFieldIndexer("by_id", "id")
    index.build_index([{"id": np.int64(3)}], 7)
    back = loads(pickle.dumps({"by_id": index}))
    assert back["by_id"].get_row_group_indexes(3) == {7}
    old = b"cnumpy\nunicode_\n."
    assert loads(old) is np.str_
    assert loads(pickle.dumps(defaultdict(set))) == {}


COLUMNS: dict[str, tuple[Any, Any, Any]] = {
    "f32": (np.float32, t.FloatType(), pa.array([1.5, None, 2.5], pa.float32())),
    "f64": (np.float64, t.DoubleType(), pa.array([1.5, None, 2.5])),
    "i8": (np.int8, t.ByteType(), pa.array([1, None, 2], pa.int8())),
    "i32": (np.int32, t.IntegerType(), pa.array([1, None, 2], pa.int32())),
    "u16": (np.uint16, t.IntegerType(), pa.array([1, 65535, 2], pa.int32())),
    "u32": (np.uint32, t.LongType(), pa.array([1, None, 2])),
    "bool": (np.bool_, t.BooleanType(), pa.array([True, None, False])),
    "stamp": (np.datetime64, t.TimestampType(), pa.array([1, 2, 1109302200000001], pa.timestamp("us"))),
    "utc": (np.datetime64, t.TimestampType(), pa.array([1, 2, 1109302200000001], pa.timestamp("us", tz="UTC"))),
    "nanos": (np.datetime64, t.TimestampType(), pa.array([1, 2000, 1109302200000001], pa.timestamp("ns"))),
    "day": (np.datetime64, t.DateType(), pa.array([1, None, 17898], pa.date32())),
    "price": (
        decimal.Decimal,
        t.DecimalType(10, 2),
        pa.array([Decimal("1.10"), None, Decimal(3)], pa.decimal128(10, 2)),
    ),
    "text": (np.str_, t.StringType(), pa.array(["a", None, "c"])),
    "bytes": (np.bytes_, t.BinaryType(), pa.array([b"a\0", None, b"c"])),
    "texts": (np.str_, None, saved([np.array(["a", "bc"]), np.array(["d"]), np.array([], "U1")])),
    "raw": (np.bytes_, None, saved([np.array([b"a", b"bc"]), np.array([b"d"]), np.array([], "S1")])),
    "wide": (np.uint32, None, saved([np.array([1, 2**32 - 1], np.uint32), None, np.array([7], np.uint32)])),
}
"""For each field: numpy's type, Spark's type, or None for arrays, and what the file has."""


@pytest.mark.filterwarnings("ignore:no explicit representation of timezones")
@pytest.mark.parametrize("name", COLUMNS)
def test_a_transform_of_rows_gets_what_petastorm_gives_it(tmp_path: Path, name: str) -> None:
    from petastorm import TransformSpec, make_reader
    from petastorm.codecs import NdarrayCodec, ScalarCodec
    from petastorm.unischema import Unischema, UnischemaField

    kind, stored, column = COLUMNS[name]
    codec, shape = (NdarrayCodec(), (None,)) if stored is None else (ScalarCodec(stored), ())
    fields = [
        UnischemaField("id", np.int64, (), ScalarCodec(t.LongType()), False),
        UnischemaField(name, kind, shape, codec, True),
    ]
    table = pa.table({"id": [0, 1, 2], name: column})
    pq.write_table(table, tmp_path / "part-0.parquet")
    told = {"unischema": pickle.dumps(Unischema("Rows", fields)), "num_row_groups_per_file": b'{"part-0.parquet": 1}'}
    metadata = {f"dataset-toolkit.{key}.v1": value for key, value in told.items()}
    pq.write_metadata(table.schema.with_metadata(metadata), tmp_path / "_common_metadata")
    got: list[Any] = []

    def look(row: dict[str, Any]) -> dict[str, Any]:
        got.append((type(row[name]), getattr(row[name], "dtype", None), repr(row[name])))
        return {"id": row["id"]}

    spec = TransformSpec(look, selected_fields=["id"])
    with make_reader(tmp_path.as_uri(), transform_spec=spec, reader_pool_type="dummy") as reader:
        assert len(list(reader)) == 3
    wanted, got = got, []
    (found,) = lagom.PetastormDataLoader(tmp_path, 3, spec, shuffle=False)
    assert got == wanted
    assert found["id"].tolist() == [0, 1, 2]


LISTS = {
    "ints": pa.array([[1, 2], None, [3]], pa.list_(pa.int32())),
    "words": pa.array([["x"], None, ["y", "z"]]),
    "holes": pa.array([[1, None], [2], [3]], pa.list_(pa.int64())),
}
FRAMES = {name: column for name, (_, stored, column) in COLUMNS.items() if stored is not None} | LISTS


@pytest.mark.parametrize("name", FRAMES)
def test_a_transform_of_frames_gets_what_petastorm_gives_it(tmp_path: Path, name: str) -> None:
    from petastorm import TransformSpec, make_batch_reader

    pq.write_table(pa.table({"id": [0, 1, 2], name: FRAMES[name]}), tmp_path / "part-0.parquet")
    got: list[Any] = []

    def look(frame: Any) -> Any:
        got.append((frame[name].dtype, [(type(one), repr(one)) for one in frame[name]]))
        return frame[["id"]]

    spec = TransformSpec(look, selected_fields=["id"])
    with make_batch_reader(tmp_path.as_uri(), transform_spec=spec, reader_pool_type="dummy") as reader:
        list(reader)
    wanted, got = got, []
    (found,) = lagom.PetastormDataLoader(tmp_path, 3, spec, shuffle=False)
    assert got == wanted
    assert found["id"].tolist() == [0, 1, 2]


def test_each_option_of_petastorm_is_served_or_refused_with_what_to_do(tmp_path: Path) -> None:
    from petastorm import make_batch_reader, make_reader, pytorch

    url = write(tmp_path / "table", [[30, 40]]).as_uri()
    kinds = (pytorch.DataLoader, pytorch.BatchedDataLoader, pytorch.InMemBatchedDataLoader)
    options = {name for made in (make_reader, make_batch_reader, *kinds) for name in inspect.signature(made).parameters}
    served = options & set(inspect.signature(lagom.PetastormDataLoader).parameters) | {"collate_fn"}
    assert {"schema_fields", "transform_spec", "filters", "seed", "shuffle_rows", "batch_size"} <= served
    for name in sorted(options - served):
        with pytest.raises(ValueError, match=rf"{name} is an option of petastorm's readers; \S+ .*"):
            lagom.PetastormDataLoader(url, 7, **{name: None})  # type: ignore[arg-type]
    loader = lagom.PetastormDataLoader(url, 7, shuffle_row_groups=False, shuffle_rows=True, seed=1)
    assert next(iter(loader))["id"].tolist() != list(range(7))
    loader.dataset.close()  # type: ignore[attr-defined]


def test_a_reader_in_place_of_a_path_is_an_error_that_names_it(tmp_path: Path) -> None:
    from petastorm import make_reader

    url = write(tmp_path / "table", [[3, 4]]).as_uri()
    with make_reader(url, reader_pool_type="dummy") as reader:
        with pytest.raises(ValueError, match="the data set is a Reader of petastorm; pass the path or URL"):
            lagom.PetastormDataLoader(reader, 7)
        assert len(list(reader)) == 7


def test_a_process_without_petastorm_says_so_in_a_line(tmp_path: Path) -> None:
    env = os.environ | {"PYTHONPATH": travel.archive()}
    command = [sys.executable, "-S", "-c", "import petastorm"]  # without site-packages
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env, check=False)
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"ModuleNotFoundError: {sys.executable} has no petastorm, and Spark's Python workers")
    assert "pip install petastorm==0.12.1 there, or set PYSPARK_PYTHON" in last


@pytest.mark.soak  # ``test_a_process_without_petastorm_says_so_in_a_line`` is without Spark
def test_workers_without_petastorm_are_an_error_before_anything_is_written(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    code = f"""
import lagom.extensions.compat.petastorm
from petastorm.etl.dataset_metadata import materialize_dataset
from pyspark.sql import SparkSession
from tests.extensions.data.write_rows import schema
spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
with materialize_dataset(spark, {(tmp_path / "table").as_uri()!r}, schema()):
    print("has begun")
"""
    env = os.environ | {"PYSPARK_PYTHON": str(python)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)
    assert done.stdout == ""
    assert f"ModuleNotFoundError: {sys.executable} has no petastorm" in done.stderr.splitlines()[-1]


def test_what_petastorm_wrote_lagom_reads(tmp_path: Path) -> None:
    folder = write(tmp_path / "table", [[3, 4], [5]])
    loader = lagom.PetastormDataLoader(str(folder), 12)
    (found,) = loader
    assert sorted(found["id"].tolist()) == list(range(12))
    assert all(np.array_equal(found["image"][row].numpy(), image(n)) for row, n in enumerate(found["id"].tolist()))
    dataset: Any = loader.dataset
    dataset.close()
