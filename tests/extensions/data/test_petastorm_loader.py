"""``lagom.PetastormDataLoader``: data sets that petastorm wrote, read without it, and what is no schema refused."""

from __future__ import annotations

import ast
import decimal
import io
import os
import pickle
import re
import shutil
import signal
import zlib
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from pyarrow.fs import LocalFileSystem

import lagom
from lagom.data import ParquetDataset, ParquetLoader, TransformSpec
from lagom.errors import DataError
from lagom.extensions.data.column_types import images, petastorm_codecs, tensor_columns, unischema
from lagom.extensions.data.column_types.unischema import UnischemaField, loads
from lagom.session.session import Session
from tests.extensions.data.tables import written
from tests.extensions.data.write_petastorm import row
from tests.ranks import alone, run_ranks

WRITTEN = Path(__file__).parent / "petastorm_0_12_1"
FieldOfPetastorm = namedtuple("FieldOfPetastorm", ["name", "numpy_dtype", "shape", "codec", "nullable"])
FIELD = FieldOfPetastorm("small", np.uint8, (), None, False)
NAMES = ["id", "small", "name", "price", "fixed", "ragged", "zipped", "maybe", "png", "grey", "jpeg", "day"]


@pytest.fixture(autouse=True)
def child_handler() -> Iterator[None]:
    """Takes back the handler that torch's first loader with workers sets for good."""
    before = signal.getsignal(signal.SIGCHLD)
    yield
    signal.signal(signal.SIGCHLD, before)


def close(loader: Any) -> None:
    loader.dataset.close()


