"""Digests of files, and JSON records that have their own digest, by which a damaged byte is noticed."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from typing import Any

_DIGEST = "digest"
_LENGTH = 32
_END = b"\nlagom sha256 %b\n"


def digest_of(fd: int, length: int | None = None) -> str:
    """Return the SHA-256 of a file's contents, or of its first ``length`` bytes."""
    digest, position = hashlib.sha256(), 0
    while chunk := os.pread(fd, 1 << 20 if length is None else min(1 << 20, length - position), position):
        digest.update(chunk)
        position += len(chunk)
    return digest.hexdigest()


def check_sha256(fd: int, sha256: str) -> None:
    """Check that a file has the contents with this digest.

    Raises:
        ValueError: if it has others.
    """
    if digest_of(fd) != sha256:
        raise ValueError("its bytes are not those that were written")


def end_with_digest(fd: int, sha256: str) -> None:
    """Write ``sha256``, of the contents so far, to the end of a file, for ``ended_digest``."""
    os.write(fd, _END % sha256.encode())


def ended_digest(fd: int) -> str:
    """Return the SHA-256 of a file's contents, without the digest that it ends with.

    Raises:
        ValueError: if the contents are not those that were written.
    """
    length = os.fstat(fd).st_size - len(_END % bytes(64))
    end = os.pread(fd, 1 << 10, max(0, length))
    if length < 0 or end != _END % (found := digest_of(fd, length)).encode():
        raise ValueError("its bytes are not those that were written")
    return found


def record_text(facts: Mapping[str, Any], indent: int | None = None) -> str:
    """Return ``facts`` as JSON, with their digest as the last item."""
    plain = json.loads(json.dumps(facts))
    return json.dumps(plain | {_DIGEST: _digest(plain)}, indent=indent)


def parse_record(text: str | bytes) -> dict[str, Any]:
    """Return the facts of a record, without its digest; a record of an earlier version has none.

    Raises:
        ValueError: if ``text`` is no JSON object, or not the one that was written.
    """
    try:
        facts = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(facts, dict):
        raise ValueError("it is no JSON object")
    last, digest = next(reversed(facts.items()), ("", None))
    if isinstance(digest, str) and re.fullmatch(rf"[0-9a-f]{{{_LENGTH}}}", digest):
        del facts[last]
        if last != _DIGEST or digest != _digest(facts):
            raise ValueError('its bytes are not those that were written; if you have edited it, remove its "digest"')
    elif _DIGEST in facts:
        raise ValueError("its digest is damaged")
    return facts


def _digest(plain: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(plain).encode()).hexdigest()[:_LENGTH]
