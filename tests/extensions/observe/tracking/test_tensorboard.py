"""``lagom.extensions.observe.tracking.tensorboard``: TensorBoard's events at a URL are those of one process."""

from __future__ import annotations

from typing import Any

from tensorboard.compat.tensorflow_stub.io.gfile import LocalFileSystem, register_filesystem
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from torch.utils.tensorboard import SummaryWriter

from lagom import disk as files
from lagom.session.session import Session
from tests.ranks import run_ranks

URL = "counted://bucket/run"


class Counted(LocalFileSystem):  # type: ignore[misc]
    """A store far away, which notes who writes what."""

    def __init__(self) -> None:
        self.written: list[str] = []

    def exists(self, filename: str) -> bool:
        return filename in self.written

    def makedirs(self, path: str) -> None:
        self.written.append(path)

    def write(self, filename: str, file_content: Any, binary_mode: bool = False) -> None:
        self.written.append(filename)

    append = write


def log(_: Session) -> tuple[bool, str]:
    """Log as a single-process program does; return whether the URL has files, and the writer's folder."""
    store = Counted()
    register_filesystem("counted", store)
    with SummaryWriter(URL) as writer:
        writer.add_scalar("loss", 1.0, 0)
        writer.flush()
        folder = writer.get_logdir()
        writer.add_hparams({"lr": 0.1}, {"loss": 1.0})
    return bool(store.written), folder


def log_apart(session: Session) -> tuple[bool, str]:
    files.asked_for_rank()
    return log(session)


def test_events_at_a_url_are_written_by_rank_0_alone() -> None:
    before = vars(EventFileWriter)["__init__"]
    assert run_ranks(3, log) == [(True, URL), (False, URL), (False, URL)]
    assert vars(EventFileWriter)["__init__"] is before


def test_ranks_that_a_program_asks_for_write_their_own() -> None:
    assert run_ranks(2, log_apart) == [(True, URL)] * 2
