"""``write_stand_in``: stands for a large file that rank 0 alone has written, on the disk of another rank."""

from __future__ import annotations

import os
import socket

_HEAD = b"lagom: rank 0 alone has written this file; its size is right, and its content is not here: "


def write_stand_in(path: str, size: int) -> None:
    """Make a file of ``size`` bytes at ``path`` that takes no space, as far as the file system allows it."""
    with open(path, "wb") as file:
        file.write((_HEAD + socket.gethostname().encode())[:size])
        file.truncate(size)


def is_stand_in(path: str) -> bool:
    """Return whether ``write_stand_in`` has made the file at ``path``."""
    if not os.path.isfile(path) or not (size := os.path.getsize(path)):
        return False
    with open(path, "rb") as file:
        return file.read(len(_HEAD)) == _HEAD[:size]