@pytest.mark.parametrize("num_threads", [pytest.param(1, marks=pytest.mark.soak), 2])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_rows_are_what_petastorm_wrote(num_workers: int, num_threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate = ast.literal_eval

    def refuse_headers(text: Any) -> Any:
        assert "descr" not in str(text), "numpy reads headers so, which can fail in threads"
        return evaluate(text)

    monkeypatch.setattr(ast, "literal_eval", refuse_headers)
    seen = []

    def look(found: dict[str, Any]) -> dict[str, Any]:
        wanted = row(int(found["id"]))
        assert list(found) == NAMES
        for name, value in wanted.items():
            if value is None or isinstance(value, str):
                assert found[name] == value
            elif isinstance(value, decimal.Decimal):
                assert (type(found[name]), found[name]) == (decimal.Decimal, value)
            elif name == "jpeg":  # what is lossy has been lost
                assert np.abs(found[name].astype(int) - value).max() < 8
            else:
                assert np.array_equal(found[name], value)
        assert (found["small"].dtype, found["grey"].dtype) == (np.uint8, np.uint16)
        return {"id": found["id"]}

    torch.set_num_threads(num_threads)
    try:
        loader = lagom.PetastormDataLoader(WRITTEN, batch_size=3, transform_spec=look, num_workers=num_workers)
        assert len(loader) == 7
        seen += [[number for batch in loader for number in batch["id"].tolist()] for _ in range(2)]
        close(loader)
    finally:
        torch.set_num_threads(1)
    assert sorted(seen[0]) == sorted(seen[1]) == list(range(20))
    assert seen[0] != seen[1]


def test_without_a_transform_batches_are_tensors() -> None:
    names = ["id", "small", "fixed", "zipped", "png", "grey", "day"]
    loader = lagom.PetastormDataLoader(WRITTEN, 8, schema_fields=names, shuffle=False)
    first, *_ = loader
    assert first["id"].tolist() == list(range(8))
    assert {name: (part.dtype, part.shape) for name, part in first.items() if name != "day"} == {
        "id": (torch.int64, (8,)),
        "small": (torch.uint8, (8,)),
        "fixed": (torch.float32, (8, 2, 3)),
        "zipped": (torch.float64, (8, 3)),
        "png": (torch.uint8, (8, 4, 5, 3)),
        "grey": (torch.int32, (8, 4, 5)),
    }
    assert first["day"] == ["0"] * 8
    for number in range(8):
        assert np.array_equal(first["fixed"][number].numpy(), row(number)["fixed"])
        assert np.array_equal(first["png"][number].numpy(), row(number)["png"])
        assert np.array_equal(first["grey"][number].numpy(), row(number)["grey"])
    close(loader)
    assert list(ParquetDataset(WRITTEN, columns=["zipped"])[3]) == ["zipped"]
    (patterns,) = lagom.PetastormDataLoader(WRITTEN, 20, schema_fields=["i.", "fi.*"])
    assert list(patterns) == ["id", "fixed"]
    with pytest.raises(ValueError, match="schema_fields names 'x'"):
        lagom.PetastormDataLoader(WRITTEN, 8, schema_fields=["x"])
    (fields,) = lagom.PetastormDataLoader(WRITTEN, 20, schema_fields=[FIELD, re.compile("id")])
    assert sorted(fields) == ["id", "small"]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"predicate": print}, r"predicate is an option of petastorm's readers; use filters=\["),
        ({"num_epochs": 3}, "num_epochs is .* `for` over the loader"),
        ({"rowgroup_selector": None}, "rowgroup_selector is .* filters="),
        ({"cur_shard": 0, "shard_count": 2}, "cur_shard is .* lagom itself divides the rows"),
        ({"shard_count": 2}, "shard_count is .* lagom itself divides the rows"),
        ({"workers_count": 4}, "workers_count is .* num_workers="),
        ({"schema_fields": FIELD}, "schema_fields is FieldOfPetastorm.*; it is a list"),
        ({"schema_fields": b"id"}, "schema_fields is b'id'; it is a list"),
        ({"schema_fields": [object()]}, "it is a list of names"),
        ({"schema_fields": "id"}, "schema_fields is 'id'; it is a list"),
        ({"schema_fields": object()}, "Sequences of rows .NGram. are read by petastorm's own readers"),
    ],
)
def test_what_only_petastorms_readers_do_is_refused_with_what_to_do_instead(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        lagom.PetastormDataLoader(WRITTEN, 8, **options)


def test_nulls_and_shapes_that_differ_are_the_programs_choice() -> None:
    def batches(**options: Any) -> list[Any]:
        loader = lagom.PetastormDataLoader(WRITTEN, 4, shuffle=False, **options)
        try:
            return list(loader)
        finally:
            close(loader)

    with pytest.raises(DataError, match=r"day=0/part-0.parquet, row group 0, column 'maybe', row 3: a null"):
        batches(schema_fields=["maybe"])
    first = batches(schema_fields=["maybe"], nulls="mask")[0]
    assert first["maybe__valid"].tolist() == [True, True, True, False]
    assert first["maybe"][3].tolist() == [0, 0]
    assert np.array_equal(first["maybe"][1].numpy(), row(1)["maybe"])
    with pytest.raises(DataError, match=r"column 'ragged' has cells of the shapes \(1, 2\) and \(3, 2\)"):
        batches(schema_fields=["ragged"])
    listed = batches(schema_fields=["ragged"], ragged="list")[0]["ragged"]
    assert [part.tolist() for part in listed] == [row(number)["ragged"].tolist() for number in range(4)]
    padded = batches(schema_fields=["ragged"], ragged="pad")[0]["ragged"]
    assert padded.shape == (4, 3, 2)
    assert padded[0].tolist() == [*row(0)["ragged"].tolist(), [0, 0], [0, 0]]


@pytest.mark.parametrize(("nulls", "stands_in"), [(-1, -1.0), ("nan", float("nan")), ("mask", 0.0)])
def test_nulls_of_scalars_are_what_the_program_puts_there(nulls: Any, stands_in: float) -> None:
    codec = petastorm_codecs.codec(UnischemaField("a", np.dtype(np.float32), (), "ScalarCodec", True), "error")
    column = tensor_columns.ColumnEntry(("a",), pa.float32(), nulls, "error", codec)
    found = column.convert(pa.array([1.5, None, 2.5], pa.float32()), anywhere())
    assert torch.equal(found["a",].batch().nan_to_num(7), torch.tensor([1.5, stands_in, 2.5]).nan_to_num(7))


def test_nulls_among_arrays_of_one_number_are_zeros() -> None:
    file = io.BytesIO()
    np.save(file, np.array(1.5, np.float32))
    codec = petastorm_codecs.codec(UnischemaField("a", np.dtype(np.float32), (), "NdarrayCodec", True), "error")
    column = tensor_columns.ColumnEntry(("a",), pa.binary(), "mask", "error", codec)
    found = column.convert(pa.array([file.getvalue(), None]), anywhere())
    assert found["a",].batch().tolist() == [1.5, 0]
    assert found["a__valid",].batch().tolist() == [True, False]


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("is_zipped", [False, True])
def test_numbers_that_torch_has_no_type_for_are_an_error(order: str, is_zipped: bool) -> None:
    def saved(numbers: list[int]) -> bytes:
        file = io.BytesIO()
        array = np.array(numbers, f"{order}u8")
        np.savez_compressed(file, arr=array) if is_zipped else np.save(file, array)
        return file.getvalue()

    codec = petastorm_codecs.codec(
        UnischemaField(
            "a", np.dtype(np.uint64), (2,), "CompressedNdarrayCodec" if is_zipped else "NdarrayCodec", False
        ),
        "error",
    )
    assert codec is not None
    fine = codec.convert(pa.array([saved([1, 2**63 - 1])] * 3), ("a",), anywhere()).batch()
    assert fine.tolist() == [[1, 2**63 - 1]] * 3
    with pytest.raises(DataError, match=r"row 1: .*9223372036854775808 does not fit into int64"):
        codec.convert(pa.array([saved([1, 2]), saved([2**63, 1]), saved([3, 4])]), ("a",), anywhere()).batch()


def test_scalars_that_do_not_fit_into_the_schemas_type_are_an_error() -> None:
    codec = petastorm_codecs.codec(UnischemaField("a", np.dtype(np.uint8), (), "ScalarCodec", False), "error")
    assert codec is not None
    assert codec.convert(pa.array([0, 255], pa.int16()), ("a",), anywhere()).batch().dtype == torch.uint8
    with pytest.raises(DataError, match=r"row 1: 256 does not fit into uint8"):
        codec.convert(pa.array([1, 256], pa.int16()), ("a",), anywhere())


def test_a_transforms_numbers_that_torch_has_no_type_for_are_an_error() -> None:
    def large(found: dict[str, Any]) -> dict[str, Any]:
        return {"id": np.uint64(2**64 - 1 if found["id"] == 3 else 7)}

    with pytest.raises(DataError, match=r"field 'id'.*18446744073709551615 does not fit into int64"):
        list(lagom.PetastormDataLoader(WRITTEN, 5, transform_spec=large))


def anywhere() -> tensor_columns.Where:
    """Row group 0 of a table."""
    table = ParquetDataset(WRITTEN).table
    return tensor_columns.Where(table, 0, 0)


def test_fields_that_nobody_asks_for_need_not_fit(tmp_path: Path) -> None:
    written(tmp_path / "a", {"id": [1, 2], "x": [0.5, 1.5], "texts": [["a"], ["b"]]})
    written(tmp_path / "b", {"id": [3], "x": [2.5]})
    files = [tmp_path / folder / "part-0.parquet" for folder in "ab"]
    (found,) = lagom.PetastormDataLoader(files, 9, schema_fields=["id", "x.*"], shuffle=False)
    assert {name: column.tolist() for name, column in found.items()} == {"id": [1, 2, 3], "x": [0.5, 1.5, 2.5]}
    with pytest.raises(DataError, match="'texts'"):
        lagom.PetastormDataLoader(files, 9, schema_fields=["t.*"])
    with pytest.raises(ValueError, match=r"here it is schema_fields=\['id'\]"):
        lagom.PetastormDataLoader(files, 9, columns=["id"])


def test_a_data_set_is_taken_in_place_of_its_path(tmp_path: Path) -> None:
    written(tmp_path, {"id": [1, 2, 3, 4], "x": [0.5, None, 2.5, 4.5], "y": [1, 2, 3, 4]})
    told = ParquetDataset(tmp_path, columns=["id", "x"], filters=[("id", "<", 4)], nulls=-1)
    (found,) = lagom.PetastormDataLoader(told, 9, shuffle=False)
    assert {name: column.tolist() for name, column in found.items()} == {"id": [1, 2, 3], "x": [0.5, -1, 2.5]}
    (found,) = lagom.PetastormDataLoader(told, 9, lambda frame: frame.assign(x=2 * frame["x"]), shuffle=False)
    assert found["x"].tolist() == [1, -2, 5]
    (found,) = ParquetLoader(ParquetDataset(told, nulls="nan", columns=["x"]), 9)
    assert found["x"].nan_to_num(7).tolist() == [0.5, 7, 2.5]
    small = ParquetDataset(tmp_path, window_bytes=1000, streams=2)
    for taken in (ParquetDataset(small), lagom.PetastormDataLoader(small, 9).dataset):
        assert isinstance(taken, ParquetDataset)
        assert (taken.window_bytes, taken.streams) == (1000, 2)
    assert ParquetDataset(small, streams=3).streams == 3
    with pytest.raises(ValueError, match="the data set has some already"):
        ParquetDataset(told, filters=[("id", ">", 1)])


def test_transforms_are_petastorms() -> None:
    def double(found: dict[str, Any]) -> dict[str, Any]:
        found["fixed"] = found["fixed"] * 2
        found["length"] = np.uint16(len(found["ragged"]))
        return found

    spec = TransformSpec(double, edit_fields=[("length", np.uint16, (), False)], selected_fields=["length", "fixed"])
    loader = lagom.PetastormDataLoader(WRITTEN, 4, spec, shuffle_row_groups=False)
    first = next(iter(loader))
    assert list(first) == ["length", "fixed"]
    assert first["length"].tolist() == [1, 2, 3, 1]
    assert first["length"].dtype == torch.int32
    assert np.array_equal(first["fixed"][3].numpy(), row(3)["fixed"] * 2)
    close(loader)
    left = TransformSpec(removed_fields=[name for name in NAMES if name not in ("id", "png")])
    loader = lagom.PetastormDataLoader(WRITTEN, 4, left, nulls="mask", ragged="list", shuffle=False)
    assert {"id", "png"} <= set(next(iter(loader)))
    close(loader)
    for wrong, what in ((lambda found: found, "'name' is None|shapes differ"), (lambda found: 1 / 0, "division")):
        with pytest.raises((DataError, ZeroDivisionError), match=what):
            list(lagom.PetastormDataLoader(WRITTEN, 20, wrong))
    with pytest.raises(ValueError, match="transform_spec is 3"):
        lagom.PetastormDataLoader(WRITTEN, 20, 3)
    with pytest.raises(ValueError, match="say one of them"):
        TransformSpec(removed_fields=["a"], selected_fields=["b"])


def test_values_that_a_function_returns_unchanged_are_as_without_it(tmp_path: Path) -> None:
    columns = {
        "small": pa.array([1, 65535], pa.uint16()),
        "large": pa.array([1, 2**32 - 1], pa.uint32()),
        "price": pa.array([decimal.Decimal("1.10"), decimal.Decimal("2.25")]),
        "day": pa.array([1, 17898], pa.date32()),
        "stamp": pa.array([1, 1109302200000001], pa.timestamp("us")),
        "nanos": pa.array([1, 1109302200000001], pa.timestamp("ns", "UTC")),
        "lists": pa.array([[1, 2], [3, 65535]], pa.list_(pa.uint16())),
        "prices": pa.array([[decimal.Decimal("1.10")], [decimal.Decimal("2.25")]]),
        "struct": pa.array([{"x": 1, "price": decimal.Decimal(3)}, {"x": 2, "price": decimal.Decimal(4)}]),
        "bytes": pa.array([b"a\0", b"b"]),
    }
    folder = written(tmp_path, columns)
    (plain,) = lagom.PetastormDataLoader(folder, 2, shuffle=False)
    (found,) = lagom.PetastormDataLoader(folder, 2, lambda frame: frame, shuffle=False)
    assert repr(found) == repr(plain)
    assert repr({**plain, "struct": plain["struct"]["x"]}).count("dtype=torch.float64") == 2
    loader = lagom.PetastormDataLoader(folder, 2, lambda frame: frame[["price", "stamp"]])
    loader.dataset.constants |= {"price": 1.5, "stamp": 7}  # type: ignore[attr-defined]
    (found,) = loader
    assert (found["price"].tolist(), found["stamp"].tolist()) == ([1.5, 1.5], [7, 7])
    texts = written(tmp_path / "texts", {"texts": [["a"], ["b"]], "x": [1, 2]})
    with pytest.raises(DataError, match=r"field 'texts' .* it is an array of texts .* convert or drop it"):
        list(lagom.PetastormDataLoader(texts, 2, lambda frame: frame))
    (found,) = lagom.PetastormDataLoader(texts, 2, lambda frame: frame.assign(texts=frame["texts"].str.len()))
    assert found["texts"].tolist() == [1, 1]


def test_fields_that_a_spec_without_a_function_drops_are_not_read(tmp_path: Path) -> None:
    folder = written(tmp_path, {"id": [1, 2], "x": [0.5, 1.5], "texts": [["a"], ["b"]]})
    for spec in (TransformSpec(removed_fields=["texts"]), TransformSpec(selected_fields=["x", "id"])):
        loader = lagom.PetastormDataLoader(folder, 2, spec, shuffle=False)
        (found,) = loader
        assert {name: column.tolist() for name, column in found.items()} == {"id": [1, 2], "x": [0.5, 1.5]}
        assert loader.dataset.columns == list(found)  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="selected_fields names 'y'"):
        lagom.PetastormDataLoader(folder, 2, TransformSpec(selected_fields=["y"]))


