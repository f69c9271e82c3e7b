"""``Person``: types lines at the prompts of this process."""

from __future__ import annotations

import builtins
import io
import sys
from collections.abc import Callable, Iterator

import pytest


class Person:
    """Answers ``input`` with lines; a function among them is called in its turn, and returns the line."""

    def __init__(self) -> None:
        self.lines: list[str | Callable[[], str]] = []
        self.prompts: list[str] = []
        """All prompts that were shown."""

    def types(self, *lines: str | Callable[[], str]) -> None:
        """Have ``lines`` typed, one at each prompt; and then the end of the input."""
        self.lines += lines

    def input(self, prompt: str = "") -> str:
        """Stand in for the builtin function."""
        self.prompts.append(prompt)
        if not self.lines:
            raise EOFError
        line = self.lines.pop(0)
        return line() if callable(line) else line


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def person(monkeypatch: pytest.MonkeyPatch) -> Iterator[Person]:
    """Somebody at the terminal of this process."""
    found = Person()
    monkeypatch.setattr(sys, "stdin", _Terminal())
    monkeypatch.setattr(builtins, "input", found.input)
    monkeypatch.delenv("PYTHONBREAKPOINT", raising=False)
    yield found
    assert found.lines == [], f"lines that nobody asked for; prompts were {found.prompts}"
