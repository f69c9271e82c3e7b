"""Ways in which a file can be damaged, as a disk, a crash, another version or another user damages it."""

from __future__ import annotations

import os
import random
from pathlib import Path

KINDS = ("bit", "byte", "cut", "empty", "zeros", "doubled", "garbage", "missing", "link", "fifo", "folder")


def damage(path: Path, kind: str, chance: random.Random) -> None:
    """Damage the file ``path``."""
    data = bytearray(path.read_bytes())
    if kind in ("missing", "link", "fifo", "folder"):
        path.unlink()
        if kind == "link":
            path.symlink_to("/dev/zero")
        elif kind == "fifo":
            os.mkfifo(path)
        elif kind == "folder":
            path.mkdir()
        return
    place = chance.randrange(len(data)) if data else 0
    if kind == "bit":
        data[place] ^= 1 << chance.randrange(8)
    elif kind == "byte":
        data[place] = (data[place] + chance.randrange(1, 256)) % 256
    elif kind == "zeros":
        data[place : place + 100] = bytes(len(data[place : place + 100]))
    elif kind == "garbage":
        data[place : place + 100] = chance.randbytes(100)
    elif kind == "doubled":
        data = data + data
    else:
        del data[place if kind == "cut" else 0 :]
    path.write_bytes(data)
