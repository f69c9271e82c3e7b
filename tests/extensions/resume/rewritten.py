"""Files of a run's snapshots that a test writes, with the digests that lagom would have given them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

from lagom.digests import parse_record, record_text
from lagom.extensions.resume.kept_call import write_call
from lagom.program.payload import unpack_file
from lagom.program.signature import Call
from lagom.restart.kept_snapshots import SnapshotFolder


def rewrite_state(path: Path, change: Callable[[bytes], bytes]) -> None:
    """Change the bytes of the state in ``path``; the size must stay."""
    state, description = change(path.read_bytes()), path.with_suffix(".json")
    facts = parse_record(description.read_bytes()) | {"sha256": hashlib.sha256(state).hexdigest()}
    for target, data in ((path, state), (description, record_text(facts).encode())):
        target.with_suffix(".new").write_bytes(data)
        target.with_suffix(".new").rename(target)


def rewrite_lines(path: Path, old: str, new: str) -> None:
    """Replace a text in the values of a file of records, one a line."""
    records = [json.loads(json.dumps(parse_record(line)).replace(old, new)) for line in path.read_text().splitlines()]
    path.write_text("".join(f"{record_text(record)}\n" for record in records))


def kept_call(run: Path) -> Call:
    """The call in a run's folder."""
    with open(run / "snapshots" / "call", "rb") as file:
        call: Call = unpack_file(file.fileno())
    return call


def rewrite_call(run: Path, call: Call) -> None:
    """Put ``call`` into a run's folder."""
    write_call(SnapshotFolder(os.fspath(run / "snapshots")), call)
