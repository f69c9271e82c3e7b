"""``GitCheckout``: the git commit of the program's folder, and the changes since."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from pathlib import Path
from typing import IO, Any

_MAX_CHANGES = 100
_PATIENCE_S = 2.0
"""Seconds that the end of a run waits for ``git status``, which has run since the run began."""


class GitCheckout:
    """The checkout of a folder when a run begins; ``git status`` is slower than a launch, so it runs in background."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.commit, self.branch = _read(folder)
        self._changes: list[str] | None = None
        self._output: IO[bytes] | None = None
        self._git: subprocess.Popen[bytes] | None = None
        if self.folder is not None:
            with contextlib.suppress(OSError):
                self._ask(self.folder)

    def facts(self) -> dict[str, Any] | None:
        """Return the facts for JSON, or None without git.

        ``changes`` are lines of ``git status --short``; None before ``finish``, or if git failed or took too long.
        """
        if self.folder is None:
            return None
        return {
            "folder": os.fspath(self.folder),
            "branch": self.branch,
            "commit": self.commit,
            "changes": self._changes,
        }

    def finish(self) -> None:
        """Read the changes that ``git status`` has found; give up if it takes too long."""
        if self._git is None or self._output is None:
            return
        try:
            if self._git.wait(_PATIENCE_S) == 0:
                self._output.seek(0)
                lines = self._output.read(1 << 20).decode(errors="replace").splitlines()
                left = [f"… {len(lines) - _MAX_CHANGES} more"] if len(lines) > _MAX_CHANGES else []
                self._changes = lines[:_MAX_CHANGES] + left
        except subprocess.TimeoutExpired:
            self._git.kill()
            self._git.wait()
        self._output.close()
        self._git = self._output = None

    def _ask(self, folder: Path) -> None:
        command = ["git", "-C", os.fspath(folder), "status", "--short", "--untracked-files=normal"]
        output = tempfile.TemporaryFile()  # noqa: SIM115  (closed by finish; a pipe could fill)
        try:
            self._git = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
            )
        except OSError:
            output.close()
            raise
        self._output = output


def _read(folder: Path) -> tuple[Path | None, str | None, str | None]:
    """Return the top folder, the commit and the branch, from git's own files."""
    with contextlib.suppress(OSError, StopIteration, ValueError):
        top = next(one for one in (folder, *folder.parents) if (one / ".git").exists())
        git = top / ".git"
        if git.is_file():  # a worktree
            git = top / git.read_text().partition(": ")[2].strip()
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return top, head, None
        name = head.removeprefix("ref: ")
        return top, _commit(git, name), name.removeprefix("refs/heads/")
    return None, None, None


def _commit(git: Path, name: str) -> str | None:
    common = git / (git / "commondir").read_text().strip() if (git / "commondir").exists() else git
    if (common / name).exists():
        return (common / name).read_text().strip()
    with contextlib.suppress(OSError, StopIteration):
        packed = (common / "packed-refs").read_text().splitlines()
        return next(line.split()[0] for line in packed if line.endswith(f" {name}"))
    return None  # a branch without a commit
