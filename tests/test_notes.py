"""Notes, the long reasons in comments: each title is used once, and whoever cites a Note elsewhere names its file."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("lagom", "csrc", "docs", "tests", "benchmarks")
HOME = re.compile(r"^\s*(?:#|//) Note \[([^\]\n]+)\]$", re.MULTILINE)
CITATION = re.compile(r"Note \[([^\]]+)\](?:(?: is)? in `*([\w/]+\.\w+))?")
"""A title, and the file that is named behind it."""


def test_each_note_has_one_home() -> None:
    titles = Counter(title for text in _texts().values() for title in HOME.findall(text))
    assert titles
    assert [title for title, count in titles.items() if count > 1] == []


def test_a_citation_in_another_file_names_the_file_of_the_note() -> None:
    texts = _texts()
    homes = {title: path for path, text in texts.items() for title in HOME.findall(text)}
    assert [fault for path, text in texts.items() for fault in faults(path, text, homes)] == []


def test_faults_of_citations_are_found() -> None:
    homes = {"Own": "lagom/a/one.py", "Other": "lagom/b/two.py"}
    good = "# See Note [Own], Note [Other] in b/two.py, Note\n# [Other] in two.py."
    assert faults("lagom/a/one.py", good, homes) == []
    for text in ("Note [Other].", "Note [Other] in b/one.py", "Note [Gone]", "Note\n    # [Other]."):
        assert len(faults("lagom/a/one.py", text, homes)) == 1, text


def faults(path: str, text: str, homes: dict[str, str]) -> list[str]:
    """Return the citations in ``text``, the content of ``path``, that do not lead to a Note.

    Args:
        homes: the file of each Note, by its title.
    """
    found = []
    for title, file in CITATION.findall(re.sub(r"\s+(?:(?:#|//) *)?", " ", text)):
        home = homes.get(title)
        is_named = bool(file) and f"/{home}".endswith(f"/{file}")
        if home is None or not (home == path or is_named):
            found.append(f"{path} cites Note [{title}] without its file, {home}")
    return found


def _texts() -> dict[str, str]:
    """Return, by path, the text of each file that may hold or cite a Note, except this one."""
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*")) if path != Path(__file__)]
    return {
        path.relative_to(ROOT).as_posix(): path.read_text()
        for path in paths
        if path.suffix in (".py", ".md", ".cpp", ".hpp")
    }
