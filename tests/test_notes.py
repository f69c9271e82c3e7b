"""Notes, the long reasons in comments: each title is used once, and whoever refers to one finds it."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("lagom", "csrc", "docs", "tests", "benchmarks")


def test_each_note_has_one_home_and_each_reference_a_note() -> None:
    homes, references = Counter[str](), set[str]()
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".md", ".cpp", ".hpp") and path != Path(__file__):
                text = path.read_text()
                homes.update(re.findall(r"^\s*(?:#|//) Note \[([^\]\n]+)\]$", text, re.MULTILINE))
                references.update(re.findall(r"Note \[([^\]\n]+)\]", text))
    assert homes
    assert {title for title, count in homes.items() if count > 1} == set()
    assert references - set(homes) == set()
