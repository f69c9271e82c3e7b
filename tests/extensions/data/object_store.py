"""An S3 server on loopback: a bucket whose objects are the files of a folder, with faults on request."""

from __future__ import annotations

import socket
import struct
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from xml.sax.saxutils import escape

Fault = Callable[[str, int], str | None]
"""Chooses a fault by key and number of requests: "500", "slow", "reset" (in the body), "cut" (too short), or None."""


@dataclass
class Store:
    """Serves a folder, and counts the requests."""

    folder: Path
    port: int = 0
    fault: Fault = lambda key, number: None
    is_open: bool = True
    """Whether requests are allowed; if not, all are refused."""
    gets: dict[str, int] = field(default_factory=dict)
    """Requests for the contents of each key, failed ones among them."""
    num_bytes: int = 0
    """Bytes of contents that were sent."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def url(self, key: str = "") -> str:
        """Return the URL of ``key`` for pyarrow, with endpoint and credentials."""
        endpoint = urllib.parse.quote(f"http://127.0.0.1:{self.port}", safe="")
        return f"s3://key:secret@bucket/{key}?region=us-east-1&scheme=http&endpoint_override={endpoint}"


@contextmanager
def object_store(folder: Path) -> Iterator[Store]:
    """Serve ``folder`` as the bucket ``bucket``."""
    store = Store(folder)
    handler = type("Handler", (_Handler,), {"store": store})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    store.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield store
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    store: Store

    def do_HEAD(self) -> None:
        """An object's size."""
        path = self._path()
        if not self.store.is_open:
            self._answer(403, b"")
        elif path is None:
            self._answer(404, b"")
        else:
            self._answer(200, b"", path.stat().st_size)

    def do_GET(self) -> None:
        """A range of an object, or a list of them."""
        parts = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(parts.query, keep_blank_values=True))
        if not self.store.is_open:
            self._answer(403, b"<Error><Code>AccessDenied</Code></Error>")
            return
        if "list-type" in query:
            self._answer(200, self._listed(query.get("prefix", ""), query.get("delimiter", "")).encode())
            return
        path = self._path()
        if path is None:
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
            return
        key = str(path.relative_to(self.store.folder))
        with self.store.lock:
            self.store.gets[key] = number = self.store.gets.get(key, 0) + 1
        fault = self.store.fault(key, number)
        if fault == "500":
            self._answer(500, b"<Error><Code>InternalError</Code><Message>we are sorry</Message></Error>")
            return
        if fault == "slow":
            time.sleep(0.05)
        content = path.read_bytes()
        first, last = 0, len(content) - 1
        if wanted := self.headers.get("Range"):
            start, _, end = wanted.removeprefix("bytes=").partition("-")
            first, last = int(start), min(int(end or last), last)
        body = content[first : last + 1]
        with self.store.lock:
            self.store.num_bytes += len(body)
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}")
        self._headers(len(body))
        if fault in ("reset", "cut"):
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            if fault == "reset":
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
            self.close_connection = True
            return
        self.wfile.write(body)

    def _path(self) -> Path | None:
        name = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path).removeprefix("/bucket").strip("/")
        path = self.store.folder / name
        return path if path.is_file() else None

    def _listed(self, prefix: str, delimiter: str) -> str:
        names = sorted(
            str(path.relative_to(self.store.folder)) for path in self.store.folder.rglob("*") if path.is_file()
        )
        names = [name for name in names if name.startswith(prefix)]
        shared = {
            prefix + name[len(prefix) :].split(delimiter)[0] + delimiter
            for name in names
            if delimiter and delimiter in name[len(prefix) :]
        }
        listed = [name for name in names if not any(name.startswith(one) for one in shared)]
        contents = "".join(
            f"<Contents><Key>{escape(name)}</Key><Size>{(self.store.folder / name).stat().st_size}</Size>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            for name in listed
        )
        below = "".join(f"<CommonPrefixes><Prefix>{escape(one)}</Prefix></CommonPrefixes>" for one in sorted(shared))
        count = len(listed) + len(shared)
        return (
            '<?xml version="1.0"?><ListBucketResult><Name>bucket</Name><IsTruncated>false</IsTruncated>'
            f"<KeyCount>{count}</KeyCount>{contents}{below}</ListBucketResult>"
        )

    def _answer(self, status: int, body: bytes, size: int | None = None) -> None:
        self.send_response(status)
        self._headers(len(body) if size is None else size)
        if self.command != "HEAD":
            self.wfile.write(body)

    def _headers(self, size: int) -> None:
        self.send_header("Content-Length", str(size))
        path = self._path()
        self.send_header("Last-Modified", formatdate(path.stat().st_mtime if path else 0, usegmt=True))
        self.send_header("ETag", '"0"')
        self.send_header("Connection", "close")  # else its thread lives as long as the client
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""
