"""``lagom.wire.messages`` and the ``messages.py`` of extensions: they travel whole, and each has one handler."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from importlib import import_module
from typing import Any, get_type_hints

import pytest

from lagom.wire.framing import FrameDecoder, body_of, frame_of
from lagom.wire.messages import (
    Doing,
    Done,
    LocalEvent,
    Log,
    Message,
    MessageError,
    ProgressReport,
    RankAddress,
    RankReport,
    Stalled,
    from_json,
    own_version,
    to_json,
)
from tests.sources import ROOT

FILES = sorted((ROOT / "lagom").rglob("*messages.py"))
MODULES = [import_module(".".join(path.relative_to(ROOT).with_suffix("").parts)) for path in FILES]
KINDS: list[Any] = [
    kind
    for module in MODULES
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, (Message, LocalEvent)) and kind.__module__ == module.__name__
    if issubclass(kind, LocalEvent) or hasattr(kind, "tag")  # a message without one is a base of others
]
MESSAGES = [kind for kind in KINDS if issubclass(kind, Message)]
ROW = re.compile(r"^(\w+) {2,}(\S.*?) {2,}(\S.*)$")
PART = re.compile(r"\w+(, past \w+((, \w+)* and \w+)?)?")
REPORT = RankReport(rank=1, ok=False, exited=True, exit="x", output=[Log(rank=1, stream="stdout", data="\xfc")])
VALUES: dict[str, Any] = {
    "bool": True,
    "int": 7,
    "float": 0.5,
    "str": "\u00fc",
    "int | None": None,
    "float | None": 2.5,
    "str | None": "x",
    "int | str | None": "x",
    "list[int]": [1, 2],
    "list[str]": ["a"],
    "list[int | None]": [1, None],
    "dict[str, Any]": {"begin": None},
    "dict[str, int]": {"0": 1},
    "dict[str, float]": {"1": 0.25},
    "dict[str, str]": {"A": "b"},
    "tuple[str, int] | None": ("10.0.0.1", 5),
    "list[RankAddress]": [RankAddress(0, "a|1", "10.0.0.1", None), RankAddress(1, "a|1", "10.0.0.1", "0")],
    "Doing": Doing(stack="s", line="l", waits=True, missing=[3]),
    "RankReport": REPORT,
    "list[RankReport]": [REPORT, RankReport(rank=2, ok=True)],
    "list[Message]": [Log(rank=0, stream="stderr", data="x")],
}
"""A value for each type of a field."""


def example(kind: Any, *, whole: bool) -> Any:
    """Return a message with a value for each field, or only for fields without a default."""
    missing = dataclasses.MISSING
    named = {
        each.name: VALUES[str(each.type)]
        for each in dataclasses.fields(kind)
        if whole or (each.default is missing and each.default_factory is missing)
    }
    return kind(**named)


@pytest.mark.parametrize("kind", MESSAGES)
def test_each_message_travels_whole(kind: Any) -> None:
    assert get_type_hints(kind)  # the annotations have a meaning
    for message in (example(kind, whole=True), example(kind, whole=False)):
        decoder = FrameDecoder()
        decoder.feed(frame_of(body_of(message)))
        ((found, body),) = decoder.take()
        assert found == message
        assert type(found) is kind
        assert json.loads(body)["type"] == kind.tag
        decoder.feed(frame_of(body))  # as a host process passes it on
        assert decoder.take() == [(message, body)]


def test_a_value_that_is_the_default_does_not_travel() -> None:
    assert to_json(RankReport(rank=0, ok=True)) == {"type": "outcome", "rank": 0, "ok": True}
    assert to_json(example(ProgressReport, whole=False)).keys().isdisjoint({"loss", "starts", "gpu", "values"})


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"type": "unheard of"}, "a message has the type 'unheard of', which lagom VERSION does not know here; give "),
        ({"rank": 0}, "a message has the type None, which lagom VERSION does not know here; give driver and executors"),
        ({"type": ["stop"]}, "a message has the type ['stop'], which"),
        ({"type": "stop", "n": 1}, "a message 'stop' for lagom VERSION has the foreign field 'n'; give driver and"),
        (
            {"type": "log", "rank": 0, "data": "x", "text": "y"},
            "a message 'log' for lagom VERSION lacks the field 'stream' and has the foreign field 'text'; give driver",
        ),
        (
            {"type": "done", "reports": [{"type": "outcome", "rank": 0}]},
            "'outcome' for lagom VERSION lacks the field 'ok'",
        ),
        ({"type": "task", "task": "x", "version": "1"}, "a message 'task' has a wrong value: task is 'x'; want a num"),
        ({"type": "peers", "store": 5, "ranks": [], "nccl": False}, "a message 'peers' has a wrong value: "),
    ],
)
def test_what_is_no_message_is_refused_by_type_and_field(body: dict[str, Any], text: str) -> None:
    with pytest.raises(MessageError, match=re.escape(text.replace("VERSION", own_version()))):
        from_json(body)


def test_two_messages_cannot_have_one_tag() -> None:
    with pytest.raises(AssertionError, match="'stop' is taken"):
        type("Other", (Message,), {}, tag="stop")


def test_nested_messages_are_messages_again() -> None:
    done = from_json(json.loads(body_of(Done(reports=[REPORT]))))
    assert isinstance(done, Done)
    assert done.reports[0].output == [Log(rank=1, stream="stdout", data="\xfc")]
    stalled = Stalled(rank=1, quiet_s=3.0, work=Doing(stack="", line="", waits=True))
    assert from_json(json.loads(body_of(stalled))) == stalled


# --- who handles what


def rows() -> dict[str, tuple[str, str]]:
    """Return the columns "sent by" and "handled by" of all tables, by message."""
    found = {}
    for module in MODULES:
        for line in (module.__doc__ or "").splitlines():
            if (row := ROW.match(line)) is not None and row[1] not in ("message", "event"):
                assert row[1] not in found
                found[row[1]] = row[2], row[3]
    return found


def matches() -> dict[str, set[str]]:
    """Return for each class that is matched on anywhere the classes and functions that do so, at the top of a file."""
    found = defaultdict[str, set[str]](set)
    for path in (ROOT / "lagom").rglob("*.py"):
        if path not in FILES:
            for top in ast.parse(path.read_text()).body:
                if isinstance(top, (ast.ClassDef, ast.FunctionDef)):
                    for name in _matched(top):
                        found[name].add(top.name)
    return found


def _matched(top: ast.AST) -> Iterator[str]:
    for node in ast.walk(top):
        if isinstance(node, ast.MatchClass) and isinstance(node.cls, ast.Name):
            yield node.cls.id
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
            yield from (name.id for name in ast.walk(node.args[1]) if isinstance(name, ast.Name))


def test_each_message_and_event_has_a_row_in_the_table_of_its_file() -> None:
    for module in MODULES:
        defined = {kind.__name__ for kind in KINDS if kind.__module__ == module.__name__} - {"Message", "LocalEvent"}
        assert {name for name in rows() if re.search(rf"^{name}  ", module.__doc__ or "", re.MULTILINE)} == defined


_MISSING = tuple(f"{name}: " for name in ("search", "resume") if not (ROOT / "lagom" / "extensions" / name).exists())


def test_the_tables_say_who_handles_what() -> None:
    """A cell is "Handler", or "Handler, past Onlooker and Onlooker"; behind a semicolon the same for other runs.

    Handlers of an extension that is missing, after its name, do not count.
    """
    found = matches()
    wrong = []
    for name, (_, cell) in rows().items():
        there = [part for part in cell.split("; ") if not part.startswith(_MISSING)]
        parts = [re.sub("^(search|resume|rehearsal|inline|before ranks): ", "", part) for part in there]
        assert all(PART.fullmatch(part) for part in parts), cell
        told = sorted({word for part in parts for word in re.split(", past | and |, ", part)})
        if told != sorted(found[name]):
            wrong.append(f"{name}: the table has {told}, the source {sorted(found[name])}")
    assert not wrong, "\n".join(wrong)