def test_what_is_no_path_is_an_error_that_says_so() -> None:
    for wrong in (3, [3], object()):
        with pytest.raises(ValueError, match=r"the data set is .*; it is a path, a URL or a list of these"):
            lagom.PetastormDataLoader(wrong, 2)  # type: ignore[arg-type]


def test_plain_parquet_is_transformed_as_frames(tmp_path: Path) -> None:
    folder = written(tmp_path, {"a": [1, 2, 3, 4], "v": [[1.0, 2.0]] * 4, "t": ["x", "y", "z", "w"]})

    def transform(frame: Any) -> Any:
        frame["b"] = frame["a"] * 10
        frame["v"] = frame["v"].map(lambda one: one + 1)
        return frame[["b", "v", "t"]]

    (found,) = lagom.PetastormDataLoader(str(folder), 4, transform, shuffle=False)
    assert found["b"].tolist() == [10, 20, 30, 40]
    assert found["v"].tolist() == [[2, 3]] * 4
    assert found["t"] == ["x", "y", "z", "w"]
    (plain,) = lagom.PetastormDataLoader(str(folder), 4, shuffle=False)
    assert plain["v"].tolist() == [[1, 2]] * 4
    with pytest.raises(DataError, match=r"function returned None \(is there a return\?\); .* pandas DataFrame"):
        list(lagom.PetastormDataLoader(str(folder), 4, lambda frame: None))
    with pytest.raises(DataError, match="left none of the 4 rows"):
        list(lagom.PetastormDataLoader(str(folder), 4, lambda frame: frame[:0]))
    with pytest.raises(DataError, match="function returned a list; it gets a row as a dict"):
        list(lagom.PetastormDataLoader(WRITTEN, 4, lambda row: [1]))


