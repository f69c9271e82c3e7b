"""The record of the program's state in git."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from lagom.watch.git_info import GitCheckout


@pytest.fixture(autouse=True)
def _plain_git(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)


def git(folder: Path, *args: str) -> str:
    identity = ["-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "init.defaultBranch=main"]
    run = subprocess.run(["git", *identity, "-C", folder, *args], check=True, capture_output=True, text=True)
    return run.stdout.strip()


def test_commit_branch_and_changes_are_those_of_the_folder(tmp_path: Path) -> None:
    top = tmp_path / "project"
    (top / "inner").mkdir(parents=True)
    git(top, "init", "-q")
    first = GitCheckout(top / "inner")
    first.finish()
    assert first.facts() == {"folder": str(top), "branch": "main", "commit": None, "changes": []}
    (top / "train.py").write_text("1\n")
    git(top, "add", "-A")
    git(top, "commit", "-qm", "one")
    commit = git(top, "rev-parse", "HEAD")
    git(top, "checkout", "-qb", "feature/new")
    git(top, "pack-refs", "--all")
    (top / "train.py").write_text("2\n")
    (top / "new.py").write_text("")
    changed = GitCheckout(top / "inner")
    facts = changed.facts()
    assert facts is not None
    assert facts["changes"] is None
    changed.finish()
    changed.finish()
    expected = {"folder": str(top), "branch": "feature/new", "commit": commit}
    assert changed.facts() == {**expected, "changes": [" M train.py", "?? new.py"]}
    git(top, "worktree", "add", "-q", "--detach", str(tmp_path / "beside"))
    beside = GitCheckout(tmp_path / "beside")
    beside.finish()
    assert beside.facts() == {"folder": str(tmp_path / "beside"), "branch": None, "commit": commit, "changes": []}


def test_many_changes_are_kept_in_part(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    for number in range(150):
        (tmp_path / f"{number}.py").write_text("")
    checkout = GitCheckout(tmp_path)
    checkout.finish()
    facts = checkout.facts()
    assert facts is not None
    assert len(facts["changes"]) == 101
    assert facts["changes"][-1] == "… 50 more"


def test_a_folder_that_git_does_not_know_and_a_machine_without_git(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert GitCheckout(tmp_path).facts() is None
    git(tmp_path, "init", "-q")
    monkeypatch.setenv("PATH", str(tmp_path))
    checkout = GitCheckout(tmp_path)
    checkout.finish()
    assert checkout.facts() == {"folder": str(tmp_path), "branch": "main", "commit": None, "changes": None}
