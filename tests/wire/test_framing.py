"""``lagom.wire.framing``: whatever comes, it is a message that one of ours sent or it is refused."""

from __future__ import annotations

import contextlib
import json
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lagom.wire.framing import MAX_FRAME, BadFrame, FrameDecoder, FrameSeals, body_of, frame_of, shorten
from lagom.wire.messages import FileNote, Message, MessageError, Stop, from_json

KEY = b"k" * 32
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)
NOTES = st.builds(
    FileNote, what=st.text(), path=st.text(), host=st.text(), details=st.dictionaries(st.text(), VALUES, max_size=4)
)
MESSAGES = st.lists(NOTES, max_size=5)
STOP = b'{"type": "stop"}'
fuzz = settings(max_examples=50, deadline=None)


def decoded(data: bytes, cuts: list[int], seals: FrameSeals | None) -> list[Message]:
    """All messages in ``data``, which comes in pieces that end at ``cuts``."""
    decoder, found = FrameDecoder(seals), []
    ends = sorted({min(cut, len(data)) for cut in cuts} | {len(data)})
    for start, end in zip([0, *ends], ends, strict=False):
        decoder.feed(data[start:end])
        while frames := decoder.take():
            found += [frame.message for frame in frames]
    return found


@pytest.mark.soak  # test_client.py has long and several messages by default
@fuzz
@given(messages=MESSAGES, cuts=st.lists(st.integers(0, 2000), max_size=6), sealed=st.booleans())
def test_messages_come_out_as_they_went_in_whatever_the_pieces(
    messages: list[FileNote], cuts: list[int], sealed: bool
) -> None:
    seals = FrameSeals(KEY) if sealed else None
    data = b"".join(frame_of(body_of(message), seals) for message in messages)
    assert decoded(data, cuts, FrameSeals(KEY) if sealed else None) == messages


@fuzz
@given(data=st.binary(max_size=300), cuts=st.lists(st.integers(0, 300), max_size=4))
def test_any_bytes_are_messages_or_refused(data: bytes, cuts: list[int]) -> None:
    with contextlib.suppress(BadFrame, MessageError):
        assert all(isinstance(message, Message) for message in decoded(data, cuts, None))


@fuzz
@given(data=st.binary(max_size=300), cuts=st.lists(st.integers(0, 300), max_size=4))
def test_bytes_of_a_stranger_are_no_message(data: bytes, cuts: list[int]) -> None:
    with contextlib.suppress(BadFrame):
        assert decoded(struct.pack(">I", len(data)) + data, cuts, FrameSeals(KEY)) == []


@pytest.mark.soak  # test_server.py has such frames by default
@fuzz
@given(messages=MESSAGES.filter(bool), where=st.integers(0), bit=st.integers(0, 7), remove=st.booleans())
def test_frames_that_are_changed_on_the_way_give_a_beginning_of_what_was_sent(
    messages: list[FileNote], where: int, bit: int, remove: bool
) -> None:
    seals = FrameSeals(KEY)
    data = bytearray(b"".join(frame_of(body_of(message), seals) for message in messages))
    where %= len(data)
    if remove:
        del data[where]
    else:
        data[where] ^= 1 << bit
    decoder, found = FrameDecoder(FrameSeals(KEY)), []
    decoder.feed(bytes(data))
    try:
        while taken := decoder.take():
            found += [frame.message for frame in taken]
    except BadFrame:
        pass
    assert len(found) < len(messages)
    assert found == messages[: len(found)]


@fuzz
@given(body=st.binary(max_size=60) | st.text(alphabet='[]{}",:0123456789.eE-+ntrueflasN', max_size=60).map(str.encode))
def test_what_json_makes_of_a_body_is_a_message_or_refused(body: bytes) -> None:
    decoder = FrameDecoder()
    decoder.feed(frame_of(body))
    with contextlib.suppress(BadFrame, MessageError):
        assert [frame.message for frame in decoder.take()] == [from_json(json.loads(body))]


@pytest.mark.parametrize(
    "body",
    [b"[" * MAX_FRAME, b'{"a":' * (MAX_FRAME // 5), b'{"a":' + b"9" * 100_000 + b"}", b"\x00" * 100, b'"'],
    ids=len,
)
def test_bodies_that_parsers_stumble_over_are_refused(body: bytes) -> None:
    decoder = FrameDecoder()
    decoder.feed(frame_of(body))
    with pytest.raises(BadFrame):
        decoder.take()


def test_a_length_alone_makes_nobody_wait_for_more_than_a_frame() -> None:
    for limit, seals in ((MAX_FRAME, None), (MAX_FRAME + 16, FrameSeals(KEY))):
        decoder = FrameDecoder(seals)
        decoder.feed(struct.pack(">I", limit))
        assert decoder.take() == []
        decoder = FrameDecoder(seals)
        decoder.feed(struct.pack(">I", limit + 1))
        with pytest.raises(BadFrame, match=f"at most {limit} are allowed"):
            decoder.take()


def test_what_was_refused_stays_refused_and_what_came_before_is_given() -> None:
    decoder = FrameDecoder()
    decoder.feed(frame_of(STOP) + frame_of(b"garbage") + frame_of(STOP))
    assert decoder.take() == [(Stop(), STOP)]
    for _ in range(2):
        with pytest.raises(BadFrame):
            decoder.take()


def test_bytes_behind_a_message_are_left() -> None:
    decoder = FrameDecoder()
    decoder.feed(frame_of(STOP) + b"raw")
    assert decoder.take(limit=1) == [(Stop(), STOP)]
    assert decoder.rest() == b"raw"
    assert decoder.rest() == b""


@fuzz
@given(st.text(alphabet=st.characters(), max_size=200), st.integers(14, 300))
def test_a_shortened_text_is_a_part_that_fits(text: str, max_bytes: int) -> None:
    begin, end = shorten(text, max_bytes), shorten(text, max_bytes, keep_end=True)
    assert text.startswith(begin)
    assert text.endswith(end)
    assert max(len(json.dumps(begin)), len(json.dumps(end))) <= max_bytes
    assert (begin == end == text) or len(json.dumps(text)) > max_bytes
    assert (begin and end) or not text
