"""``lagom.watch.output``: what ranks write, on the driver."""

from __future__ import annotations

import pytest

from lagom.watch import output as module
from lagom.watch.notebook_bars import NotebookBars
from lagom.watch.output import Output


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


class Display:
    """A notebook's display module that keeps the states of each of its displays."""

    def __init__(self) -> None:
        self.shown: list[list[str]] = []

    def display(self, bundle: dict[str, str], *, raw: bool, display_id: bool) -> Display:
        assert raw
        assert display_id
        handle = Display()
        handle.shown = self.shown
        handle.states = [bundle["text/plain"]]
        self.shown.append(handle.states)
        return handle

    states: list[str]

    def update(self, bundle: dict[str, str], *, raw: bool) -> None:
        self.states.append(bundle["text/plain"])


@pytest.fixture
def display(monkeypatch: pytest.MonkeyPatch) -> Display:
    found = Display()
    monkeypatch.setattr(module, "notebook", lambda: found)
    return found


def test_a_bar_renews_one_display_of_a_notebook(display: Display, capsys: pytest.CaptureFixture[str]) -> None:
    pieces = [b"\r  0%|    |", b"\r 50%|##  |", b"\r100%|####|\n"]
    out, err = shown(capsys, False, *((0, "stderr", piece) for piece in pieces), (0, "stdout", b"epoch 0\n"))
    assert (out, err) == ("epoch 0\n", "")
    assert display.shown == [["  0%|    |", " 50%|##  |", "100%|####|"]]


def test_bars_and_lines_stay_in_their_order(display: Display, capsys: pytest.CaptureFixture[str]) -> None:
    pieces = [b"\r1/2", b"\r2/2\n", b"a warning\n", b"\r1/3", b" and more", b"\r\x1b[32m2/3\x1b[0m"]
    out, err = shown(capsys, False, *((0, "stderr", piece) for piece in pieces), (0, "stdout", b"a\r\nb\r\n"))
    assert (out, err) == ("a\r\nb\r\n", "a warning\n")
    assert [states[-1] for states in display.shown] == ["2/2", "2/3 and more"]


def test_nested_bars_are_below_each_other(display: Display, capsys: pytest.CaptureFixture[str]) -> None:
    pieces = [b"\router 0", b"\n\rinner 0\x1b[A", b"\n\rinner 1\x1b[A", b"\router 1"]
    shown(capsys, False, *((0, "stderr", piece) for piece in pieces))
    assert [states[-1] for states in display.shown] == ["outer 1\ninner 1"]


def test_the_text_of_a_bar_is_no_html(display: Display, capsys: pytest.CaptureFixture[str]) -> None:
    pages: list[str] = []
    bars = NotebookBars(lambda: lambda page, text: pages.append(page))
    bars.show("stderr", "\r<b>10%</b>")
    assert "&lt;b&gt;10%" in pages[-1]
