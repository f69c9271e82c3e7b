"""``lagom.watch.notebook``: places in the cells of this notebook."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from lagom.watch.notebook import with_cell_names

CELL = "/tmp/ipykernel_7/123.py"


def shell(monkeypatch: pytest.MonkeyPatch, **more: Any) -> None:
    """Make this process look like a kernel, whose shell has the attributes ``more``."""
    found = SimpleNamespace(kernel=object(), **more)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: found, display=object()))


def cell_of(path: str) -> tuple[str, str] | None:
    return ("Cell", "In[3]") if path == CELL else None


@pytest.mark.parametrize(
    ("text", "want"),
    [
        (f'  File "{CELL}", line 12, in train\n    x = 1', "  Cell In[3], line 12, in train\n    x = 1"),
        (f"rank 1 at {CELL}:12, in train: x", "rank 1 at Cell In[3], line 12, in train: x"),
        ('  File "/home/me/train.py", line 3, in f', '  File "/home/me/train.py", line 3, in f'),
        (f"see /a/b.py:4 and {CELL}:5", "see /a/b.py:4 and Cell In[3], line 5"),
        (f"a tuple ({CELL}:5)", f"a tuple ({CELL}:5)"),
    ],
)
def test_a_place_in_a_cell_gets_the_name_of_the_cell(monkeypatch: pytest.MonkeyPatch, text: str, want: str) -> None:
    shell(monkeypatch, compile=SimpleNamespace(format_code_name=cell_of))
    assert with_cell_names(text) == want


def test_a_text_stays_where_no_name_can_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(path: str) -> None:
        raise KeyError(path)

    text = f'File "{CELL}", line 12'
    assert with_cell_names(text) == text  # no notebook
    for more in ({}, {"compile": object()}, {"compile": SimpleNamespace(format_code_name=fails)}):
        shell(monkeypatch, **more)
        assert with_cell_names(text) == text


def test_a_long_text_without_places_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pattern that goes back over these texts takes minutes, which is beyond the limit of every test."""
    shell(monkeypatch, compile=SimpleNamespace(format_code_name=cell_of))
    for text in ("/" * 200_000, "/a" * 100_000, '"/a:' * 50_000, 'File "' * 30_000):
        assert with_cell_names(text) == text