@pytest.mark.parametrize("kind", ["f2", "f4", "f8", "i1", "u1", "i4", "i8", "?"])
def test_numbers_keep_their_type_through_a_frame(tmp_path: Path, kind: str) -> None:
    folder = str(written(tmp_path, {"a": np.arange(4).astype(kind)}))
    (plain,) = lagom.PetastormDataLoader(folder, 4, shuffle=False)
    (found,) = lagom.PetastormDataLoader(folder, 4, lambda frame: frame, shuffle=False)
    assert found["a"].dtype == plain["a"].dtype
    assert torch.equal(found["a"], plain["a"])


@pytest.mark.parametrize("column", ["fixed", "zipped", "png"])
def test_a_cell_that_does_not_decode_is_named(tmp_path: Path, column: str) -> None:
    folder = tmp_path / "table"
    shutil.copytree(WRITTEN, folder)
    path = folder / "day=1" / "part-0.parquet"
    table = pq.read_table(path, partitioning=None)
    cells = table[column].to_pylist()
    cells[6] = cells[6][: len(cells[6]) // 2]
    table = table.set_column(table.column_names.index(column), column, pa.array(cells, pa.binary()))
    pq.write_table(table, path, row_group_size=4)
    loader = lagom.PetastormDataLoader(folder, 5, schema_fields=["id", column])
    with pytest.raises(DataError, match=rf"day=1/part-0.parquet, row group 1, column '{column}', row 2: "):
        list(loader)
    close(loader)


def test_an_array_of_another_shape_than_the_schema_says_is_named() -> None:
    field = UnischemaField("a", np.dtype(np.float32), (2,), "NdarrayCodec", False)

    def cells(*arrays: Any) -> Any:
        made = []
        for array in arrays:
            file = io.BytesIO()
            np.save(file, array)
            made.append(file.getvalue())
        return pa.array(made, pa.binary())

    def converted(array: Any) -> Any:
        where = type(
            "Where", (), {"memory": None, "error": lambda self, path, at, why: DataError(f"row {at}: {why}")}
        )()
        codec: Any = petastorm_codecs.codec(field, "error")
        return codec.convert(array, ("a",), where).batch()

    one = np.array([1, 2], np.float32)
    assert converted(cells(one, one * 2)).tolist() == [[1, 2], [2, 4]]
    assert converted(cells(one, one * 2).slice(1)).tolist() == [[2, 4]]
    assert converted(cells(one, one.astype(">f4"))).tolist() == [[1, 2], [1, 2]]  # another header
    square = np.arange(6, dtype=np.float32).reshape(2, 3)
    field = UnischemaField("a", np.dtype(np.float32), (2, 3), "NdarrayCodec", False)
    assert converted(cells(np.asfortranarray(square), np.asfortranarray(square + 1))).tolist() == [
        square.tolist(),
        (square + 1).tolist(),
    ]
    for wrong in (square[:1], square.astype(np.float64), square.astype(object)):
        with pytest.raises(DataError, match="row 1: is no array"):
            converted(cells(square, wrong))


class Harm:
    """Payload of a malicious schema: unpickling it would run a shell command."""

    def __reduce__(self) -> Any:
        return os.system, ("touch harmed",)


@pytest.mark.parametrize(
    "pickled",
    [
        pickle.dumps(Harm()),
        b"cbuiltins\neval\n(S'1'\ntR.",
        b"cnumpy.core.multiarray\n_reconstruct\n(S'1'\ntR.",
        b"cnumpy\nload\n(S'1'\ntR.",
        b"cpetastorm.etl.legacy\nrestricted_loads\n(S'1'\ntR.",
        b"cpyspark.sql.types\n_parse_datatype_json_string\n(S'1'\ntR.",
        b"ccopy_reg\n_reconstructor\n(ccollections\nOrderedDict\nc__builtin__\nobject\nNtR.",
        pickle.dumps({"_fields": {}}),
        b"no pickle",
        b"",
    ],
)
def test_a_schema_runs_nothing(pickled: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="schema in here cannot be read"):
        loads(pickled, "here")
    assert not list(tmp_path.iterdir())


def test_schemas_of_older_petastorms_are_read() -> None:
    """Python 2 pickled the schemas, under the package's older names, and pyspark the named tuples."""
    old = (
        b"ccopy_reg\n_reconstructor\n(cav.ml.dataset_toolkit.unischema\nUnischema\nc__builtin__\nobject\nNtR"
        b"(dS'_fields'\nccollections\nOrderedDict\n((l(lS'x'\na"
        b"cpyspark.serializers\n_restore\n(S'UnischemaField'\n(S'name'\nS'numpy_dtype'\nS'shape'\nS'codec'\nS'nullable'\nt"
        b"(S'x'\ncnumpy\nunicode_\n(I2\nNt"
        b"ccopy_reg\n_reconstructor\n(cav.ml.dataset_toolkit.codecs\nNdarrayCodec\nc__builtin__\nobject\nNtR"
        b"I01\nttRaatRsS'_name'\nS'S'\nsb."
    )
    assert loads(old, "here") == {"x": UnischemaField("x", np.dtype(np.str_), (2, None), "NdarrayCodec", True)}
    fields = unischema.read_fields(LocalFileSystem(), str(WRITTEN))
    assert fields is not None
    assert fields["ragged"] == UnischemaField("ragged", np.dtype(np.int16), (None, 2), "NdarrayCodec", False)
    assert fields["price"].dtype is None


def test_pillow_refuses_what_it_would_spoil() -> None:
    header = b"\x89PNG\r\n\x1a\n" + (13).to_bytes(4, "big")
    chunk = b"IHDR" + (1).to_bytes(4, "big") * 2 + bytes([16, 2, 0, 0, 0])
    deep = header + chunk + zlib.crc32(chunk).to_bytes(4, "big")
    with pytest.raises(ValueError, match="16 bits"):
        images.decode_by_pillow(deep)


@pytest.mark.soak  # test_ranks.py trains on a path, and tests/extensions/compat/test_maggy.py reads such rows on ranks
@pytest.mark.parametrize(("world_size", "batches"), [(1, "split"), (2, "split"), (3, "split"), (2, "whole")])
def test_training_on_a_path_is_that_of_one_machine(world_size: int, batches: Any) -> None:
    def run(session: Session) -> Any:
        def transform(found: dict[str, Any]) -> dict[str, Any]:
            return {"x": found["fixed"].astype(np.float64), "y": float(found["price"]), "id": found["id"]}

        loader = lagom.PetastormDataLoader(str(WRITTEN), batch_size=6, transform_spec=transform)
        model = torch.nn.Linear(6, 1).double()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        seen = []
        for _ in range(3):
            epoch: list[int] = []
            for batch in loader:
                epoch += batch["id"].tolist()
                optimizer.zero_grad()
                (model(batch["x"].flatten(1))[:, 0] - batch["y"]).square().mean().backward()
                optimizer.step()
            seen.append(epoch)
        close(loader)
        return [p.detach() for p in model.parameters()], seen

    weights, _ = alone(run)
    found = run_ranks(world_size, run, batches=batches)
    for theirs, _ in found:
        torch.testing.assert_close(theirs, weights, rtol=0, atol=0 if world_size == 1 else 1e-12)
    for epoch in range(3):
        ranks = found[:1] if batches == "whole" else found
        assert {number for _, seen in ranks for number in seen[epoch]} == set(range(20))
