"""``tensor_columns``: what Arrow's types become, and what becomes of nulls and of lists of different lengths."""

from __future__ import annotations

import datetime
import decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from torch.utils.data import DataLoader

from lagom.data import ParquetDataset, ParquetLoader
from lagom.errors import DataError
from tests.extensions.data.tables import written


def batch(folder: Path, columns: Any, **options: Any) -> dict[str, Any]:
    """All rows; the same by both ways to read."""
    folder = written(folder, columns, row_group_size=3)
    (found,) = DataLoader(ParquetDataset(folder, **options), 99)
    (other,) = ParquetLoader(ParquetDataset(folder, **options), 99)
    assert repr(found) == repr(other)
    return dict(found)


@pytest.mark.parametrize(
    ("kind", "values", "wanted"),
    [
        (pa.int8(), [1, -2, 3, 4], torch.tensor([1, -2, 3, 4], dtype=torch.int8)),
        (pa.uint8(), [1, 255], torch.tensor([1, 255], dtype=torch.uint8)),
        (pa.uint16(), [1, 65535], torch.tensor([1, 65535], dtype=torch.int32)),
        (pa.uint32(), [1, 2**32 - 1], torch.tensor([1, 2**32 - 1])),
        (pa.int64(), [-(2**63), 2**63 - 1], torch.tensor([-(2**63), 2**63 - 1])),
        (pa.float16(), [0.5, 1.5], torch.tensor([0.5, 1.5], dtype=torch.float16)),
        (pa.float32(), [0.5, 1.5, 2.5, 3.5], torch.tensor([0.5, 1.5, 2.5, 3.5])),
        (pa.bool_(), [True, False, True, True], torch.tensor([True, False, True, True])),
        (pa.decimal128(9, 2), [decimal.Decimal("1.25")], torch.tensor([1.25], dtype=torch.float64)),
        (pa.date32(), [datetime.date(1970, 1, 3)], torch.tensor([2], dtype=torch.int32)),
        (pa.timestamp("us", "UTC"), [5, 7], torch.tensor([5, 7])),
        (pa.timestamp("ms"), [5, 7], torch.tensor([5, 7])),
        (pa.string(), ["a", "", "ü", "b"], ["a", "", "ü", "b"]),
        (pa.binary(), [b"a", b"\0"], [b"a", b"\0"]),
        (pa.binary(2), [b"ab", b"\0\1"], [b"ab", b"\0\1"]),
        (pa.dictionary(pa.int8(), pa.string()), ["a", "b", "a"], ["a", "b", "a"]),
        (pa.dictionary(pa.int8(), pa.int32()), [7, 7, 9], torch.tensor([7, 7, 9], dtype=torch.int32)),
        (pa.list_(pa.float32()), [[1.0, 2.0]] * 5, torch.tensor([[1.0, 2.0]] * 5)),
        (pa.list_(pa.float32(), 2), [[1.0, 2.0], [3.0, 4.0]], torch.tensor([[1.0, 2.0], [3.0, 4.0]])),
        (pa.large_list(pa.int16()), [[1], [2]], torch.tensor([[1], [2]], dtype=torch.int16)),
        (pa.list_(pa.list_(pa.int64())), [[[1, 2], [3, 4]]] * 4, torch.tensor([[[1, 2], [3, 4]]] * 4)),
        (pa.list_(pa.bool_()), [[True, False]], torch.tensor([[True, False]])),
    ],
    ids=str,
)
def test_values_become_tensors(tmp_path: Path, kind: Any, values: list[Any], wanted: Any) -> None:
    found = batch(tmp_path, {"a": pa.array(values, kind)})["a"]
    if isinstance(wanted, torch.Tensor):
        assert found.dtype == wanted.dtype
        assert torch.equal(found, wanted)
    else:
        assert found == wanted


@pytest.mark.parametrize(("precision", "scale"), [(5, 2), (12, 4), (15, 15), (16, 3), (38, 20)])
def test_a_decimal_becomes_the_float_nearest_to_it(tmp_path: Path, precision: int, scale: int) -> None:
    step = 10**precision // 45
    values = [
        decimal.Decimal(f"{number}e-{scale}", decimal.Context(prec=precision))
        for number in range(1 - 10**precision, 10**precision, step)
    ]
    found = batch(tmp_path, {"a": pa.array([*values, None], pa.decimal128(precision, scale))}, nulls=-1)["a"]
    assert found.tolist() == [*map(float, values), -1.0]  # not the one beside it, as by Arrow's cast


