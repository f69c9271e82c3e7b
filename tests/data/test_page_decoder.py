"""``page_decoder``: what lagom decodes itself is what Arrow decodes, and what is not plain is left to Arrow."""

from __future__ import annotations

import io
import pickle
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lagom.collectives.native import native
from lagom.data import ParquetDataset, ParquetLoader
from lagom.data.column_types.unischema import UnischemaField
from lagom.data.decoders import page_decoder
from lagom.data.parquet.cursor import RowGroupCursor, RowGroupPart
from lagom.errors import DataError

pytestmark = pytest.mark.skipif(native() is None, reason="lagom was built without a compiler")

TYPES: list[Any] = [pa.int32(), pa.int64(), pa.float32(), pa.float64()]


def cell(array: NDArray[Any]) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def column(kind: Any, count: int, distinct: int, drawn: np.random.Generator) -> tuple[pa.Array, NDArray[Any]]:
    """A column of ``kind``, or of arrays of (2, 3) where that is None, and its values."""
    if kind is None:
        some = drawn.integers(0, 1 << 15, (distinct, 2, 3)).astype(np.int16)
        values = some[drawn.integers(0, distinct, count)]
        return pa.array([cell(value) for value in values], pa.binary()), values
    dtype = np.dtype(kind.to_pandas_dtype())
    some = drawn.integers(0, 256, (distinct, dtype.itemsize), np.uint8).view(dtype)[:, 0]
    values = some[drawn.integers(0, distinct, count)]
    return pa.array(values, kind), values


def same(found: NDArray[Any], wanted: NDArray[Any]) -> None:
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    assert found.tobytes() == wanted.tobytes()  # NaNs of any kind too


