"""``lagom.compat.petastorm``: petastorm 0.12.1 as it is, beside the pyarrow and numpy of today."""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import lagom
import lagom.compat.petastorm
from lagom import experiment
from lagom.compat.petastorm import travel
from lagom.config import TorchDistributedConfig
from lagom.session.session import Session
from lagom.worker.compatible import compatible
from lagom.world import Place, place_set
from tests.data.tables import numbers
from tests.data.write_rows import image, schema, write
from tests.ranks import alone, run_ranks

# What petastorm makes tensors of; torch says so once in a process.
pytestmark = pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")


def rows(reader: Any) -> list[int]:
    with reader:
        return sorted(int(row.id) for row in reader)


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
        place = Place(session.rank, session.world_size, session.rank, session.world_size)
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
        with place_set(Place(session.rank, session.world_size, session.rank, session.world_size)):
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
from lagom.worker.compatible import compatible
with compatible():
    assert "lagom.compat.petastorm" not in sys.modules
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
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import lagom.compat.petastorm; import petastorm"
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


def test_what_petastorm_wrote_lagom_reads(tmp_path: Path) -> None:
    folder = write(tmp_path / "table", [[3, 4], [5]])
    loader = lagom.PetastormDataLoader(str(folder), 12)
    (found,) = loader
    assert sorted(found["id"].tolist()) == list(range(12))
    assert all(np.array_equal(found["image"][row].numpy(), image(n)) for row, n in enumerate(found["id"].tolist()))
    dataset: Any = loader.dataset
    dataset.close()