def test_structs_become_dicts_and_vectors_of_spark_tensors(tmp_path: Path) -> None:
    vector = pa.struct(
        [
            ("type", pa.int8()),
            ("size", pa.int32()),
            ("indices", pa.list_(pa.int32())),
            ("values", pa.list_(pa.float64())),
        ]
    )
    vectors = [
        {"type": 1, "size": None, "indices": None, "values": [1.0, 2.0, 3.0]},
        {"type": 0, "size": 3, "indices": [2], "values": [5.0]},
        {"type": 0, "size": 3, "indices": [], "values": []},
        {"type": 1, "size": None, "indices": None, "values": [4.0, 5.0, 6.0]},
    ]
    structs = [{"x": number, "inner": {"y": [number, 0.5]}} for number in range(4)]
    found = batch(tmp_path, {"v": pa.array(vectors, vector), "s": structs})
    assert found["v"].tolist() == [[1, 2, 3], [0, 0, 5], [0, 0, 0], [4, 5, 6]]
    assert found["s"]["x"].tolist() == [0, 1, 2, 3]
    assert found["s"]["inner"]["y"].tolist() == [[0, 0.5], [1, 0.5], [2, 0.5], [3, 0.5]]
    wrong = [*vectors[:2], {"type": 0, "size": 4, "indices": [], "values": []}]
    with pytest.raises(DataError, match=r"column 'v', row 2: a vector of 4 where others have 3"):
        batch(tmp_path, {"v": pa.array(wrong, vector)})


def test_a_column_that_is_a_constant_has_no_nulls_and_masks_of_other_columns_stay(tmp_path: Path) -> None:
    columns = {"s": [{"x": 1}, {"x": None}], "a": [1, None], "t": [{"a": 3}, {"a": None}]}
    dataset = ParquetDataset(written(tmp_path, columns), nulls="mask")
    dataset.constants |= {"s": 0, "a": 5}
    (found,) = DataLoader(dataset, 2)
    assert found["s"]["x"].tolist() == [0, 0]
    assert found["s"]["x__valid"].tolist() == [True, True]
    assert found["a"].tolist() == [5, 5]
    assert found["a__valid"].tolist() == [True, True]
    assert found["t"]["a"].tolist() == [3, 0]
    assert found["t"]["a__valid"].tolist() == [True, False]


def test_a_type_that_cannot_be_a_tensor_is_refused_at_once(tmp_path: Path) -> None:
    folder = written(tmp_path, {"a": [1], "m": pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int64()))})
    with pytest.raises(ValueError, match=r"column 'm' has the type map<.*leave it out with columns"):
        ParquetDataset(folder)
    assert ParquetDataset(folder, columns=["a"])[0]["a"].item() == 1
    with pytest.raises(ValueError, match=r"'t' has the type list<.*string"):
        ParquetDataset(written(tmp_path, {"t": [["a"]]}))


NULL = {"i": pa.array([1, None, 3, 4, 5], pa.int32()), "f": [1.0, 2.0, None, 4.0, 5.0]}


def test_a_null_is_an_error_until_the_program_chooses(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"part-0.parquet, row group 0, column 'i', row 1: a null; nulls= may be"):
        batch(tmp_path, NULL)
    with pytest.raises(DataError, match=r"row group 1, column 'i', row 1"):
        batch(tmp_path, {"i": pa.array([1, 2, 3, 4, None])})
    filled = batch(tmp_path, NULL, nulls={"i": -1, "f": "nan"})
    assert filled["i"].tolist() == [1, -1, 3, 4, 5]
    assert filled["i"].dtype == torch.int32
    assert filled["f"].isnan().tolist() == [False, False, True, False, False]
    masked = batch(tmp_path, NULL, nulls="mask")
    assert masked["i__valid"].tolist() == [True, False, True, True, True]
    assert masked["i"].tolist() == [1, 0, 3, 4, 5]
    assert masked["f__valid"].tolist() == [True, True, False, True, True]
    with pytest.raises(DataError, match=r"column 'i', row 1: a null, and int32 has no NaN"):
        batch(tmp_path, NULL, nulls="nan")
    with pytest.raises(ValueError, match="nulls is 'zero'"):
        ParquetDataset(tmp_path, nulls="zero")
    with pytest.raises(ValueError, match="there is a column 'i__valid' already"):
        batch(tmp_path, {**NULL, "i__valid": [0, 1, 2, 3, 4]}, nulls="mask")
    assert len(batch(tmp_path, {**NULL, "i__valid": [0, 1, 2, 3, 4]}, nulls={"i": 0, "f": "mask"})) == 4
    with pytest.raises(ValueError, match="nulls names the column 'z'"):
        ParquetDataset(tmp_path, nulls={"z": 0})


