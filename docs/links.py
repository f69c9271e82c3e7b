"""A hook of mkdocs: links from docs/ to files that are no pages become text; marks of the tests are left out."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
_NOT_RUN = re.compile(r"^```python no-run$", re.MULTILINE)
"""Begins a block that tests do not run; mkdocs takes no second word there."""
_LINK = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+[^)#]+)\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace each link that leaves docs/ by its text and path, and leave out what only the tests read.

    Raises:
        FileNotFoundError: if a link leads to a file that is not there.
    """

    def plain(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page.file.src_uri), link[2]))
        if target.startswith("docs/"):
            return link[0]
        if not (ROOT / target).exists():
            raise FileNotFoundError(f"{page.file.src_uri} links to {target}, which does not exist")
        return link[1] if link[1].strip("`") == target else f"{link[1]} (`{target}`)"

    return _LINK.sub(plain, _NOT_RUN.sub("```python", markdown))
