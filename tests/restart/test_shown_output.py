"""``lagom.restart.shown_output``: what attempts show together is the output of one process."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from lagom.restart import shown_output
from lagom.restart.shown_output import ShownOutput


def shown(attempts: Sequence[Sequence[bytes]]) -> bytes:
    """Return what is shown of attempts that write these pieces."""
    output, found = ShownOutput(), b""
    for number, pieces in enumerate(attempts):
        if number:
            output.begin_again()
        found += b"".join(output.new_part(0, "stdout", piece) for piece in pieces)
    return found


@pytest.mark.parametrize("seed", range(20))
def test_attempts_that_repeat_themselves_show_one_text(seed: int) -> None:
    draw = random.Random(seed)
    text = b"".join(b"epoch %d: %d\n" % (epoch, draw.randrange(100)) for epoch in range(8))

    def pieces(length: int) -> list[bytes]:
        cuts = sorted(draw.randrange(length + 1) for _ in range(5))
        return [text[start:end] for start, end in zip([0, *cuts], [*cuts, length], strict=True)]

    lengths = [draw.randrange(len(text)) for _ in range(3)]
    assert shown([pieces(length) for length in (*lengths, len(text))]) == text


def test_a_line_that_differs_is_shown_from_its_beginning() -> None:
    assert shown([[b"epoch 0\nepoch 1\n"], [b"epoch 2\nepo", b"ch 3\n"]]) == b"epoch 0\nepoch 1\nepoch 2\nepoch 3\n"
    assert shown([[b"begun\nepoch 0\nepo"], [b"beg", b"un\nepoch 1\n"]]) == b"begun\nepoch 0\nepo\nepoch 1\n"
    assert shown([[b"\r 1%\r 2%"], [b"\r 1%\r 3%"]]) == b"\r 1%\r 2%\n 3%"


def test_a_later_attempt_may_repeat_any_earlier_one() -> None:
    first, second = b"epoch 0\nepoch 1\n", b"from 1\nepoch 1\n"
    assert shown([[first], [second], [second, b"epoch 2\n"]]) == first + second + b"epoch 2\n"
    assert shown([[first], [second], [first, b"epoch 2\n"]]) == first + second + b"epoch 2\n"


def test_streams_and_ranks_are_compared_apart() -> None:
    output = ShownOutput()
    for key in ((0, "stdout"), (0, "stderr"), (1, "stdout")):
        assert output.new_part(*key, b"a\n") == b"a\n"
    output.begin_again()
    assert output.new_part(0, "stderr", b"b\n") == b"b\n"
    assert output.new_part(0, "stdout", b"a\nb\n") == b"b\n"
    assert output.new_part(1, "stdout", b"a\n") == b""


def test_only_the_beginning_of_a_long_text_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shown_output, "MAX_BYTES", 10)
    assert shown([[b"0123456789abc"], [b"0123456789", b"abcdef"]]) == b"0123456789abcdef"
    assert shown([[b"0123456789abc"], [b"0123x"]]) == b"0123456789abc\n0123x"


@pytest.mark.parametrize("seed", range(20))
def test_an_attempt_that_goes_on_from_a_mark_shows_one_text(seed: int) -> None:
    draw = random.Random(seed)
    text = b"".join(b"step %d: %d\n" % (step, draw.randrange(100)) for step in range(8))
    output, found = ShownOutput(), b""
    at = 0
    for number in range(4):
        mark = draw.randrange(at, len(text) - 10)
        lost = draw.randrange(mark, len(text))
        found += output.new_part(0, "stdout", text[at:mark])
        output.mark(number)
        found += output.new_part(0, "stdout", text[mark:lost])
        output.go_back(number)
        at = mark
    found += output.new_part(0, "stdout", text[at:])
    assert found == text


def test_an_older_mark_is_kept() -> None:
    output = ShownOutput()
    output.new_part(0, "stdout", b"a\n")
    for number in range(1, 5):
        output.mark(number)
        assert output.new_part(0, "stdout", b"b\n") == b"b\n"
    output.go_back(1)
    assert output.new_part(0, "stdout", b"b\n" * 5) == b"b\n"


def test_pictures_are_shown_once() -> None:
    output = ShownOutput()
    assert [output.is_new_picture(png) for png in ("a", "b")] == [True, True]
    output.begin_again()
    assert [output.is_new_picture(png) for png in ("a", "c", "b")] == [False, True, True]
