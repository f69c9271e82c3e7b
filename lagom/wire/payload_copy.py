"""``PayloadCopy``: a host's copy of the payload, from the driver or other hosts, also in parts."""

from __future__ import annotations

import hashlib
import os
import ssl
import time

from lagom.wire.client import LinkClosed, dial


class PayloadCopy:
    """A copy in the file ``path``, which may be used once ``take`` has returned.

    Args:
        size: bytes of the payload.
        sha256: its digest, which came inside Spark's job.
        name: of what is taken, if it is not the payload.
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
        """Take the bytes that are missing from the driver, or a host, at ``address``.

        Args:
            certificate: as for ``dial``.
            stall_s: seconds to wait for a byte.
            within_s: seconds to wait for the last byte.

        Raises:
            LinkClosed: if they do not arrive, in which case those that have arrived are kept; or if the payload differs
                from what the driver sent.
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
            pass  # the error below says what is missing
        finally:
            link.close()
        self._check()

    def _check(self) -> None:
        if self._position < self._size:
            raise LinkClosed(f"{self._position} of {self._size} bytes arrived in time")
        if self._digest.hexdigest() != self._sha256:
            self._digest, self._position = hashlib.sha256(), 0
            raise LinkClosed("the bytes that arrived are not those sent")
