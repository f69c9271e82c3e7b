"""``docs/architecture.md`` and ``symptoms.md`` lead to files, functions and tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.test_features import faults

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "architecture.md").read_text()
SYMPTOMS = (ROOT / "docs" / "appendix" / "symptoms.md").read_text().split("\n### ")[1:]
NAMES = [symptom.partition("\n")[0] for symptom in SYMPTOMS]
SAMPLES = {"run.json", "without_snapshots"}
"""Texts in code type that are no name in a file of lagom's."""


@pytest.mark.parametrize("symptom", SYMPTOMS, ids=NAMES)
def test_a_list_names_what_its_files_have(symptom: str) -> None:
    lines = re.split(r"\n- ", symptom)[1:]
    *steps, last = [re.sub(r"\s+", " ", line) for line in lines]
    for step in steps:
        named = re.findall(r"`([^`]+)`", step)
        files = [name for name in named if re.fullmatch(r"[\w/]+\.(py|cpp)", name)]
        texts = "".join((ROOT / ("" if name.startswith("csrc/") else "lagom") / name).read_text() for name in files)
        names = [name for name in named if re.fullmatch(r"\w+(\.\w+)?", name) and name not in SAMPLES]
        assert [name for name in names if name not in files and name.rpartition(".")[2] not in texts] == [], step
    assert last.startswith("Fails first: ")
    tests = [name for name in re.findall(r"`([^`]+)`", last) if "/" in name]
    assert faults(0, ", ".join(f"`{name}`" for name in tests), ROOT) == []


def test_each_room_has_the_files_to_start_reading_at() -> None:
    rooms = re.findall(r"^\| `([\w/]+)/` \|.*\| ([^|]*) \|$", PAGE, re.MULTILINE)
    assert len(rooms) >= 30
    for room, cell in rooms:
        folder = ROOT / room if room == "csrc" else ROOT / "lagom" / room
        files = [name for name in re.findall(r"`([^`]+)`", cell) if "." in name]
        assert [name for name in files if name != "__init__.py" and not (folder / name).exists()] == [], room
