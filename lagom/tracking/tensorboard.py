"""``write_events_once``: lets only rank 0 write TensorBoard's events to a URL, since ranks' own disks hold no URLs.

Events are on the disk when the program saves a file: a new attempt after a loss goes on with both.
"""

from __future__ import annotations

import functools
import queue
import re
import tempfile
import threading
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from lagom import files
from lagom.patching.import_hooks import on_import
from lagom.patching.replace import replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

    from lagom.restart.sleeping_twin import TwinForks
    from lagom.session.session import Session

_MODULES = "tensorboard.summary.writer.event_file_writer", "tensorboardX.event_file_writer"
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


@contextmanager
def write_events_once(session: Session) -> Iterator[None]:
    """Patch TensorBoard's writers: on ranks other than 0, events for a URL go to a temporary folder instead.

    Writers that are made after the program has asked for its rank keep their URL, which may differ between ranks.
    """
    with ExitStack() as stack:

        def change(module: ModuleType) -> None:
            writer = vars(module)["EventFileWriter"]
            stack.enter_context(replaced(writer, "__init__", _aside(session, vars(writer)["__init__"])))

        with on_import(dict.fromkeys(_MODULES, change)):
            yield


def _aside(session: Session, original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init(self: Any, logdir: Any, *args: Any, **kwargs: Any) -> None:
        if session.rank == 0 or not session.distributed or not _URL.match(str(logdir)) or files.has_asked():
            original(self, logdir, *args, **kwargs)
            files.flush_at_save(self)
        else:
            original(self, tempfile.mkdtemp(prefix="events-", dir=session.host_dir), *args, **kwargs)
            self._logdir = logdir  # which get_logdir() tells
        if session.twins is not None and hasattr(self, "_async_writer"):
            _restart_in_twins(session.twins, self._async_writer)

    return init


def _restart_in_twins(twins: TwinForks, writer: Any) -> None:
    """Have ``writer``, which has a thread, write all events before each fork, and start the thread in a twin."""

    def flush() -> None:
        if not writer._closed:
            writer.flush()

    def restart() -> None:
        if not writer._closed:
            thread, writer._lock = writer._worker, threading.Lock()
            writer._byte_queue = queue.Queue(writer._byte_queue.maxsize)
            writer._worker = type(thread)(writer._byte_queue, writer._writer, thread._flush_secs)
            writer._worker.start()

    twins.before.append(flush)
    twins.after.append(restart)
