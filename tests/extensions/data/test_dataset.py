"""``lagom.extensions.data.parquet.dataset`` and its loader in one process: rows, batches, filters, resuming."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Subset, random_split

from lagom.data import ParquetDataset, ParquetLoader
from lagom.errors import DataError
from lagom.extensions.data.parquet import streams
from lagom.extensions.data.parquet.reader import TableReader
from lagom.extensions.data.parquet.shard import Positions
from tests.extensions.data.tables import numbers, written


@pytest.fixture(autouse=True)
def child_handler() -> Iterator[None]:
    """Takes back the handler that torch's first loader with workers sets for good."""
    before = signal.getsignal(signal.SIGCHLD)
    yield
    signal.signal(signal.SIGCHLD, before)


def rows(loader: Any) -> list[list[int]]:
    return [batch["row"].tolist() for batch in loader]


def passes() -> list[Any]:
    """Return the passes that are open over data sets of this process."""
    return [one for reader in gc.get_objects() if type(reader) is TableReader for one in reader.passes.values()]


def flat(batches: list[list[int]]) -> list[int]:
    return [row for batch in batches for row in batch]


def test_a_loader_of_torch_gives_tensors_by_column_in_the_order_of_the_files(tmp_path: Path) -> None:
    dataset = ParquetDataset(numbers(tmp_path, [[3, 2], [0], [4]]))
    assert len(dataset) == 9
    assert dataset[4]["row"].item() == dataset[-5]["row"].item() == 4
    batches = list(DataLoader(dataset, batch_size=4))
    assert [batch["row"].tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]
    assert torch.equal(batches[1]["x"], torch.sin(batches[1]["row"].double()))
    assert batches[1]["x"].dtype == torch.float64
    batches[0]["x"].zero_()  # it is the program's
    with pytest.raises(IndexError):
        dataset[9]


def test_what_a_program_does_to_a_batch_does_not_reach_a_later_one(tmp_path: Path) -> None:
    dataset = ParquetDataset(numbers(tmp_path, [[20]]), window_bytes=240)  # the table is larger
    loader = DataLoader(dataset, 4)
    for batch in loader:  # a peek
        batch["row"].zero_()
        break
    assert flat(rows(loader)) == list(range(20))
    second = []
    for pair in zip(loader, loader, strict=True):
        pair[0]["row"].zero_()
        second += pair[1]["row"].tolist()
    assert second == list(range(20))
    overlapping = [list(range(start, start + 4)) for start in range(17)]
    for batch, wanted in zip(DataLoader(dataset, batch_sampler=overlapping), overlapping, strict=True):
        assert batch["row"].tolist() == wanted
        batch["row"].zero_()
    dataset.close()