@pytest.mark.soak  # test_fast_columns.py has pages of many layouts by default
@settings(max_examples=25, deadline=None, derandomize=True)
@given(data=st.data())
def test_pages_of_any_layout_are_what_was_written(data: st.DataObject) -> None:
    draw = data.draw
    drawn = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    count = draw(st.sampled_from([1, 7, 8, 300, 3000]))
    kinds = [draw(st.sampled_from([*TYPES, None])) for _ in range(draw(st.integers(1, 3)))]
    made = [column(kind, count, draw(st.sampled_from([1, 2, 9, 700])), drawn) for kind in kinds]
    nullable = draw(st.booleans())
    schema = pa.schema([pa.field(f"c{n}", one.type, nullable) for n, (one, _) in enumerate(made)])
    options: dict[str, Any] = {
        "compression": draw(st.sampled_from(["none", "snappy"])),
        "use_dictionary": draw(st.booleans()),
        "data_page_version": draw(st.sampled_from(["1.0", "2.0"])),
        "data_page_size": draw(st.sampled_from([1, 1000, 1 << 20])),
        "dictionary_pagesize_limit": draw(st.sampled_from([1, 500, 1 << 20])),
        "write_batch_size": draw(st.sampled_from([10, 1024])),
        "write_page_checksum": draw(st.booleans()),
    }
    sink = io.BytesIO()
    pq.write_table(
        pa.table([one for one, _ in made], schema), sink, row_group_size=draw(st.sampled_from([5, 10000])), **options
    )
    file = pa.BufferReader(sink.getvalue())
    metadata = pq.ParquetFile(file).metadata
    places = page_decoder.places(metadata)
    reading = page_decoder.PageDecoder()
    at = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page_decoder, "PAGE_BYTES", draw(st.sampled_from([1, 300, 1 << 20])))
        for group in range(metadata.num_row_groups):
            chunks = {}
            for number, kind in enumerate(kinds):
                told = page_decoder.number(schema.field(number))
                if kind is None:
                    told = page_decoder.saved(made[number][0][0].as_py(), np.dtype(np.int16), (2, 3))
                assert told is not None
                one = page_decoder.chunk(metadata, group, places[f"c{number}"], told)
                assert one is not None
                chunks[number] = one
            reading.begin(file, chunks)
            left = metadata.row_group(group).num_rows
            while left:
                some = draw(st.integers(1, left)) if left < 20 else min(left, 1 + left // 2)
                found = reading.read(some)
                assert found is not None
                for number, (_, values) in enumerate(made):
                    same(found[number], values[at : at + some])
                at, left = at + some, left - some
    assert at == count


def test_a_cell_of_another_kind_is_not_plain() -> None:
    array = np.arange(6, dtype=np.int16).reshape(2, 3)
    dtype = array.dtype
    assert page_decoder.saved(cell(array), dtype, (2, 3)) is not None
    for other in (np.asfortranarray(array), array.astype(">i2"), array.astype(np.int32), array[:1], array.ravel()):
        assert page_decoder.saved(cell(other), dtype, (2, 3)) is None
    assert page_decoder.saved(cell(array)[:-1], dtype, (2, 3)) is None
    assert page_decoder.saved(b"no array", dtype, (2, 3)) is None


def petastorm(folder: Path, groups: list[list[Any]], **options: Any) -> Path:
    """A data set of cells ``x``, as petastorm writes it, with a row number ``n`` and its text ``t``."""
    folder.mkdir()
    schema = pa.schema([pa.field("n", pa.int64()), pa.field("x", pa.binary()), pa.field("t", pa.string())])
    row = 0
    with pq.ParquetWriter(folder / "part-0.parquet", schema, **options) as writer:
        for cells in groups:
            numbers = range(row, row + len(cells))
            writer.write_table(pa.table([list(numbers), cells, [str(n) for n in numbers]], schema))
            row += len(cells)
    return folder


def read(folder: Path, field: UnischemaField, by_arrow: bool, **options: Any) -> tuple[list[dict[str, Any]], int]:
    """Batches of an epoch, and how often a row group turned out not to be plain."""
    times: list[int] = []

    def noted(self: RowGroupCursor) -> RowGroupPart:
        times.append(1)
        return original(self)

    with pytest.MonkeyPatch.context() as patch:
        if by_arrow:
            patch.setenv("LAGOM_PAGE_DECODER", "0")
        original = RowGroupCursor.read_by_arrow
        patch.setattr(RowGroupCursor, "read_by_arrow", noted)
        patch.setattr("lagom.data.column_types.unischema.read_fields", lambda home, where: {"x": field})
        dataset = ParquetDataset(folder, **options)
        try:
            return [
                {name: value if isinstance(value, list) else value.numpy().copy() for name, value in batch.items()}
                for batch in ParquetLoader(dataset, 7, shuffle=True, seed=3)
            ], len(times)
        finally:
            dataset.close()


def field(shape: tuple[int | None, ...]) -> UnischemaField:
    return UnischemaField("x", np.dtype(np.int16), shape, "NdarrayCodec", True)


def alike(folder: Path, field: UnischemaField, **options: Any) -> int:
    found, times = read(folder, field, False, **options)
    wanted, _ = read(folder, field, True, **options)
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert list(one) == list(other)
        for name in one:
            if isinstance(one[name], list):
                assert one[name] == other[name]
            else:
                same(one[name], other[name])
    return times


ARRAYS = [np.arange(6, dtype=np.int16).reshape(2, 3) + n for n in range(40)]
CELLS = [cell(array) for array in ARRAYS]
SECOND = b"\x93NUMPY\x02\x00" + (len(CELLS[33]) - 22).to_bytes(4, "little") + CELLS[33][10:]
"""A cell with a header in version 2 of numpy's format."""


@pytest.mark.parametrize(
    ("name", "change", "options"),
    [
        ("plain", {}, {}),
        pytest.param("fortran", {33: cell(np.asfortranarray(ARRAYS[33]))}, {}, marks=pytest.mark.soak),
        ("other bytes", {33: cell(ARRAYS[33].astype(">i2"))}, {}),
        pytest.param(
            "another version",
            {33: b"\x93NUMPY\x02\x00" + (len(CELLS[33]) - 24).to_bytes(4, "little") + CELLS[33][10:]},
            {},
            marks=pytest.mark.soak,
        ),
        ("null", {33: None}, {"nulls": 0}),
        ("mask", {33: None}, {"nulls": "mask"}),
    ],
)
def test_a_column_that_stops_to_be_plain_goes_on_by_arrow(
    tmp_path: Path, name: str, change: dict[int, Any], options: dict[str, Any]
) -> None:
    cells = [change.get(n, one) for n, one in enumerate(CELLS)]
    groups = [cells[:25], cells[25:]]
    folder = petastorm(tmp_path / "table", groups, data_page_size=100, use_dictionary=False, write_batch_size=4)
    if name == "null":  # for which no number can stand
        for by_arrow in (False, True):
            with pytest.raises(DataError, match=r"part-0.parquet, row group 1, column 'x', row 8: a null"):
                read(folder, field((2, 3)), by_arrow, **options)
        return
    assert bool(alike(folder, field((2, 3)), **options)) == bool(change)
    # A few rows at a time, so that some of the row group have been read.
    assert bool(alike(folder, field((2, 3)), window_bytes=2000, streams=1, **options)) == bool(change)


def test_shapes_that_vary_are_left_to_arrow(tmp_path: Path) -> None:
    cells = [cell(np.arange(n, dtype=np.int16)) for n in range(40)]
    folder = petastorm(tmp_path / "table", [cells])
    assert alike(folder, field((None,)), ragged="pad") == 0


@pytest.mark.parametrize(
    "options", [{"columns": ["x"]}, {"columns": ["t", "x"]}, {"filters": [("n", ">", 5)], "columns": ["x", "n"]}]
)
def test_columns_and_filters_have_their_rows(tmp_path: Path, options: dict[str, Any]) -> None:
    folder = petastorm(tmp_path / "table", [CELLS[:25], CELLS[25:]])
    assert alike(folder, field((2, 3)), **options) == 0


@pytest.mark.parametrize(
    "compression", ["gzip", *(pytest.param(one, marks=pytest.mark.soak) for one in ("zstd", "lz4"))]
)
def test_what_others_compress_is_left_to_arrow(tmp_path: Path, compression: str) -> None:
    folder = petastorm(tmp_path / "table", [CELLS[:25], CELLS[25:]], compression=compression)
    assert alike(folder, field((2, 3))) == 0


def test_what_others_encode_is_left_to_arrow(tmp_path: Path) -> None:
    encodings = {"n": "DELTA_BINARY_PACKED", "x": "DELTA_BYTE_ARRAY", "t": "PLAIN"}
    options: dict[str, Any] = {"use_dictionary": False, "column_encoding": encodings}
    assert alike(petastorm(tmp_path / "table", [CELLS], **options), field((2, 3))) == 0


@pytest.mark.parametrize("checksums", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_what_is_damaged_is_what_arrow_says(tmp_path: Path, checksums: bool) -> None:
    """A byte changed anywhere before the footer: the same rows, or an error for both."""
    drawn = random.Random(5)
    options = {"dictionary_pagesize_limit": 900, "write_page_checksum": checksums}
    folder = petastorm(tmp_path / "table", [CELLS[:25], CELLS[25:]], write_batch_size=8, **options)
    path = folder / "part-0.parquet"
    whole = path.read_bytes()
    end = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    seen = set()
    for _ in range(40):
        changed = bytearray(whole)
        changed[drawn.randrange(4, end)] ^= 1 << drawn.randrange(8)
        path.write_bytes(changed)
        said = [outcome(folder, by_arrow) for by_arrow in (False, True)]
        assert said[0] == said[1]
        seen.add(b"row group" in said[0])
    assert seen == {False, True}


def outcome(folder: Path, by_arrow: bool) -> bytes:
    try:
        batches, _ = read(folder, field((2, 3)), by_arrow, columns=["n", "x"])
    except DataError as error:
        return re.sub("0x[0-9a-f]+", "", str(error)).encode()  # numpy names an object by its address
    return pickle.dumps([[batch["n"].tobytes(), batch["x"].tobytes()] for batch in batches])
