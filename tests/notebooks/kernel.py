"""``Notebook``: a Jupyter kernel of its own, driven cell by cell as a front end does it."""

from __future__ import annotations

import os
import queue
import sys
import textwrap
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).parents[2]
_PATIENCE_S = 50.0


@dataclass
class Cell:
    """The output of a cell so far."""

    id: str
    streams: dict[str, str] = field(default_factory=lambda: {"stdout": "", "stderr": ""})
    displays: list[dict[str, Any]] = field(default_factory=list)
    """MIME bundles in the order they came, renewals among them."""
    value: dict[str, str] = field(default_factory=dict)
    """The MIME bundle of the cell's last line, where that has a value."""
    error: str = ""
    """Name and message of the cell's exception."""
    traceback: str = ""
    over: bool = False

    @property
    def out(self) -> str:
        """Text that the cell wrote to standard output."""
        return self.streams["stdout"]

    @property
    def err(self) -> str:
        """Text that the cell wrote to standard error."""
        return self.streams["stderr"]


class Notebook:
    """A kernel that stands in ``folder``; gone when its ``with`` ends."""

    def __init__(self, folder: Path, python: str = sys.executable) -> None:
        from jupyter_client.manager import KernelManager

        self.folder = folder
        self._python = python
        self._kernel = KernelManager(kernel_name="python3")

    def __enter__(self) -> Notebook:
        env = os.environ | {"PYTHONPATH": str(ROOT), "LAGOM_RUN_DIR": str(self.folder / "runs")}
        assert self._kernel.kernel_spec is not None
        self._kernel.kernel_spec.argv[0] = self._python
        self._kernel.start_kernel(cwd=str(self.folder), env=env)
        self._client: Any = self._kernel.blocking_client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=_PATIENCE_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._client.stop_channels()
        self._kernel.shutdown_kernel(now=True)
        self._kernel.cleanup_resources()

    @property
    def pid(self) -> int:
        """The kernel's process."""
        pid: int = self._kernel.provisioner.process.pid  # type: ignore[union-attr]
        return pid

    def run(self, text: str, patience_s: float = _PATIENCE_S) -> Cell:
        """Run a cell to its end."""
        cell = self.start(text)
        self.wait(cell, patience_s=patience_s)
        return cell

    def start(self, text: str, has_input: bool = True) -> Cell:
        """Begin to run a cell; without ``has_input``, as nbclient and papermill do."""
        return Cell(self._client.execute(textwrap.dedent(text).strip(), allow_stdin=has_input))

    def wait(self, cell: Cell, until: str = "", patience_s: float = _PATIENCE_S) -> None:
        """Take in what the kernel says until ``cell`` has written ``until``, or is over."""
        deadline = time.monotonic() + patience_s
        try:
            while not cell.over and not (until and until in cell.out):
                self._take(cell, self._client.get_iopub_msg(timeout=max(0.01, deadline - time.monotonic())))
        except queue.Empty:
            raise TimeoutError(f"the cell is not done after {patience_s:.0f} s:\n{cell.out}\n{cell.err}") from None

    def type(self, line: str, patience_s: float = _PATIENCE_S) -> str:
        """Wait until the kernel asks for input, and type ``line``; return what it asked."""
        try:
            prompt: str = self._client.get_stdin_msg(timeout=patience_s)["content"]["prompt"]
        except queue.Empty:
            raise TimeoutError(f"the kernel asked for no input in {patience_s:.0f} s") from None
        self._client.input(line)
        return prompt

    def interrupt(self) -> None:
        """Interrupt the kernel, as the notebook's stop button does."""
        self._kernel.interrupt_kernel()

    def _take(self, cell: Cell, message: dict[str, Any]) -> None:
        kind, content = message["msg_type"], message["content"]
        if message["parent_header"].get("msg_id") != cell.id:
            return
        if kind == "stream":
            cell.streams[content["name"]] += content["text"]
        elif kind in ("display_data", "update_display_data"):
            cell.displays.append(content["data"])
        elif kind == "execute_result":
            cell.value = content["data"]
        elif kind == "error":
            cell.error = f"{content['ename']}: {content['evalue']}"
            cell.traceback = "\n".join(content["traceback"])
        elif kind == "status" and content["execution_state"] == "idle":
            cell.over = True
