"""``CheckpointFiles``: lets all ranks see a DCP checkpoint that rank 0 alone writes. See Note [Files of rank 0]."""

from __future__ import annotations

import base64
import functools
import json
import os
import socket
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any

from lagom.disk.install import knows_rank, on_real_disk, path_to_read
from lagom.disk.stand_ins import is_stand_in, write_stand_in
from lagom.errors import LagomError
from lagom.patching.replace import replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lagom.session.session import Session

_METADATA = ".metadata"
_SAVE, _LOAD = "torch.distributed.checkpoint.save()", "torch.distributed.checkpoint.load()"
_READS = "read_metadata", "read_data"
"""Methods of a storage reader that read files."""


class CheckpointFiles:
    """Coordinates the ranks at ``save`` and ``load``, and gives each rank the files of rank 0."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def tell_saved(self, folder: str | None, metadata: Any = None, error: str = "") -> None:
        """Tell the other ranks how rank 0's save into ``folder`` has ended; they answer its requests until then.

        Args:
            metadata: what torch's ``save`` has returned on rank 0; None on other ranks, and after an error.
            error: why rank 0 could not write the checkpoint.
        """
        if knows_rank():
            return  # rank 0 may be here alone
        written = _describe_files(folder, metadata) if folder is not None and metadata is not None else None
        told, written = self._exchange(_SAVE, [error, written])[0]
        if self._session.rank == 0:
            return
        if told:
            raise LagomError(f"rank 0 could not write the checkpoint: {told}")
        if folder is not None and written is not None:
            _put_stand_ins(folder, *written)

    @contextmanager
    def reading(self, given: dict[str, Any]) -> Iterator[None]:
        """Let ``load`` with the keyword arguments ``given`` read rank 0's files in the block; a collective.

        Raises:
            LagomError: if this host does not see the files, or another rank could not load them.
        """
        if knows_rank():
            yield
            return
        from torch.distributed.checkpoint import CheckpointException  # a BaseException

        folder = local_folder(given, "storage_reader")
        place = self._exchange(_LOAD, None if folder is None else path_to_read(os.path.abspath(folder)))[0]
        try:
            with ExitStack() as stack:
                if folder is not None and place is not None and self._session.rank != 0:
                    _read_at(place, folder, given, stack)
                yield
        except (Exception, CheckpointException) as error:
            self._exchange(_LOAD, f"{type(error).__name__}: {error}")
            raise
        for rank, error_text in enumerate(self._exchange(_LOAD, "")):
            if error_text:
                raise LagomError(f"rank {rank} could not load the checkpoint: {error_text}")

    def _exchange(self, place: str, value: Any) -> list[Any]:
        assert self._session.group is not None
        self._session.check_place(place)
        return [json.loads(row) for row in self._session.group.all_gather_bytes(json.dumps(value).encode())]


def local_folder(given: dict[str, Any], storage: str) -> str | None:
    """Return the folder on a disk that ``save`` or ``load`` is given; None for another kind of storage.

    Args:
        storage: name of the keyword argument that has a storage writer or reader.
    """
    from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

    given_storage, place = given.get(storage), given.get("checkpoint_id")
    if given_storage is not None and not isinstance(given_storage, (FileSystemReader, FileSystemWriter)):
        return None
    if place is None:
        place = getattr(given_storage, "path", None)
    return None if place is None or "://" in os.fspath(place) else os.fspath(place)


def _describe_files(folder: str, metadata: Any) -> tuple[dict[str, int], str | None]:
    """Return the sizes in bytes of a checkpoint's files with tensors, by name, and its metadata file in base64."""
    names = {entry.relative_path for entry in (metadata.storage_data or {}).values()}
    sizes = {name: os.path.getsize(os.path.join(folder, name)) for name in sorted(names)}
    content = None
    with suppress(FileNotFoundError), open(os.path.join(folder, _METADATA), "rb") as file:
        content = base64.b64encode(file.read()).decode()
    return sizes, content


def _put_stand_ins(folder: str, sizes: dict[str, int], content: str | None) -> None:
    os.makedirs(folder, exist_ok=True)
    for name, size in sizes.items():
        write_stand_in(os.path.join(folder, name), size)
    if content is not None:
        with open(os.path.join(folder, _METADATA), "wb") as file:
            file.write(base64.b64decode(content))


def _read_at(place: str, folder: str, given: dict[str, Any], stack: ExitStack) -> None:
    """Until ``stack`` ends, let ``load`` with ``given`` read the files at ``place``, where rank 0 has them.

    If they are not there on this host, the rank reads ``folder`` by itself.
    """
    from torch.distributed.checkpoint import FileSystemReader

    with on_real_disk():
        is_here = os.path.exists(os.path.join(place, _METADATA))
    if not is_here:
        if os.path.isdir(folder) and any(is_stand_in(os.path.join(folder, name)) for name in os.listdir(folder)):
            raise LagomError(
                f"rank 0 has written the checkpoint {folder} to a disk that {socket.gethostname()} does not see; save "
                "it to a folder that all hosts share"
            )
        return
    reader = given.get("storage_reader") or FileSystemReader(place)
    given |= {"storage_reader": reader, "checkpoint_id": place}
    stack.callback(setattr, reader, "path", reader.path)
    for name in _READS:
        stack.enter_context(replaced(reader, name, _on_real_disk(getattr(reader, name))))


def _on_real_disk(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def read(*args: Any, **kwargs: Any) -> Any:
        with on_real_disk():
            return method(*args, **kwargs)

    return read


# Note [Files of rank 0]
#
# Each rank has a disk of its own (Note [A disk of each rank's own] in disk/install.py), but only rank 0 writes the
# files of a streamed checkpoint. The other ranks get files of the same names and sizes without the content, so that
# the program may list, rename or remove the checkpoint on every rank.
#
# In `load` all ranks read the files of rank 0. All of them wait at its begin and at its end, so no rank reads a
# checkpoint before rank 0 has come so far, or after rank 0 has removed it.
