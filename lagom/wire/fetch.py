"""``fetch_payload`` and ``fetch_snapshot``: copy a run's payload, or the snapshot to resume from, from the driver."""

from __future__ import annotations

import hashlib
import os

from lagom.restart.kept_snapshots import FETCHED
from lagom.wire.client import LinkClosed, dial
from lagom.wire.messages import FetchHello
from lagom.wire.spec import RunSpec

_STALL_S = 60.0
"""Seconds without a byte from the driver after which a copy fails."""


def fetch_payload(spec: RunSpec, path: str) -> None:
    """Copy the payload of ``spec`` to ``path``.

    Raises:
        LinkClosed: if the payload does not arrive.
    """
    _fetch(spec, "payload", path, spec.payload_size, spec.payload_sha256)


def fetch_snapshot(spec: RunSpec, path: str) -> None:
    """Copy the snapshot from which the ranks of ``spec`` go on to ``path``.

    Raises:
        LinkClosed: if the snapshot does not arrive.
    """
    place = spec.snapshots
    assert place is not None
    assert place.resumed is not None
    _fetch(spec, FETCHED, path, place.resumed.facts["bytes"], place.sha256)


def _fetch(spec: RunSpec, name: str, path: str, size: int, sha256: str) -> None:
    assert spec.address is not None
    fetch_file(spec.address, spec.secret, spec.certificate, name, path, size, sha256)


def fetch_file(
    address: tuple[str, int],
    secret: bytes,
    certificate: str,
    name: str,
    path: str,
    size: int,
    sha256: str,
    stall_s: float = _STALL_S,
) -> None:
    """Copy the driver's file ``name`` ("payload" or "snapshot") to ``path``.

    Args:
        certificate: as for ``dial``.
        size: bytes of the file.
        sha256: digest of the file, which came inside Spark's job.
        stall_s: seconds to wait for each next byte.

    Raises:
        LinkClosed: if bytes do not arrive in time, or are not those of the digest.
        OSError: if the connection breaks, or the file cannot be written.
    """
    link = dial(address, secret, FetchHello(name=name), stall_s, certificate)
    if link is None:
        raise LinkClosed(f"{address[0]}:{address[1]} cannot be reached for the {name}, or hangs up on us")
    digest, left = hashlib.sha256(), size
    try:
        link.socket.settimeout(stall_s)
        with open(path, "wb", opener=lambda file, flags: os.open(file, flags, 0o600)) as file:
            while left and (chunk := link.socket.recv(min(left, 1 << 20))):
                file.write(chunk)
                digest.update(chunk)
                left -= len(chunk)
    except TimeoutError:
        pass  # the error is raised below
    finally:
        link.close()
    if left:
        raise LinkClosed(f"{size - left} of {size} bytes arrived in time")
    if digest.hexdigest() != sha256:
        raise LinkClosed("the bytes that arrived are not those sent")
