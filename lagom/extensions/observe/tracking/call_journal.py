"""``CallJournal``: rank 0's calls to MLflow, on disk, so that an attempt after a loss does not make them twice."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lagom import disk as files
from lagom.digests import parse_record, record_text
from lagom.extensions.observe.tracking.serialization import decode, encode

_VARYING = re.compile(r'\["(_timestamp|start_time|end_time|_value)",(-?[\d.e+-]+|NaN|-?Infinity)\]')
"""Matches arguments that are not compared: times, and metric values, which another number of ranks rounds otherwise."""
_UNIMPORTANT = "update_run_info"
"""Call by which a failing program ends its MLflow run; a program that goes on instead does not repeat this call."""


@dataclass(slots=True)
class _Call:
    """A call that a lost attempt has made."""

    name: str
    given: str
    """Arguments, encoded; empty if they cannot be."""
    answer: str | None = None
    """The answer, encoded; empty if it cannot be, None if the attempt was lost during the call: then call again."""

    def is_repeated_by(self, name: str, given: str) -> bool:
        """Return whether the program makes the call again."""
        is_new = name.startswith("create_")  # its arguments are not compared: a name may have a time in it
        return name == self.name and (is_new or _VARYING.sub("", given) == _VARYING.sub("", self.given))


class CallJournal:
    """The calls of a run that change something in MLflow's stores, by their numbers. See Note [Repeated calls].

    Args:
        path: file of the journal.
        say: tells the user that the program has not repeated a lost attempt's calls.
    """

    def __init__(self, path: str, say: Callable[[str], None]) -> None:
        self._path, self._say = path, say
        self._fd = -1
        self.num = 0
        """Number of calls so far, including those before the snapshot from which this attempt goes on."""
        self._lost: dict[int, _Call] = {}

    def restore(self, num: int) -> None:
        """Go on from a snapshot, at which the program had made ``num`` calls."""
        self.num, self._lost = num, {}
        self._open(0)
        damaged = 0
        with open(self._path, "rb") as file:
            for line in file:
                # A line without an end is of a process that was killed.
                damaged += not self._take(line) and line.endswith(b"\n") and line != b"\n"
        if damaged:
            self._say(
                f"{damaged} lines of the journal of MLflow's calls are damaged: what the lost attempt has told MLflow "
                "after the snapshot may be there twice"
            )
        self._write("\n")  # ends half a line

    def _take(self, line: bytes) -> bool:
        """Read a line of the journal; return whether it is whole."""
        try:
            self._read(parse_record(line))
        except (ValueError, KeyError, TypeError):
            return False
        return True

    def _read(self, entry: dict[str, Any]) -> None:
        number = entry["number"]
        if "answer" in entry:
            if number in self._lost:
                self._lost[number].answer = entry["answer"]
        elif number > self.num:
            self._lost = {one: call for one, call in self._lost.items() if one < number}
            self._lost[number] = _Call(entry["name"], entry["given"])

    def call(
        self, name: str, given: dict[str, Any], make: Callable[[], Any], finish: Callable[[Any], Any] | None = None
    ) -> Any:
        """Make a call of the program, or return the answer that a lost attempt has got to the same call.

        Args:
            given: the arguments, by their names.
            make: makes the call.
            finish: makes the call during which an attempt was lost, with that attempt's arguments; None if ``make`` may
                make the call a second time.
        """
        self.num += 1
        text, lost = _encoded(given), self._lost.pop(self.num, None)
        if lost is not None and not lost.is_repeated_by(name, text):
            self._forget(lost)
            lost = None
        if lost is None:
            self._add({"number": self.num, "name": name, "given": text})
            value = make()
        elif lost.answer:
            return decode(lost.answer)
        else:
            value = make() if finish is None or not lost.given else finish(decode(lost.given))
        self._add({"number": self.num, "answer": _encoded(value)})
        return value

    def _forget(self, lost: _Call) -> None:
        if any(one.name != _UNIMPORTANT for one in (lost, *self._lost.values())):
            self._say(
                "the program has told MLflow something else than before the loss: what the lost attempt has told it "
                "after the snapshot stays there"
            )
        self._lost.clear()

    def _add(self, entry: dict[str, Any]) -> None:
        if self._fd < 0:  # the run goes on from no snapshot, so its journal begins empty
            self._open(os.O_TRUNC)
        self._write(f"{record_text(entry)}\n")

    def _open(self, more: int) -> None:
        with files.downloading():  # it is no file of the program's
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self._fd = os.open(self._path, flags | more, 0o600)

    def _write(self, text: str) -> None:
        os.write(self._fd, text.encode())


def log_missing_metrics(make: Callable[[], Any], name: str, given: dict[str, Any]) -> Any:
    """Repeat the call during which an attempt was lost, without the metrics that the store has already.

    Args:
        make: returns the store.
        name: name of the store's method, ``log_metric`` or ``log_batch``.
        given: the method's arguments in the lost attempt.
    """
    store, metrics = make(), given["metrics"] if name == "log_batch" else [given["metric"]]
    known = {key: store.get_metric_history(given["run_id"], key) for key in {one.key for one in metrics}}
    new = [one for one in metrics if _facts(one) not in map(_facts, known[one.key])]
    if name == "log_batch":
        return store.log_batch(**given | {"metrics": new})
    return store.log_metric(**given) if new else None


def _facts(metric: Any) -> tuple[Any, ...]:
    return repr(float(metric.value)), metric.timestamp, metric.step


def _encoded(value: Any) -> str:
    try:
        return encode(value)
    except TypeError:
        return ""


# Note [Repeated calls]
#
# A store of MLflow cannot be set back to its content at a snapshot: it may be a server, or a database that C code
# changes. So the program's calls are counted, and written to a journal with their answers: a line before each call, and
# one after it. A snapshot has the number of calls. An attempt that goes on from the snapshot finds in the journal the
# calls that were made after the snapshot. The program repeats them, and gets the answers from the journal, so that an
# MLflow run which the lost attempt has begun goes on too. Calls after the last of these reach the store. Neither times
# nor metric values are compared: another number of ranks rounds values differently, but a step must be logged only
# once.
#
# One call may have been under way when the attempt was lost. It is made again: a log_metric or log_batch with the times
# that it had then, and without the metrics that the store has already; any other call, perhaps a second time. So is a
# call whose answer cannot be encoded. If a program makes another call than the lost attempt did, the calls of the lost
# attempt cannot be undone in the store; a line says so.
