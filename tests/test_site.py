"""``make docs``: links of docs/ lead somewhere, its Python compiles, and every page is in the navigation."""

from __future__ import annotations

import ast
import contextlib
import re
import runpy
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import plots
from lagom import cli

ROOT = Path(__file__).parent.parent
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_lead_somewhere(page: Path) -> None:
    assert dead_links(page) == []


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_python_compiles(page: Path) -> None:
    for number, block in enumerate(re.findall(r"```python[^\n]*\n(.*?)```", page.read_text(), re.DOTALL)):
        ast.parse(block, f"{page.name}, block {number}")


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_lines_of_blocks_are_shown_whole(page: Path) -> None:
    """docs/site.css has room for 120 columns on a screen of 1,280 pixels."""
    blocks = re.findall(r"^ *```.*?\n(.*?)^ *```$", page.read_text(), re.DOTALL | re.MULTILINE)
    assert [line for block in blocks for line in block.splitlines() if len(line) > 120] == []


@pytest.mark.parametrize("page", PAGES[:-2], ids=NAMES[:-2])
def test_blocks_begin_as_mkdocs_reads_them(page: Path) -> None:
    hooks = runpy.run_path(str(ROOT / "docs" / "links.py"))
    place = SimpleNamespace(file=SimpleNamespace(src_uri=str(page.relative_to(ROOT / "docs"))))
    shown = hooks["on_page_markdown"](page.read_text(), page=place)
    # A second word there would make the whole block a paragraph.
    assert [begin for begin in re.findall(r"^ *```(.*)$", shown, re.MULTILINE) if not re.fullmatch(r"\w*", begin)] == []


def test_every_page_is_in_the_navigation() -> None:
    listed = set(re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    decisions = {page for page in pages if re.match(r"decisions/\d", page)}
    assert pages - decisions == listed
    index = (ROOT / "docs" / "decisions" / "README.md").read_text()
    assert [page for page in sorted(decisions) if f"({page.removeprefix('decisions/')})" not in index] == []


def test_plots_show_the_figures_of_the_tables() -> None:
    """Else: python -m benchmarks.plots."""
    for plot in plots.PLOTS:
        assert (ROOT / "docs" / plot.file).read_text() == plots.drawn(plot), plot.file
    assert dict(plots.figures(plots.PLOTS[0]))["lagom, per_rank"] < 1


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_commands_are_known(page: Path) -> None:
    """Commands in blocks and in the text: options of lagom's, modules, targets of make."""
    text = page.read_text()
    blocks = "\n".join(re.findall(r"```(?:sh)?\n(.*?)```", text, re.DOTALL))
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    lines = [re.split(r"\s{2,}#|\s#\s", line)[0].removeprefix("$ ").strip() for line in [*blocks.splitlines(), *inline]]
    for line in lines:
        if "..." in line or not line.isascii():
            continue
        if found := re.match(r"python -m (benchmarks\.\w+)", line):
            assert (ROOT / found[1].replace(".", "/")).with_suffix(".py").exists(), line
        if found := re.match(r"make (\w+)", line):
            assert re.search(rf"^{found[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), line
        if re.match(r"lagom (run|debug|search|doctor|runs|show|compare) [\w-]", line):
            with contextlib.suppress(SystemExit):  # --help
                cli.argument_parser().parse_args(shlex.split(line)[1:])
                continue
            assert "--help" in line, line


def test_dead_links_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A page\n\n[a](page.md#a-page) [b](gone.md) [c](#nowhere) [d](https://example.org/x)\n")
    assert dead_links(page) == ["gone.md", "#nowhere"]


def dead_links(page: Path) -> list[str]:
    """Return the links of ``page`` to files or headings that do not exist; addresses on other hosts are not asked."""
    dead = []
    for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if "://" not in link and not (target.exists() and (not anchor or anchor in _anchors(target))):
            dead.append(link)
    return dead


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