def test_nulls_in_texts_lists_and_structs_are_seen(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"column 't', row 1: a null, for which 0 cannot stand in string"):
        batch(tmp_path, {"t": ["a", None]}, nulls=0)
    assert batch(tmp_path, {"t": ["a", None]}, nulls="mask")["t"] == ["a", None]
    assert batch(tmp_path, {"t": ["a", None]}, nulls="")["t"] == ["a", ""]
    found = batch(tmp_path, {"t": ["a", None], "b": [b"a", None], "i": [1, None]}, nulls={"t": "", "b": "", "i": -1})
    assert (found["t"], found["b"], found["i"].tolist()) == (["a", ""], [b"a", b""], [1, -1])
    with pytest.raises(DataError, match=r"a null, and int64 has no text; nulls= may be a number"):
        batch(tmp_path, {"i": [1, None]}, nulls="")
    with pytest.raises(DataError, match=r"column 'a', row 2: a null inside of a list"):
        batch(tmp_path, {"a": [[1.0, 2.0], [3.0, 4.0], [5.0, None]]})
    with pytest.raises(DataError, match="a null inside of a list"):
        batch(tmp_path, {"a": [[1.0, 2.0], [3.0, 4.0], [5.0, None]]}, nulls="mask")
    assert batch(tmp_path, {"a": [[1.0, 2.0], [3.0, None]]}, nulls=7)["a"].tolist() == [[1, 2], [3, 7]]
    assert batch(tmp_path, {"a": [[1, 2], None, [5, 6]]}, nulls=7)["a"].tolist() == [[1, 2], [7, 7], [5, 6]]
    found = batch(tmp_path, {"a": [[1, 2], None, [5, 6]]}, nulls="mask")
    assert (found["a"].tolist(), found["a__valid"].tolist()) == ([[1, 2], [0, 0], [5, 6]], [True, False, True])
    with pytest.raises(DataError, match=r"column 's.x', row 1: a null"):
        batch(tmp_path, {"s": [{"x": 1}, None]})
    assert batch(tmp_path, {"s": [{"x": 1}, None]}, nulls={"s": 0})["s"]["x"].tolist() == [1, 0]


@pytest.mark.parametrize("kind", [pa.list_(pa.float32()), pa.list_(pa.list_(pa.float32()))], ids=str)
def test_lists_of_which_a_row_group_has_none_have_the_shape_of_others(tmp_path: Path, kind: Any) -> None:
    one = [1.0, 2.0] if kind.value_type == pa.float32() else [[1.0], [2.0]]
    for place, rows in enumerate(([one] * 3 + [None] * 3, [None] * 3 + [one] * 3, [None] * 6 + [one])):
        column = {"a": pa.array(rows, kind)}
        folder = tmp_path / str(place)
        folder.mkdir()
        found = batch(folder, column, nulls="mask")
        assert found["a__valid"].tolist() == [row is not None for row in rows]
        zeros = torch.zeros_like(torch.tensor(one))
        assert found["a"].tolist() == [row or zeros.tolist() for row in rows]
        sevens = batch(folder, column, nulls=7)["a"]
        assert sevens.tolist() == [row or (zeros + 7).tolist() for row in rows]


def test_lists_of_different_lengths_are_an_error_until_the_program_chooses(tmp_path: Path) -> None:
    lists = {"a": [[1.0], [2.0, 3.0], [], [4.0, 5.0, 6.0]]}
    with pytest.raises(DataError, match=r"column 'a', row 1: a list of 2 where others have 1; ragged= may be"):
        batch(tmp_path, lists)
    assert torch.equal(batch(tmp_path, lists, ragged={"a": "pad"})["a"], batch(tmp_path, lists, ragged="pad")["a"])
    padded = batch(tmp_path, lists, ragged="pad")["a"]
    assert padded.tolist() == [[1, 0, 0], [2, 3, 0], [0, 0, 0], [4, 5, 6]]
    assert [part.tolist() for part in batch(tmp_path, lists, ragged="list")["a"]] == lists["a"]
    with pytest.raises(DataError, match=r"row group 1, column 'a', row 0: a shape of \(1,\) where others have \(2,\)"):
        batch(tmp_path, {"a": [[1, 2]] * 3 + [[1]]})
    holed = {"a": [[1.0], [], None, [2.0, 3.0], [4.0, None]]}
    for ragged in ("pad", "list"):
        with pytest.raises(DataError, match=r"row group 1, column 'a', row 1: a null inside of a list; nulls= may be"):
            batch(tmp_path, holed, ragged=ragged, nulls="mask")
        with pytest.raises(DataError, match=r"column 'a', row 1: a null inside of a list"):
            batch(tmp_path, {"a": [[1, 2], [None]]}, ragged=ragged)
    assert batch(tmp_path, holed, ragged="pad", nulls=7)["a"].tolist() == [[1, 0], [0, 0], [0, 0], [2, 3], [4, 7]]
    with pytest.raises(ValueError, match="ragged is 'cut'"):
        ParquetDataset(tmp_path, ragged="cut")


def test_a_number_that_does_not_fit_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="column 'a'"):
        batch(tmp_path, {"a": pa.array([1, 2**64 - 1], pa.uint64())})
    with pytest.raises(DataError, match="column 'i'"):
        batch(tmp_path, NULL, nulls={"i": 0.5, "f": 0})
