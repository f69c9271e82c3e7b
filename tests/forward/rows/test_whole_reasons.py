"""``WholeReason``: the reasons why a forward runs whole, which are told in one file."""

from __future__ import annotations

import ast
import pickle
import re
import string

import pytest

from lagom.forward.rows.whole_reasons import NotByRowsError, WholeReason, whole_line
from tests.sources import ROOT

SOURCES = {path: path.read_text() for path in sorted((ROOT / "lagom").rglob("*.py"))}


@pytest.mark.parametrize("reason", WholeReason, ids=lambda reason: reason.name)
def test_each_reason_is_used_and_follows_it_in_a_sentence(reason: WholeReason) -> None:
    uses = [path for path, text in SOURCES.items() if re.search(rf"WholeReason\.{reason.name}\b", text)]
    assert uses
    for text in filter(None, (reason.text, reason.remedy)):
        assert text[0].islower() or text[0] == "{"
        assert text[-1] not in ".;"


def test_each_place_fills_in_the_names_of_a_text() -> None:
    found = [
        (path.name, reason.name, {keyword.arg for keyword in call.keywords})
        for path, source in SOURCES.items()
        if "WholeReason" in source
        for call in ast.walk(ast.parse(source))
        if isinstance(call, ast.Call) and (reason := _reason_of(call)) is not None
    ]
    assert len(found) > 60
    assert [one for one in found if one[2] != _names_in(WholeReason[one[1]].text)] == []


def _reason_of(call: ast.Call) -> WholeReason | None:
    """Return the member in ``NotByRowsError(WholeReason.X, ...)`` or ``WholeReason.X.filled(...)``."""
    is_filled = isinstance(call.func, ast.Attribute) and call.func.attr == "filled"
    is_error = isinstance(call.func, ast.Name) and call.func.id in ("NotByRowsError", "UnsupportedDrawError")
    of = call.func.value if is_filled else call.args[0] if is_error and call.args else None  # type: ignore[attr-defined]
    return WholeReason[of.attr] if isinstance(of, ast.Attribute) and of.attr in WholeReason.__members__ else None


def _names_in(text: str) -> set[str]:
    return {name for _, name, _, _ in string.Formatter().parse(text) if name}


def test_a_failure_tells_its_error_alone() -> None:
    named = re.findall(
        r"failing_as\(WholeReason\.(\w+)\)|failure = WholeReason\.(\w+) if .* else WholeReason\.(\w+)$",
        "\n".join(SOURCES.values()),
        re.MULTILINE,
    )
    reasons = [name for names in named for name in names if name]
    assert len(reasons) >= 4
    assert [name for name in reasons if _names_in(WholeReason[name].text) != {"error"}] == []


def test_a_line_has_the_reason_and_what_helps() -> None:
    reason = WholeReason.UNKNOWN_OUTPUT.filled(name="{Box}")
    assert whole_line("Net", "", reason) == (
        "Net runs whole on every rank: it gives a {Box}, of which it is unknown what is in it; "
        "return tensors, in a list, tuple or dict if there are many"
    )
    assert whole_line("Net", ", again", WholeReason.MIXES_ROWS.filled()).endswith(
        "again: it does not compute the rows of its batch one by one"
    )


def test_an_error_has_its_reason() -> None:
    error = NotByRowsError(WholeReason.OUTPUT_WITHOUT_ROWS, shape=(), rows=7)
    assert str(error) == error.reason.text == "gives an output of shape (), not one with a row for each of 7"
    assert pickle.loads(pickle.dumps(error.reason)) == error.reason
