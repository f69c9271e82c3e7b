"""``lagom.restart.split_pages``: memory that is written after a fork is in huge pages again, and keeps its values."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lagom import experiment
from lagom.config import TorchDistributedConfig
from tests.huge_pages import can_collapse, only_if_asked
from tests.restart.twin_programs import large

PROGRAM = """
import json, mmap, os
from pathlib import Path
import numpy as np
from lagom.restart.split_pages import SplitPages

MB = 1 << 20
written, read, sparse = (np.ones(32 * MB // 8) for _ in range(3))

def megabytes(name):
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(name)) // 1024

pages, facts = SplitPages(), []
for number in range(4):
    ours, theirs = os.pipe()
    answer, answered = os.pipe()
    pages.before_fork()
    fork = os.fork()
    if fork == 0:
        os.close(theirs)
        os.read(ours, 1)
        sums = [float(array.sum()) for array in (written, read, sparse)]
        os.write(answered, json.dumps(sums).encode())
        os._exit(0)
    os.close(ours)
    os.close(answered)
    before = [float(array.sum()) for array in (written, read, sparse)]
    pages.copy_written()
    early = megabytes("Private")
    written += 1
    sparse[:: MB // 2] += 1
    split = megabytes("AnonHuge")
    for _ in range(2):  # as for a snapshot that takes long to write
        pages.join()
    joined, kept = megabytes("AnonHuge"), megabytes("Private")
    os.close(theirs)
    sums = json.loads(os.read(answer, 1000))
    os.waitpid(fork, 0)
    os.close(answer)
    facts.append({"sums": sums == before, "early": early, "split": split, "joined": joined, "private": kept})
plain = mmap.mmap(-1, 32 * MB, flags=mmap.MAP_PRIVATE)
plain[:] = bytes([1]) * len(plain)
ended = []
for pages in (SplitPages(), pages):
    pages.before_fork()
    if (fork := os.fork()) == 0:
        os._exit(0)
    os.waitpid(fork, 0)
    pages.copy_written()
    plain[:] = bytes([2]) * len(plain)
    before = megabytes("AnonHuge")
    pages.join(is_over=True)
    ended.append(megabytes("AnonHuge") - before)
values = [float(array.min()) for array in (written, read)] + [float(array.max()) for array in (written, sparse)]
print(json.dumps({"facts": facts, "values": values, "ended": ended}))
"""


def facts(tunables: str, before: str = "") -> dict[str, Any]:
    env = {**os.environ, "GLIBC_TUNABLES": tunables, "NUMPY_MADVISE_HUGEPAGE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", f"{before}\n{PROGRAM}"], env=env, capture_output=True, text=True, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_fork_and_the_process_keep_their_values() -> None:
    for setting in (0, 1):
        found = facts(f"glibc.malloc.hugetlb={setting}")
        assert all(one["sums"] for one in found["facts"])
        assert found["values"] == [5.0, 1.0, 5.0, 5.0]


@pytest.mark.skipif(not can_collapse(), reason="this system cannot join pages")
def test_what_is_written_is_in_huge_pages_again_and_what_is_read_stays_shared() -> None:
    found = facts("glibc.malloc.hugetlb=1")["facts"]
    for number, one in enumerate(found):
        is_noted = number >= 2
        assert is_noted == (one["early"] > 24)
        assert is_noted == (one["split"] > 64)  # of 96 MB: 32 are written, and some blocks of others
        assert one["joined"] > 64
        assert one["private"] < 32 + 24  # without the data that is read, and the blocks of single values


@pytest.mark.skipif(not can_collapse(), reason="this system cannot join pages")
def test_nothing_is_joined_when_the_fork_has_ended_before_it_was_seen_what_is_written() -> None:
    assert max(facts("glibc.malloc.hugetlb=1")["ended"]) < 8


def test_a_system_that_hides_a_process_s_pages_changes_nothing() -> None:
    hidden = """
import builtins
real = open
builtins.open = lambda path, *args, **settings: real(str(path).replace("pagemap", "missing"), *args, **settings)
"""
    found = facts("glibc.malloc.hugetlb=1", hidden)
    assert all(one["sums"] for one in found["facts"])


@pytest.mark.skipif(not only_if_asked(), reason="this system has huge pages for all programs, or for none")
def test_who_has_chosen_small_pages_keeps_them() -> None:
    assert all(one["joined"] == one["split"] == 0 for one in facts("glibc.malloc.hugetlb=0")["facts"])


@pytest.mark.soak  # the tests above show by default what a rank does
@pytest.mark.skipif(not can_collapse() or sys.version_info < (3, 11), reason="this system cannot join pages")
@pytest.mark.parametrize(
    "settings", [{"world_size": 2, "sleeping_twins": True}, {"world_size": 1, "snapshot_every_s": 1.0}]
)
def test_a_rank_has_its_state_in_huge_pages_after_forks_as_before(tmp_path: Path, settings: dict[str, Any]) -> None:
    config = TorchDistributedConfig(launcher="local", run_dir=tmp_path, hparams={"num_forks": 3}, **settings)
    first, last = experiment.lagom(large, config).per_rank[0]
    assert last < first + 24  # of 48 MB: weights, gradients, momentum