@pytest.mark.filterwarnings("ignore:rows are drawn from all over")
@pytest.mark.parametrize("window_bytes", [pytest.param(1 << 20, marks=pytest.mark.soak), 60], ids=["fits", "larger"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_torch_does_with_indices_works(tmp_path: Path, window_bytes: int, num_workers: int) -> None:
    dataset = ParquetDataset(numbers(tmp_path, [[3, 2], [5], [4]]), window_bytes=window_bytes)
    assert flat(rows(DataLoader(dataset, batch_size=3, num_workers=num_workers))) == list(range(14))
    assert rows(DataLoader(Subset(dataset, [9, 2, 2, 13]), batch_size=3)) == [[9, 2, 2], [13]]
    assert flat(rows(DataLoader(Subset(dataset, range(0, 14, 3)), batch_size=2))) == [0, 3, 6, 9, 12]
    parts = random_split(dataset, [10, 4])
    assert sorted(flat(rows(DataLoader(parts[0], 4))) + flat(rows(DataLoader(parts[1], 4)))) == list(range(14))
    dataset.close()
    shuffled = [flat(rows(DataLoader(dataset, 4, shuffle=True, num_workers=num_workers))) for _ in range(2)]
    assert shuffled[0] != shuffled[1]
    assert sorted(shuffled[0]) == sorted(shuffled[1]) == list(range(14))
    dataset.close()


def test_drawing_from_all_over_a_large_table_is_warned_of(tmp_path: Path) -> None:
    dataset = ParquetDataset(numbers(tmp_path, [[3, 2], [5], [4]]), window_bytes=60)
    with pytest.warns(UserWarning, match="ParquetLoader"):
        assert [dataset[index]["row"].item() for index in (0, 13, 5, 0, 13, 5, 0, 13)] == [0, 13, 5, 0, 13, 5, 0, 13]


def test_a_collate_function_of_the_program_sees_rows(tmp_path: Path) -> None:
    dataset = ParquetDataset(numbers(tmp_path, [[5]]))

    def collate(batch: Any) -> Any:
        return [int(row["row"]) for row in batch], {**batch[0]}.keys() == set(dataset.columns), len(batch[:1])

    assert list(DataLoader(dataset, 3, collate_fn=collate)) == [([0, 1, 2], True, 1), ([3, 4], True, 1)]


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.soak)])
def test_a_shuffled_pass_has_each_row_once_in_another_order_each_epoch(tmp_path: Path, num_workers: int) -> None:
    dataset = ParquetDataset(numbers(tmp_path, [[30, 7], [], [1, 22]]), window_bytes=1000)
    loader = ParquetLoader(dataset, 7, shuffle=True, num_workers=num_workers)
    first, second = rows(loader), rows(loader)
    assert len(first) == len(loader) == 9
    assert [len(batch) for batch in first] == [7] * 8 + [4]
    assert sorted(flat(first)) == sorted(flat(second)) == list(range(60))
    assert first != second
    assert flat(first) != list(range(60))
    next(iter(loader))  # a stray one
    for _ in loader:
        break
    third = rows(loader)
    assert sorted(flat(third)) == list(range(60))
    assert third not in (first, second)
    dataset.close()
    torch.manual_seed(0)
    again = ParquetLoader(dataset, 7, shuffle=True)
    assert [rows(again), rows(again)] == [first, second]
    assert [len(batch) for batch in rows(ParquetLoader(dataset, 7, drop_last=True))] == [7] * 8
    assert flat(rows(ParquetLoader(dataset, 7))) == list(range(60))


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_two_passes_at_the_same_time_do_not_disturb_each_other(tmp_path: Path, num_workers: int) -> None:
    dataset = ParquetDataset(numbers(tmp_path, [[30, 7], [1, 22]]), window_bytes=1000)
    loaders = [ParquetLoader(dataset, 7, shuffle=True, seed=seed, num_workers=num_workers) for seed in (1, 2)]
    wanted = [rows(ParquetLoader(dataset, 7, shuffle=True, seed=seed)) for seed in (1, 2)]
    found = list(zip(*loaders, strict=True))
    assert [[pair[side]["row"].tolist() for pair in found] for side in (0, 1)] == wanted
    twice = list(zip(loaders[0], loaders[0], strict=True))
    assert all(sorted(flat([p[side]["row"].tolist() for p in twice])) == list(range(60)) for side in (0, 1))
    dataset.close()


@pytest.mark.parametrize("shuffle", [pytest.param(False, marks=pytest.mark.soak), True])
def test_passes_over_one_loader_go_on_side_by_side_and_one_that_is_left_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shuffle: bool
) -> None:
    begun: list[int] = []
    original = streams.blocks

    def noted(source: Any, order: Any, lane: Any, at: int, *rest: Any, **options: Any) -> Any:
        begun.append(at)
        return original(source, order, lane, at, *rest, **options)

    monkeypatch.setattr("lagom.extensions.data.parquet.reader.blocks", noted)
    dataset = ParquetDataset(numbers(tmp_path, [[30, 7], [1, 22]]), window_bytes=1000)
    loader = ParquetLoader(dataset, 7, shuffle, seed=3)
    pairs = list(zip(loader, loader, strict=True))
    assert all(sorted(flat([p[side]["row"].tolist() for p in pairs])) == list(range(60)) for side in (0, 1))
    assert begun == [0, 0]
    for batch in loader:
        assert len(batch["row"]) == 7
        break
    batches = iter(loader)
    next(batches)
    assert len(passes()) == 1  # nobody goes on with the one that was left
    other = iter(loader)
    next(other)
    assert len(passes()) == 2
    assert len([*batches, *other]) == 16
    assert begun == [0] * 5
    assert not passes()
    dataset.close()


