"""``PayloadCopy``: a host's copy of the payload or a snapshot, whose parts may come from the driver or other hosts."""

from __future__ import annotations

import hashlib
import os
import ssl
import time

from lagom.wire.client import LinkClosed, dial


class PayloadCopy:
    """A copy in the file ``path``, which is complete once ``take`` has returned without an error.

    Args:
        size: bytes of the file to copy.
        sha256: digest of this file, which came inside Spark's job.
        name: the sender's name for this file: "payload" or "snapshot".
    """

    def __init__(self, path: str, size: int, sha256: str, name: str = "payload") -> None:
        self._name = name
        self._path = path
        self._size = size
        self._sha256 = sha256
        self._digest = hashlib.sha256()
        self._position = 0

    def take(
        self,
        address: tuple[str, int],
        secret: bytes,
        certificate: str | ssl.SSLContext,
        stall_s: float,
        within_s: float | None = None,
    ) -> None:
        """Fetch the bytes that this copy still lacks from the driver or the host at ``address``.

        Args:
            certificate: as for ``dial``.
            stall_s: seconds to wait for each next byte.
            within_s: seconds to wait for the last byte; None for no limit.

        Raises:
            LinkClosed: if bytes do not arrive in time: a later call fetches only the rest. Also if the complete file
                has another digest: a later call begins again.
            OSError: if the connection breaks, or the file cannot be written.
        """
        hello = {"purpose": "fetch", "name": self._name, "start": self._position}
        link = dial(address, secret, hello, stall_s, certificate)
        if link is None:
            raise LinkClosed(f"{address[0]}:{address[1]} cannot be reached for the {self._name}, or hangs up on us")
        deadline = None if within_s is None else time.monotonic() + within_s
        try:
            link.socket.settimeout(stall_s)
            with open(self._path, "ab", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
                file.truncate(self._position)
                while (left := self._size - self._position) and (chunk := link.socket.recv(min(left, 1 << 20))):
                    file.write(chunk)
                    self._digest.update(chunk)
                    self._position += len(chunk)
                    if deadline is not None and time.monotonic() > deadline:
                        break
        except TimeoutError:
            pass  # ``_check`` below raises the error
        finally:
            link.close()
        self._check()

    def _check(self) -> None:
        if self._position < self._size:
            raise LinkClosed(f"{self._position} of {self._size} bytes arrived in time")
        if self._digest.hexdigest() != self._sha256:
            self._digest, self._position = hashlib.sha256(), 0
            raise LinkClosed("the bytes that arrived are not those sent")
