"""Short texts for Spark's failures, with the remedies of known ones."""

from __future__ import annotations

import contextlib
import itertools
import re
import sys

_MAX_REASON = 4000  # characters
_KNOWN = (
    (r"No module named '([\w.]+)'", "the executors' Python lacks {}"),
    (r"([\w.]+) >= [\w.]+ must be installed", "the executors' Python lacks {}"),
    (r'Cannot run program "([^"]+)"', "executors have no {} to run"),
    (r"different (?:minor )?version:? ([\d.]+) than that in driver:? ([\d.]+)", "executors run Python {}, and not {}"),
)
"""Patterns of Spark's errors about an unusable Python on the executors, each with the text for the user."""


def why_it_failed(error: BaseException) -> str:
    """Return Spark's text of ``error`` without stack traces, or one line with the remedy if the cause is known."""
    if isinstance(error, ImportError):
        return missing_package_text(error)
    text = full_text(error)
    for pattern, meaning in _KNOWN:
        if match := re.search(pattern, text):
            return (
                f"{meaning.format(*match.groups())}. Install it there, or, before a Spark session is made, "
                f"set PYSPARK_PYTHON to a Python that has what this one has ({sys.executable})"
            )
    return _reason(text)


def own_message(text: str) -> str:
    """Return the message of lagom's error on an executor in Spark's ``text``; "" if it has none."""
    found = re.findall(r"^lagom\.[\w.]+: (.+)$", text, flags=re.MULTILINE)
    return found[-1] if found else ""


def missing_package_text(error: ImportError) -> str:
    """Return a text with the remedy for ``error``: this process lacks a package that PySpark needs."""
    said = str(error).strip().splitlines()[0]
    if error.name == "distutils":
        return "PySpark 3.5 needs distutils, which Python 3.12 lacks. Remedy: pip install setuptools, or PySpark 4"
    return f"this process's Python ({sys.executable}) lacks a package: {said} Remedy: pip install 'lagom-spark[spark]'"


def full_text(error: BaseException) -> str:
    """Return all text of ``error``: its message and, if Spark raised it, its description and Java's stack trace."""
    texts = [str(error)]
    for name in ("desc", "stackTrace", "java_exception"):
        with contextlib.suppress(Exception):
            texts.append(str(getattr(error, name, "")))
    return "\n".join(texts)


def _reason(text: str) -> str:
    """Return the first part of Spark's text, without py4j's first line and without stack traces."""
    lines = [line.removeprefix(": ") for line in text.splitlines() if line.strip()]
    if lines and lines[0].startswith("An error occurred while calling"):
        del lines[0]
    said = list(itertools.takewhile(lambda line: not line.startswith("\tat "), lines))
    return "\n".join(said)[:_MAX_REASON] or "it does not say why"
