"""``ShownOutput``: holds back output of a new attempt that the lost attempts have shown already."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

MAX_BYTES, MAX_BYTES_OF_OTHERS = 16 << 20, 256 << 10
"""Bytes of a stream of rank 0, and of another rank, that are compared; what comes after them counts as equal."""


@dataclass(slots=True)
class _Text:
    """Text that one attempt wrote to one stream: its first bytes, and the number of all its bytes."""

    limit: int
    begin: bytearray = field(default_factory=bytearray)
    length: int = 0

    def add(self, data: bytes) -> None:
        self.begin += data[: max(0, self.limit - self.length)]
        self.length += len(data)

    def agrees_with(self, other: _Text, start: int) -> bool:
        """Return whether both have the same bytes from ``start`` to the end of the shorter one."""
        end = min(len(self.begin), len(other.begin))
        return self.begin[start:end] == other.begin[start:end]


class _Stream:
    """One stream of one rank, over all attempts."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._earlier: list[_Text] = []
        self._alike: list[_Text] = []
        """Texts of earlier attempts with which this attempt's agrees so far."""
        self._own = _Text(limit)
        self._marks: dict[int, int] = {}
        """Length of this attempt's text at each snapshot, by the snapshot's number."""
        self._line_is_open = False

    def begin_again(self) -> None:
        self._earlier.append(self._own)
        self._alike, self._own = list(self._earlier), _Text(self._limit)

    def mark(self, number: int) -> None:
        self._marks[number] = self._own.length

    def go_back(self, number: int) -> None:
        lost, length = self._own, self._marks.get(number, 0)
        self._earlier.append(lost)
        self._own = _Text(self._limit, lost.begin[:length], length)
        self._alike = [text for text in self._earlier if text.length >= length and text.agrees_with(self._own, 0)]

    def new_part(self, data: bytes) -> bytes:
        start, before = self._own.length, self._alike
        self._own.add(data)
        if not before:
            return self._shown(data)
        self._alike = [text for text in before if text.agrees_with(self._own, start)]
        longest = max((text.length for text in self._alike), default=0)
        if self._own.length <= longest:
            return b""
        if self._alike:  # it goes on where a lost attempt ended
            self._alike = []
            return self._shown(data[longest - start :])
        return self._shown(b"\n" * self._line_is_open + self._line_that_differs(before, data))

    def _line_that_differs(self, before: Sequence[_Text], data: bytes) -> bytes:
        own = self._own.begin
        if self._own.length > len(own):
            return data
        same = max(_common_length(text.begin, own) for text in before)
        return bytes(own[max(own.rfind(b"\n", 0, same), own.rfind(b"\r", 0, same)) + 1 :])

    def _shown(self, data: bytes) -> bytes:
        if data:
            self._line_is_open = not data.endswith(b"\n")
        return data


class ShownOutput:
    """The output of all attempts, by rank and stream; and the pictures.

    A run is deterministic: a new attempt repeats the lost one's output from the start, or from its snapshot.
    Output is held back until it differs for the first time.
    """

    def __init__(self) -> None:
        self._streams: dict[tuple[int, str], _Stream] = {}
        self._pictures: list[str] = []
        self._num_repeated: int | None = None
        self._picture_marks: dict[int, int] = {}

    def begin_again(self) -> None:
        """Compare what comes from now on with the output of the attempts before."""
        for stream in self._streams.values():
            stream.begin_again()
        self._num_repeated = 0

    def mark(self, number: int) -> None:
        """Mark where the present attempt's output is at snapshot ``number``, to go back there."""
        for stream in self._streams.values():
            stream.mark(number)
        self._picture_marks[number] = self._num_pictures()

    def go_back(self, number: int) -> None:
        """Compare what comes from now on with what came after the mark ``number``."""
        for stream in self._streams.values():
            stream.go_back(number)
        self._num_repeated = self._picture_marks.get(number, 0)

    def _num_pictures(self) -> int:
        return len(self._pictures) if self._num_repeated is None else self._num_repeated

    def new_part(self, rank: int, stream: str, data: bytes) -> bytes:
        """Return the bytes to show for ``data``: none as long as an attempt before has shown the same, else all.

        Output that begins to differ is shown from the beginning of its line.
        """
        if (rank, stream) not in self._streams:
            self._streams[rank, stream] = _Stream(MAX_BYTES if rank == 0 else MAX_BYTES_OF_OTHERS)
        return self._streams[rank, stream].new_part(data)

    def is_new_picture(self, png: str) -> bool:
        """Return whether ``png`` is to be shown: it is not the next one of the pictures that were shown already."""
        digest = hashlib.sha256(png.encode()).hexdigest()
        at = self._num_repeated
        if at is not None and at < len(self._pictures) and self._pictures[at] == digest:
            self._num_repeated = at + 1
            return False
        self._num_repeated = None
        self._pictures.append(digest)
        return True


def _common_length(one: bytearray, other: bytearray) -> int:
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[:middle] == other[:middle] else (low, middle - 1)
    return low
