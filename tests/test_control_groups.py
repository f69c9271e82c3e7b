"""``lagom.control_groups``: cores are those of the process, or fewer if its container has less processor time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lagom.control_groups import available_cores


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    return 16


def written(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")


@pytest.mark.parametrize(("inner", "outer", "found"), [("max", "max", 16), ("400000", "max", 4), ("max", "150000", 2)])
def test_the_least_quota_of_a_group_and_its_parents_counts(
    tmp_path: Path, cores: int, inner: str, outer: str, found: int
) -> None:
    own = tmp_path / "own"
    own.write_text("0::/pods/one\n")
    written(tmp_path / "pods" / "one", cpu__max=f"{inner} 100000")
    written(tmp_path / "pods", cpu__max=f"{outer} 100000")
    assert available_cores(tmp_path, own) == found


def test_version_1_has_quota_and_period_in_two_files(tmp_path: Path, cores: int) -> None:
    own = tmp_path / "own"
    own.write_text("4:memory:/docker/a\n3:cpu,cpuacct:/docker/a\n0::/\n")
    written(tmp_path / "cpu", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    assert available_cores(tmp_path, own) == cores
    written(tmp_path / "cpu" / "docker" / "a", cpu__cfs_quota_us="50000", cpu__cfs_period_us="100000")
    assert available_cores(tmp_path, own) == 1


def test_without_control_groups_all_cores_count(tmp_path: Path, cores: int) -> None:
    assert available_cores(tmp_path, tmp_path / "missing") == cores