LAYOUTS = st.lists(st.lists(st.integers(0, 12), max_size=4), min_size=1, max_size=5).filter(
    lambda x: sum(map(sum, x)) > 0
)


@settings(max_examples=10, deadline=None, derandomize=True)
@given(LAYOUTS, st.integers(1, 9), st.integers(40, 2000), st.integers(1, 8), st.booleans(), st.integers(0, 99))
def test_shares_are_even_and_exact_for_any_layout(
    layout: list[list[int]], batch_size: int, window_bytes: int, streams: int, shuffle: bool, seed: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        numbers(Path(folder), layout)
        dataset = ParquetDataset(folder, window_bytes=window_bytes, streams=streams)
        whole = rows(ParquetLoader(dataset, batch_size, shuffle, seed=seed))
        assert sorted(flat(whole)) == list(range(sum(map(sum, layout))))
        for world_size in (2, 3, 4):
            copies = [pickle.loads(pickle.dumps(dataset)) for _ in range(world_size)]
            source = dataset.batches(batch_size, shuffle=shuffle, seed=seed)
            for number, batch in enumerate(source):
                shares = [batch.deal(rank, world_size) for rank in range(world_size)]
                found = [
                    copies[r].__getitems__(s).batch()["row"].tolist() if len(s) else [] for r, s in enumerate(shares)
                ]
                assert sorted(flat(found)) == sorted(whole[number])
                assert max(map(len, found)) - min(map(len, found)) <= 1
                if not len(shares[-1]):
                    # What a rank without a row gets must not disturb what it reads next.
                    copies[-1].__getitems__(batch[:1])
            for copy in copies:
                copy.close()


@settings(max_examples=10, deadline=None, derandomize=True)
@given(LAYOUTS, st.integers(1, 5), st.integers(1, 5), st.integers(0, 30), st.booleans(), st.integers(40, 2000))
def test_resuming_is_as_if_it_had_never_stopped(
    layout: list[list[int]], before: int, after: int, stop: int, shuffle: bool, window_bytes: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        dataset = ParquetDataset(numbers(Path(folder), layout), window_bytes=window_bytes)
        first = ParquetLoader(dataset, before, shuffle)
        seen = []
        for number, batch in enumerate(first):
            seen += batch["row"].tolist()
            if number == stop:
                break
        state = pickle.loads(pickle.dumps(first.state_dict()))
        second = ParquetLoader(ParquetDataset(folder, window_bytes=window_bytes // 2 + 1), after, shuffle)
        second.load_state_dict(state)
        torch.manual_seed(7)
        if state["epoch"] == 0:  # else it had come to its end; one that stops at the last batch has not
            assert len(second) == -(-(len(dataset) - len(seen)) // after)
            seen += flat(rows(second))
        whole = ParquetLoader(dataset, 3, shuffle)
        whole.load_state_dict({**state, "epoch": 0, "rows": 0})
        assert seen == flat(rows(whole))
        assert flat(rows(second)) == flat(rows(whole))
        for one in (first, second, whole):
            table: Any = one.dataset
            table.close()


@pytest.mark.soak  # the next test compares the batches of workers by default
@settings(max_examples=2, deadline=None, derandomize=True)
@given(LAYOUTS, st.integers(1, 5), st.integers(40, 2000), st.integers(1, 8), st.integers(0, 5))
def test_workers_change_neither_batches_nor_states(
    layout: list[list[int]], batch_size: int, window_bytes: int, streams: int, stop: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        numbers(Path(folder), layout)
        found = []
        for num_workers in (0, 2):
            dataset = ParquetDataset(folder, window_bytes=window_bytes, streams=streams)
            loader = ParquetLoader(dataset, batch_size, True, seed=5, num_workers=num_workers)
            first = rows(loader)
            part = []
            for number, batch in enumerate(loader):
                part.append(batch["row"].tolist())
                if number == stop:
                    break
            state = loader.state_dict()
            other = ParquetLoader(dataset, batch_size, True, num_workers=num_workers)
            other.load_state_dict(state)
            found.append((first, part, state, rows(other)))
            dataset.close()
        assert found[0] == found[1]
        first, part, state, rest = found[0]
        assert sorted(flat(first)) == list(range(sum(map(sum, layout))))
        if state["epoch"] == 1:  # else the second epoch had come to its end
            assert sorted(flat(part) + flat(rest)) == sorted(flat(first))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_that_workers_fetched_ahead_do_not_count_as_seen(tmp_path: Path, num_workers: int) -> None:
    dataset = ParquetDataset(numbers(tmp_path, [[20, 20]]))
    loader = ParquetLoader(dataset, 4, True, seed=3, num_workers=num_workers)
    assert loader.state_dict()["rows"] == 0
    iterator = iter(loader)
    seen = [next(iterator)["row"].tolist() for _ in range(3)]
    state = loader.state_dict()
    assert (state["epoch"], state["rows"]) == (0, 12)
    del iterator
    other = ParquetLoader(dataset, 4, True, num_workers=num_workers)
    other.load_state_dict(state)
    assert seen + rows(other) == rows(ParquetLoader(dataset, 4, True, seed=3))
    assert (other.state_dict()["epoch"], other.state_dict()["rows"]) == (1, 0)
    with pytest.raises(ValueError, match="another data set"):
        ParquetLoader(ParquetDataset(tmp_path, columns=["x"]), 4, True).load_state_dict(state)
    wrong: Any
    for wrong in (None, {}, {"rows": 3}):
        with pytest.raises(ValueError, match=r"the state is .*; it is what state_dict\(\) of such a loader gave"):
            other.load_state_dict(wrong)
    dataset.close()


def test_filters_that_partitions_answer_count_the_rows_of_each_row_group(tmp_path: Path) -> None:
    for day, layout in (("day=1", [[3, 4]]), ("day=2", [[5, 2]])):
        numbers(tmp_path / day, layout)
    for filters, wanted in (
        ([("day", "=", 2)], 7),
        ([[("day", "=", 1)], [("row", ">", 4)]], 9),
        ([("day", ">", 2)], 0),
    ):
        if not wanted:
            with pytest.raises(DataError, match=r"no row .* passes the filters"):
                ParquetDataset(tmp_path, filters=filters)
            continue
        dataset = ParquetDataset(tmp_path, filters=filters)
        assert len(dataset) == sum(len(batch["row"]) for batch in ParquetLoader(dataset, 4)) == wanted


def test_filters_keep_rows_and_count_them(tmp_path: Path) -> None:
    numbers(tmp_path / "a", [[10, 10], [10]])
    dataset = ParquetDataset(tmp_path / "a", columns=["x"], filters=[("row", ">=", 8), ("row", "<", 13)])
    assert len(dataset) == 5
    assert len(dataset.table.groups) == 2
    (batch,) = DataLoader(dataset, 9)
    assert list(batch) == ["x"]
    assert torch.equal(batch["x"], torch.sin(torch.arange(8.0, 13.0, dtype=torch.float64)))
    assert len(ParquetLoader(dataset, 2, True)) == 3
    either = ParquetDataset(tmp_path / "a", filters=[[("row", "<", 2)], [("row", "in", [7, 29])]])
    assert sorted(flat(rows(ParquetLoader(either, 3, True)))) == [0, 1, 7, 29]
    with pytest.raises(DataError, match=r"no row of .* passes"):
        ParquetDataset(tmp_path / "a", filters=[("row", ">", 99)])
    with pytest.raises(ValueError, match="filters"):
        ParquetDataset(tmp_path / "a", filters="row > 3")
    with pytest.raises(ValueError, match="no column 'z'"):
        ParquetDataset(tmp_path / "a", filters=[("z", ">", 3)])
    either.close()


def test_folders_may_stand_for_columns(tmp_path: Path) -> None:
    for day, kind in ((1, "a b"), (2, "c")):
        written(tmp_path / f"day={day}" / f"kind={kind.replace(' ', '%20')}", {"row": [day * 10, day * 10 + 1]})
    (tmp_path / "_SUCCESS").touch()
    (tmp_path / "day=1" / ".hidden").write_text("no")
    dataset = ParquetDataset(tmp_path)
    assert dataset.columns == ["row", "day", "kind"]
    (batch,) = DataLoader(dataset, 4)
    assert batch["day"].tolist() == [1, 1, 2, 2]
    assert batch["kind"] == ["a b", "a b", "c", "c"]
    second = ParquetDataset(tmp_path, columns=["row"], filters=[("day", "=", 2)])
    assert [batch["row"].tolist() for batch in DataLoader(second, 4)] == [[20, 21]]
    assert second.columns == ["row"]
    only = ParquetDataset(tmp_path, columns=["day"])
    assert [batch["day"].tolist() for batch in ParquetLoader(only, 3)] == [[1, 1, 2], [2]]


def test_a_list_of_files_a_file_and_urls_are_read(tmp_path: Path) -> None:
    numbers(tmp_path, [[2], [3], [1]])
    files = sorted(tmp_path.iterdir())
    assert rows(DataLoader(ParquetDataset([files[2], str(files[0])]), 9)) == [[5, 0, 1]]
    assert rows(DataLoader(ParquetDataset(files[1].as_uri()), 9)) == [[2, 3, 4]]
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.pipe("/bucket/part-0.parquet", files[1].read_bytes())
    try:
        assert rows(DataLoader(ParquetDataset("memory://bucket"), 9)) == [[2, 3, 4]]
        assert rows(DataLoader(ParquetDataset("/bucket", filesystem=memory), 9)) == [[2, 3, 4]]
    finally:
        memory.rm("/bucket", recursive=True)
    with pytest.raises(DataError, match="nosuch"):
        ParquetDataset("nosuch://bucket/x")


def test_what_is_no_data_set_is_said(tmp_path: Path) -> None:
    good = numbers(tmp_path / "good", [[4, 4], [4]])
    with pytest.raises(DataError, match="does not exist"):
        ParquetDataset(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds no data files"):
        ParquetDataset(tmp_path / "empty")
    with pytest.raises(DataError, match="has no rows"):
        ParquetDataset(numbers(tmp_path / "norows", [[0], []]))
    with pytest.raises(ValueError, match=r"no column 'z' in .*part-000.*\['row', 'x', 'y'\]"):
        ParquetDataset(good, columns=["z"])
    with pytest.raises(ValueError, match=r"columns is 'row'; say \['row'\]"):
        ParquetDataset(good, columns="row")
    with pytest.raises(ValueError, match="the data set is None; it is a path"):
        ParquetDataset(None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="window_bytes is '1 GB'; it is a whole number"):
        ParquetDataset(good, window_bytes="1 GB")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="batch_size is 0"):
        ParquetLoader(good, 0)
    with pytest.raises(ValueError, match="batches of its own"):
        ParquetLoader(good, 2, sampler=[1])
    (good / ".hoodie").mkdir()
    with pytest.raises(DataError, match="no longer current"):
        ParquetDataset(good)
    (good / ".hoodie").rmdir()
    (good / "metadata").mkdir()
    (good / "metadata" / "v1.metadata.json").write_text("{}")
    with pytest.raises(DataError, match="Iceberg"):
        ParquetDataset(good)
    for text, what in (
        (b"", "is empty"),
        (b"PAR1 but not really, not at all", "no Parquet file"),
        (b"ORC and more of it", "is an ORC file"),
    ):
        bad = tmp_path / f"bad{len(text)}"
        bad.mkdir()
        (bad / "part-7.parquet").write_bytes(text)
        with pytest.raises(DataError, match=f"part-7.parquet.*{what}"):
            ParquetDataset(bad)


def test_files_that_do_not_fit_together_are_named(tmp_path: Path) -> None:
    folder = written(tmp_path, {"a": [1], "b": [1.0]})
    pq.write_table(pa.table({"a": ["x"], "b": [1.0]}), folder / "part-1.parquet")
    with pytest.raises(DataError, match=r"column 'a' is int64 in .*part-0.parquet and string in .*part-1.parquet"):
        ParquetDataset(folder)
    assert len(ParquetDataset(folder, columns=["b"])) == 2
    twice = pa.Table.from_arrays([pa.array([1]), pa.array([2.0]), pa.array([3])], ["a", "b", "a"])
    pq.write_table(twice, folder / "part-1.parquet")
    with pytest.raises(DataError, match=r"part-1.parquet has 2 columns that are all called 'a'"):
        ParquetDataset(folder)
    pq.write_table(pa.table({"a": [1]}), folder / "part-1.parquet")
    with pytest.raises(DataError, match=r"column 'b' is in .*part-0.parquet but not in .*part-1.parquet"):
        ParquetDataset(folder)
    with pytest.raises(DataError, match="column 'b'"):
        ParquetDataset(folder, columns=["b"])


def test_a_file_that_is_gone_changed_or_damaged_is_an_error_not_a_shorter_epoch(tmp_path: Path) -> None:
    dataset = ParquetDataset(numbers(tmp_path, [[4], [4]]), window_bytes=10)
    loader = ParquetLoader(dataset, 4)
    last = tmp_path / "part-001.parquet"
    content, written = last.read_bytes(), last.stat().st_mtime_ns
    last.unlink()
    with pytest.raises(DataError, match=r"part-001.parquet is gone"):
        list(loader)
    last.write_bytes(content + b"more")
    with pytest.raises(DataError, match="written again since"):
        list(loader)
    damaged = bytearray(content)
    damaged[4:60] = os.urandom(56)
    last.write_bytes(damaged)
    os.utime(last, ns=(written, written))  # as a disk that fails leaves it
    with pytest.raises(DataError, match=r"part-001.parquet, row group 0"):
        list(loader)
    last.write_bytes(content)
    os.utime(last, ns=(written, written))
    assert flat(rows(loader)) == list(range(8))
    dataset.close()


def test_ranks_that_lack_rows_are_not_told_to_shuffle_otherwise(tmp_path: Path) -> None:
    """They take single rows of others, in place of their own; a warning would be an error here."""
    dataset = ParquetDataset(numbers(tmp_path, [[5] * 4, [5] * 4]), window_bytes=40, streams=4)
    last = pickle.loads(pickle.dumps(dataset))
    for batch in dataset.batches(1, shuffle=True, seed=1):
        share = batch.deal(3, 4)
        assert len(last.__getitems__(share if len(share) else batch[:1])) == 1
    last.close()


def test_names_may_have_dots_and_spaces(tmp_path: Path) -> None:
    """And count with their own bytes, not with those of the column that begins alike."""
    columns = {
        "a.b": ["z" * 1000] * 9,
        "a": range(9),
        "s.t": [{"u": n, "v.w": "y"} for n in range(9)],
        "b c.d": range(9),
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet", compression="none", use_dictionary=False)
    assert ParquetDataset(tmp_path, columns=["a.b"]).table.row_bytes > 1000
    assert ParquetDataset(tmp_path, columns=["a"]).table.row_bytes == 8
    found = ParquetDataset(tmp_path, filters=[("b c.d", ">", 5)])
    assert [
        (row["a"].item(), row["s.t"]["u"].item(), row["s.t"]["v.w"]) for row in map(found.__getitem__, range(3))
    ] == [(n, n, "y") for n in (6, 7, 8)]
    found.close()


@pytest.mark.soak  # test_bounds.py counts what ranks read
def test_a_rank_that_lacks_rows_of_short_batches_reads_on_in_its_lane(tmp_path: Path) -> None:
    """The rank reads rows of other ranks in their place, the first time before any of its own."""
    dataset = ParquetDataset(numbers(tmp_path, [[10] * 8]), window_bytes=2000)
    seen: list[int] = []
    for batch in dataset.batches(2, shuffle=True, seed=1):
        share = batch.deal(2, 4)
        found = dataset.__getitems__(share if len(share) else batch[:1]).batch()["row"].tolist()
        seen += found if len(share) else []
        current = passes()
        assert not seen or not current or current[0].lane == (2, 4)
    assert len(seen) == len(set(seen)) == 20
    dataset.close()


@pytest.mark.soak
def test_positions_reach_a_spawned_worker(tmp_path: Path) -> None:
    dataset = ParquetDataset(numbers(tmp_path, [[6, 5]]))
    loader = ParquetLoader(dataset, 4, True, seed=1, num_workers=1, multiprocessing_context="spawn")
    assert rows(loader) == rows(ParquetLoader(dataset, 4, True, seed=1))
    assert isinstance(next(iter(dataset.batches(3))), Positions)
    dataset.close()
