"""``ScriptTrial``: a script as the function of a search: options are hyperparameters, and it prints the metric."""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

from lagom.errors import MetricError
from lagom.extensions.search.on_rank.trial import Trial
from lagom.patching.replace import replaced
from lagom.program.script import Script
from lagom.world import place_in_run

_NUMBER = r"[-+]?(?:(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|(?:nan|inf)(?!\w))"
_END_OF_LINE = re.compile(r"\r\n|\r|\n")
_LONGEST = 10_000  # last characters that are kept of a line that is written in pieces


@dataclass(frozen=True, slots=True)
class ScriptTrial(Script):
    """A script that trials call with their hyperparameters; it returns the last ``metric`` that it prints, or None."""

    metric: str = "loss"

    @classmethod
    def of(cls, script: Script, metric: str) -> ScriptTrial:
        """Return ``script`` as a trial with that metric."""
        return cls(**{each.name: getattr(script, each.name) for each in fields(script)}, metric=metric)

    def __call__(self, hparams: Mapping[str, Any], reporter: Any) -> float | None:  # type: ignore[override]
        """Run the script with ``hparams`` as options after its own arguments; report each value that it prints.

        Raises:
            MetricError: if the script neither prints nor logs the metric on rank 0.
        """
        script = replace(self, arguments=(*self.arguments, *options(hparams)))
        printed = PrintedMetric(self.metric, reporter.broadcast)
        with printed.watched():
            Script.__call__(script)
        place = place_in_run()
        if printed.last is None and _logged(reporter) is None and (place is None or place.rank == 0):
            raise MetricError(
                f"{self.__name__} printed no line with {self.metric!r} and a number, such as "
                f'"{self.metric}: 0.123" or "{self.metric}=0.123"; have it print one, or name another with --metric'
                + (f". Its last line was {printed.line!r:.200}" if printed.line else "")
            )
        return printed.last


def _logged(reporter: Any) -> float | None:
    """Return the last value of the metric that the program has logged."""
    trial: Trial | None = reporter.part("search")
    return trial.logged if trial is not None else None


def options(params: Mapping[str, Any]) -> list[str]:
    """Return hyperparameters as options of a command line: ``--lr 0.1``."""
    words: list[str] = []
    for name, value in params.items():
        # argparse takes a word such as -1e-05 for an option.
        words += [f"--{name}={value}"] if str(value).startswith("-") else [f"--{name}", str(value)]
    return words


class PrintedMetric:
    """Finds the values of a metric in the lines that this process writes to ``sys.stdout`` and ``sys.stderr``.

    Args:
        name: name of the metric; its value follows after a colon or an equals sign.
        report: called for each complete line of the thread that made this object, with the last value in the line.
            Lines that end with a carriage return, as of a progress bar, are not reported: their number is chance.
    """

    def __init__(self, name: str, report: Callable[[float], None]) -> None:
        self._value = re.compile(rf"(?<!\w){re.escape(name)}(?!\w)[\"']?\s*[:=]\s*(?:tensor\()?({_NUMBER})")
        self._report = report
        self._process, self._thread = os.getpid(), threading.get_ident()
        self.last: float | None = None
        """The last value."""
        self.line = ""
        """The last line that is not empty."""

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Read what is printed in the context."""
        with ExitStack() as stack:
            for stream in (sys.stdout, sys.stderr):
                begun = _BegunLine()
                write = self._write(stream.write, begun)
                stack.enter_context(replaced(stream, "write", write))
                stack.callback(self._read, begun, "\r")  # for a last line without an end
            yield

    def _write(self, original: Callable[[str], int], begun: _BegunLine) -> Callable[[str], int]:
        def write(text: str, /) -> int:
            size = original(text)
            if os.getpid() == self._process:
                self._read(begun, text)
            return size

        return write

    def _read(self, begun: _BegunLine, text: str) -> None:
        begun.text += text
        if not _END_OF_LINE.search(text):
            begun.text = begun.text[-_LONGEST:]
            return
        at, numbers = 0, list[float]()
        for end in _END_OF_LINE.finditer(begun.text):
            line = begun.text[at : end.start()]
            at = end.end()
            self.line = line.strip() or self.line
            if values := self._value.findall(line):
                self.last = float(values[-1])
                numbers += [self.last] * (end[0] != "\r")
        begun.text = begun.text[at:]
        if threading.get_ident() == self._thread:
            for value in numbers:
                self._report(value)


@dataclass(slots=True)
class _BegunLine:
    text: str = ""
