"""``lagom.monitor.output``: what ranks write, on the driver."""

from __future__ import annotations

import pytest

from lagom.monitor.output import Output


def shown(capsys: pytest.CaptureFixture[str], named: bool, *pieces: tuple[int, str, bytes]) -> tuple[str, str]:
    output = Output(named, lambda *_: None)
    for piece in pieces:
        output.show(*piece)
    output.close()
    out, err = capsys.readouterr()
    return out, err


def test_rank_0_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    pieces = [(0, "stdout", b"10%\r"), (1, "stdout", b"no"), (0, "stdout", "ä".encode()[:1]), (0, "stderr", b"x\n")]
    assert shown(capsys, False, *pieces, (0, "stdout", "ä".encode()[1:])) == ("10%\rä", "x\n")


def test_lines_of_all_ranks_are_whole_and_named(capsys: pytest.CaptureFixture[str]) -> None:
    pieces = [(0, "stdout", b"on"), (1, "stdout", b"two\nth"), (0, "stdout", b"e\n\n"), (1, "stderr", b"10%\r20%\r")]
    out, err = shown(capsys, True, *pieces, (1, "stdout", b"ree"))
    assert out == "[rank 1] two\n[rank 0] one\n[rank 1] three\n"
    assert err == "[rank 1] 10%\n[rank 1] 20%\n"
