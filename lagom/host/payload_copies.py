"""``fetch_payload``: take the payload of a run from the driver or another host, and give it to others.

``fetch_snapshot``: take the snapshot from which the ranks of a run go on.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from lagom.restart.kept_snapshots import FETCHED
from lagom.wire.client import DriverClient, LinkClosed, dial
from lagom.wire.payload_copy import PayloadCopy
from lagom.wire.server import DriverServer
from lagom.wire.spec import RunSpec
from lagom.wire.tls import contexts_of_ranks
from lagom.worker.network_interfaces import own_address
from lagom.worker.rank_process import close_all_but

_STALL_S = 60.0  # without a byte from the driver
_HOST_STALL_S = 10.0  # without a byte from another host
_WAIT_S = 3600.0  # until the driver names a source
_PR_SET_PDEATHSIG = 1


@contextmanager
def fetch_payload(spec: RunSpec, path: str) -> Iterator[None]:
    """Copy the payload of ``spec`` to ``path``; with ``spec.passes_payload_on``, give it to other hosts in the context.

    See Note [Payload between hosts] in wire/payload_sources.py.

    Raises:
        LinkClosed: if the payload does not arrive.
    """
    assert spec.address is not None
    copy = PayloadCopy(path, spec.payload_size, spec.payload_sha256)
    link = None
    if spec.passes_payload_on:
        link = dial(spec.address, spec.secret, {"purpose": "relay"}, _STALL_S, spec.certificate)
    if link is None:
        copy.take(spec.address, spec.secret, spec.certificate, _STALL_S)
        yield
        return
    with contextlib.closing(link):
        while not _took(copy, spec, link):
            link.send({"type": "failed"})
        server = _fork_server(spec, path, link)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(server, signal.SIGKILL)
            os.waitpid(server, 0)


def fetch_snapshot(spec: RunSpec, path: str) -> None:
    """Copy the snapshot from which the ranks of ``spec`` go on to ``path``.

    Raises:
        LinkClosed: if the snapshot does not arrive.
    """
    place = spec.snapshots
    assert spec.address is not None
    assert place is not None
    assert place.resumed is not None
    copy = PayloadCopy(path, place.resumed.facts["bytes"], place.sha256, FETCHED)
    copy.take(spec.address, spec.secret, spec.certificate, _STALL_S)


def _took(copy: PayloadCopy, spec: RunSpec, link: DriverClient) -> bool:
    """Take the payload from the source that the driver names; return False if that source has failed."""
    assert spec.address is not None
    told = link.receive(_WAIT_S)
    if told is None:
        raise LinkClosed(f"the driver named no source for the payload within {_WAIT_S:g} s")
    if told["source"] is None:
        copy.take(spec.address, spec.secret, spec.certificate, _STALL_S)
        return True
    name, port = told["source"]
    certificate = contexts_of_ranks(spec.rank_certificate)[1] if spec.rank_certificate else ""
    try:
        copy.take((name, port), spec.secret, certificate, _HOST_STALL_S, told["within_s"])
    except OSError:
        return False
    return True


def _fork_server(spec: RunSpec, path: str, link: DriverClient) -> int:
    """Give the payload in ``path`` to other hosts, in a child, until the driver ends ``link``; return the child's id.

    A thread of this process would be in the way of its forks.
    """
    parent = os.getpid()
    payload = os.open(path, os.O_RDONLY)  # here, as the file is renamed later
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12's, of forks beside threads
        pid = os.fork()
    if pid:
        os.close(payload)
        return pid
    try:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        for number in (signal.SIGTERM, signal.SIGCHLD, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        if os.getppid() == parent:
            _serve(spec, payload, link)
    finally:
        os._exit(0)


def _serve(spec: RunSpec, payload: int, link: DriverClient) -> None:
    # Locks of the run's folder, and connections, would outlive the host process.
    close_all_but({0, 1, 2, payload, link.fileno()})
    accepting = contexts_of_ranks(spec.rank_certificate)[0] if spec.rank_certificate else None
    ip = own_address(link.socket.getsockname()[0], spec.env)
    with (
        contextlib.suppress(LinkClosed),
        DriverServer(lambda *_: None, lambda _: None, payload, secret=spec.secret) as server,
    ):
        link.send({"type": "complete", "address": server.listen(ip, tls=accepting)})
        while True:
            link.receive(_WAIT_S)
