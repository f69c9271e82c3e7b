"""``write_events_once``: lets only rank 0 write TensorBoard's events to a URL, since ranks' own disks hold no URLs.

Queued events are written to disk before the program saves a file, and before a snapshot of the program is taken, since
a new attempt after a loss goes on from these.
"""

from __future__ import annotations

import functools
import os
import pickle
import re
import sys
import tempfile
import threading
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from lagom import disk as files
from lagom.patching.importers import on_import
from lagom.patching.replace import replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

    from lagom.session.session import Session

_MODULES = "tensorboard.summary.writer.event_file_writer", "tensorboardX.event_file_writer"
_QUEUED = "_AsyncWriter"
"""TensorBoard's class that queues events for the thread which writes them to the file."""
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
        is_url = _URL.match(str(logdir)) is not None
        if session.rank == 0 or not session.distributed or not is_url or files.has_asked():
            original(self, logdir, *args, **kwargs)
            files.flush_at_save(self)
            if hasattr(self, "_async_writer") and not is_url:
                open(self._file_name, "ab").close()  # makes it count as a growing file even before its first event
        else:
            original(self, tempfile.mkdtemp(prefix="events-", dir=session.host_dir), *args, **kwargs)
            self._logdir = logdir  # get_logdir() returns the program's own folder

    return init


def write_queued_events() -> None:
    """Wait until the threads of TensorBoard's writers (not tensorboardX's) have written all that was logged so far."""
    for thread in threading.enumerate():
        if type(thread).__module__ == _MODULES[0]:
            vars(thread)["_queue"].join()


def reduce_event_writer(value: Any) -> Any:
    """Reduce TensorBoard's queue of events, which must be empty, for pickle; NotImplemented for other objects.

    The writer that the queue belongs to pickles by default; once unpickled, it appends to its file.

    Raises:
        PicklingError: if the events do not go to a file that Python writes.
    """
    module = sys.modules.get(_MODULES[0])
    if module is None or type(value) is not vars(module)[_QUEUED]:
        return NotImplemented
    name = getattr(value._writer._writer, "filename", None)  # TensorFlow's own files have none
    if name is None or _URL.match(os.fsdecode(name)):
        raise pickle.PicklingError("TensorBoard's events go elsewhere than to a file that Python writes")
    limits = value._byte_queue.maxsize, value._worker._flush_secs
    return _queue_again, (type(value), value._writer, *limits, value._closed)


def _queue_again(kind: Any, writer: Any, max_queue_size: int, flush_secs: float, is_closed: bool) -> Any:
    found = kind(writer, max_queue_size, flush_secs)
    files.flush_at_save(found)
    if is_closed:
        found._closed = True
        found._worker.stop()
    return found
