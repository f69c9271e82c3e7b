"""``difference``: compares two texts, except parts that a program does not repeat, such as times."""

from __future__ import annotations

import difflib
import re

from lagom.extensions.verify.closeness import NUMBER, same_printed

_CLOCK = re.compile(r"\d+(?::\d\d)+(?:\.\d+)?|\d{4}-\d\d-\d\d")
"""Matches times and dates, which are not compared: that two runs have equal ones may be chance."""
_TOKEN = re.compile(rf"{_CLOCK.pattern}|{NUMBER.pattern}|[^\W\d]+|\S")


def difference(left: str, repeat: str, right: str, allowed: float) -> str | None:
    """Return the first line of ``left`` that differs in ``right`` by more than rounding; None if there is none.

    If only their lengths differ, return the first line that only the longer text has.

    Args:
        repeat: the text of a second run like that of ``left``: parts that differ there are ignored. If it has another
            number of lines, nothing is compared.
        allowed: relative error of numbers.
    """
    mine, repeated, theirs = left.splitlines(), repeat.splitlines(), right.splitlines()
    if len(mine) != len(repeated):
        return None
    for lines in zip(mine, repeated, theirs, strict=False):
        if not _is_same_line(*lines, allowed):
            return lines[0]
    if len(mine) != len(theirs):
        return (mine if len(mine) > len(theirs) else theirs)[min(len(mine), len(theirs))]
    return None


def _is_same_line(left: str, repeat: str, right: str, allowed: float) -> bool:
    if left == right:
        return True
    mine, repeated, theirs = _tokens(left), _tokens(repeat), _tokens(right)
    if mine == repeated and _words(mine) != _words(theirs):
        return False
    steady = {i for i, j in _aligned(mine, repeated) if mine[i] == repeated[j]}
    return all(
        same_printed(mine[i], theirs[j], allowed)
        for i, j in _aligned(mine, theirs)
        if i in steady and NUMBER.fullmatch(mine[i])
    )


def _tokens(line: str) -> list[str]:
    return [found.group() for found in _TOKEN.finditer(line)]


def _words(tokens: list[str]) -> list[str]:
    return ["@" if _CLOCK.fullmatch(token) else "#" if NUMBER.fullmatch(token) else token for token in tokens]


def _aligned(left: list[str], right: list[str]) -> list[tuple[int, int]]:
    """Return pairs of indices of corresponding tokens."""
    mine, theirs = _words(left), _words(right)
    if mine == theirs:
        return [(i, i) for i in range(len(mine))]
    blocks = difflib.SequenceMatcher(None, mine, theirs, autojunk=False).get_matching_blocks()
    return [(block.a + i, block.b + i) for block in blocks for i in range(block.size)]
