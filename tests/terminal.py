"""``Terminal``: a program in a terminal of its own, to type at it."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).parent.parent
_PATIENCE_S = 60.0


class Terminal:
    """Runs Python with ``arguments`` in ``folder``; its process is gone when the ``with`` ends."""

    def __init__(self, arguments: Sequence[str], folder: Path, env: Mapping[str, str] | None = None) -> None:
        ours, theirs = pty.openpty()
        self._fd, self.shown = ours, ""
        """All that the terminal has shown."""
        self._seen = 0
        self.process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            cwd=folder,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "TERM": "dumb", "LAGOM_RUN_DIR": "", **(env or {})},
        )
        os.close(theirs)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._fd)

    def expect(self, text: str, patience_s: float = _PATIENCE_S) -> str:
        """Wait until ``text`` is shown, after what was expected before; return what came before it."""
        deadline = time.monotonic() + patience_s
        while (at := self.shown.find(text, self._seen)) < 0:
            if not self._read(deadline):
                raise AssertionError(f"{text!r} was not shown:\n{self.shown}")
        before, self._seen = self.shown[self._seen : at], at + len(text)
        return before

    def type(self, line: str) -> None:
        """Type ``line`` and Enter."""
        os.write(self._fd, f"{line}\n".encode())

    def interrupt(self) -> None:
        """Press Ctrl-C: the terminal controls no process, so the signal is sent, once the program waits for a key.

        Python's readline misses one that comes after its prompt, and before it waits.
        """
        while Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "S":
            time.sleep(0.01)
        self.process.send_signal(signal.SIGINT)

    def end(self, patience_s: float = _PATIENCE_S) -> int:
        """Wait for the program's end; return its exit status."""
        deadline = time.monotonic() + patience_s
        while self._read(deadline):
            pass
        return self.process.wait(max(0.1, deadline - time.monotonic()))

    def _read(self, deadline: float) -> bool:
        """Take in what the terminal shows; return False at its end."""
        ready, _, _ = select.select([self._fd], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise AssertionError(f"nothing more was shown:\n{self.shown}")
        try:
            data = os.read(self._fd, 1 << 16)
        except OSError:  # the last process that had the terminal has ended
            return False
        self.shown += re.sub("\x1b\\[[0-9;?]*[a-zA-Z]", "", data.decode(errors="replace")).replace("\r\n", "\n")
        return bool(data)
