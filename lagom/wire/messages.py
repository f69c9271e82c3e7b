"""``Message``, the base of all messages between driver, host processes and ranks, and the messages of every run.

A new message is a frozen dataclass with ``tag=``, here or in the ``messages.py`` of its extension, with a row in that
file's table ("host" is a host process). Its tag and fields are the JSON object that travels: ``{"type": tag, "field":
value, ...}``. Who receives a message matches on its class (``isinstance`` or ``match``). The first class or function in
the last column handles the message; those after "past" only look at it on its way. ``tests/wire/test_messages.py``
compares these tables with the source.

==============  ===================  ==================================================================================
message         sent by              handled by
==============  ===================  ==================================================================================
TaskHello       host, first          DriverServer
FetchHello      host, first          DriverServer
DeliverHello    rank or host, first  DriverServer
Received        driver               deliver
Join            host                 RunView, past join_run
Gather          driver               await_peers
Peers           driver               await_peers
Stop            driver               RankSupervisor; before ranks: await_peers
Hold            driver               RankSupervisor
Stopping        host                 RunView
Started         host                 RunView
Log             rank, host           RunDisplay, past RankSupervisor, RankEvents and failure_as_text; search: TrialLoop
Dropped         host, RankEvents     RunDisplay
ProgressReport  rank                 RunDisplay, past RankSupervisor and RankEvents; search: TrialLoop
Doing           rank                 RankSupervisor
Stalled         host                 RunDisplay; search: TrialLoop
CutOff          rank                 RunView
FileNote        rank 0               RunView
RankReport      rank                 RankSupervisor, past OutcomeCollector
Failed          host                 RunView
Done            host                 RunView
Lost            host                 RunView; search: TrialLoop, past LocalSlots
GatherRequest   executor's host      _reply
Gathered        executor's worker    _gathered
PayloadRequest  executor's host      _reply
PayloadWritten  executor's worker    _ask_for_payload
TaskBegan       executor's server    _reply
TaskEnded       executor's server    run_in_server
TaskRefused     executor's server    run_in_server
TorchMissing    executor's server    run_in_server
==============  ===================  ==================================================================================

A host process passes on what it does not handle itself: to the driver, or a ``ForRank`` to its rank.

The same queues carry events of the receiving process itself, which have no tag and never travel:

============  ====================  =================================================
event         put by                handled by
============  ====================  =================================================
Closed        RunView, SlotChannel  search: TrialLoop, past LocalSlots and SparkSlots
JobOver       RunView, SparkSlots   RunView; search: SparkSlots
Warned        RunView               RunDisplay
StallsDue     RunDisplay            RunDisplay
TaskJoined    RunView               RunDisplay
RanksStarted  RunView               RunDisplay
============  ====================  =================================================
"""

from __future__ import annotations

import importlib
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Any, ClassVar, NamedTuple

_classes: dict[str, type[Message]] = {}


class MessageError(ValueError):
    """A JSON object is no message that this version of lagom knows."""


class Message:
    """Base of all messages; a subclass is a frozen dataclass with keyword-only fields and slots.

    A field without a default always travels. A field with a default travels only if its value differs.
    """

    __slots__ = ()
    tag: ClassVar[str]
    """Value of "type" in the JSON object."""
    nested: ClassVar[Sequence[str]] = ()
    """Fields that hold a message, or a list of messages."""
    is_sure: ClassVar[bool] = False
    """Whether a host process keeps the message of a rank for the driver until there is a connection."""
    follows_output: ClassVar[bool] = False
    """Whether a host process first passes on what the rank has printed before the message."""

    def unreachable(self) -> Message | None:
        """Return the host process's answer to a rank where the driver cannot be reached; None if there is no answer."""
        return None

    def __init_subclass__(cls, *, tag: str | None = None, nested: Sequence[str] | None = None) -> None:
        """Register the class under ``tag``."""
        # ``dataclass(slots=True)`` makes the class a second time, without these arguments but with the attributes.
        if tag is not None:
            cls.tag = tag
        if nested is not None:
            cls.nested = nested
        if not hasattr(cls, "tag"):
            return  # a base of messages
        known = _classes.setdefault(cls.tag, cls)
        assert (known.__module__, known.__qualname__) == (cls.__module__, cls.__qualname__), f"{cls.tag!r} is taken"
        _classes[cls.tag] = cls


class ForRank(Message):
    """Base of messages of the driver for one rank, which its host process passes on."""

    __slots__ = ()
    rank: int


class CommonQuestion(Message):
    """Base of questions that all ranks ask in the same order: the driver answers rank 0, and the answer is for all."""

    __slots__ = ()
    is_sure = True


class CommonAnswer(Message):
    """Base of answers to a ``CommonQuestion``."""

    __slots__ = ()


class LocalEvent:
    """Base of events: they go through the same queues as messages, within one process."""

    __slots__ = ()


def to_json(message: Message) -> dict[str, Any]:
    """Return the JSON object of ``message``; nested messages stay messages, and ``json.dumps(default=to_json)`` takes
    them.
    """
    required, values, optional = _layout_of(type(message))
    encoded: dict[str, Any] = {"type": message.tag}
    encoded.update(zip(required, values(message), strict=True))
    for name, default in optional:
        value = getattr(message, name)
        if value != default:
            encoded[name] = value
    return encoded


def from_json(body: Mapping[str, Any]) -> Message:
    """Return the message of a JSON object.

    Raises:
        MessageError: if its type is unknown, a field is missing, or a field is foreign.
    """
    named = dict(body)
    tag = named.pop("type", None)
    kind = _class_of(tag) if isinstance(tag, str) else None
    if kind is None:
        raise MessageError(f"a message has the type {tag!r}, which lagom {own_version()} does not know here{_ADVICE}")
    for name in kind.nested:
        if isinstance(value := named.get(name), list):
            named[name] = [from_json(one) for one in value]
        elif value is not None:
            named[name] = from_json(value)
    try:
        return kind(**named)
    except TypeError as error:
        raise MessageError(_fault(kind, named) or f"a message {tag!r} has a wrong value: {error}") from error


def _class_of(tag: str) -> type[Message] | None:
    if tag not in _classes:
        from lagom.extensions.registry import EXTENSIONS  # here, since the config's settings come from there

        for extension in EXTENSIONS:
            if extension.messages:
                importlib.import_module(extension.messages)
    return _classes.get(tag)


def own_version() -> str:
    """Return the version of this process's lagom."""
    return str(sys.modules["lagom"].__version__)


_ADVICE = "; give driver and executors the same version of lagom"


def _fault(kind: type[Message], named: Mapping[str, Any]) -> str:
    required, _, optional = _layout_of(kind)
    missing = [name for name in required if name not in named]
    foreign = [name for name in named if name not in required and name not in dict(optional)]
    faults = [f"lacks the field {name!r}" for name in missing] + [f"has the foreign field {name!r}" for name in foreign]
    if not faults:
        return ""
    return f"a message {kind.tag!r} for lagom {own_version()} {' and '.join(faults)}{_ADVICE}"


class _Layout(NamedTuple):
    """The fields of a message."""

    required: tuple[str, ...]
    """Names of the fields without a default."""
    values: Callable[[Message], tuple[Any, ...]]
    """Reads these fields."""
    optional: tuple[tuple[str, Any], ...]
    """Names and defaults of the other fields."""


_layouts: dict[type[Message], _Layout] = {}


def _layout_of(kind: type[Message]) -> _Layout:
    if (known := _layouts.get(kind)) is not None:
        return known
    required: list[str] = []
    optional: list[tuple[str, Any]] = []
    assert is_dataclass(kind)
    for each in fields(kind):
        if each.default_factory is not MISSING:
            optional.append((each.name, each.default_factory()))
        elif each.default is not MISSING:
            optional.append((each.name, each.default))
        else:
            required.append(each.name)
    # ``attrgetter`` is three times as fast, but returns a tuple only for several names.
    several = len(required) > 1
    values = operator.attrgetter(*required) if several else lambda one: tuple(getattr(one, name) for name in required)
    _layouts[kind] = _Layout(tuple(required), values, tuple(optional))
    return _layouts[kind]


# The first message of a connection.


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskHello(Message, tag="task"):
    """This connection is the channel of a task, or of a slot of a search."""

    task: int
    version: str
    """The version of lagom at the other end; the driver refuses another version than its own."""

    def __post_init__(self) -> None:
        if type(self.task) is not int:
            raise TypeError(f"task is {self.task!r}; want a number")


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchHello(Message, tag="fetch"):
    """The driver is to send a file, as raw bytes."""

    name: str
    """"payload" or "snapshot"."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeliverHello(Message, tag="deliver"):
    """A file follows, as raw bytes."""

    name: str
    """Name for the driver, such as "outcome-3"."""
    size: int
    """Bytes of the file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Received(Message, tag="received"):
    """All bytes of a delivered file have arrived."""


# The start of a run.


class RankAddress(NamedTuple):
    """Address of a rank, as all ranks learn it; an array in JSON."""

    rank: int
    host: str
    """As in ``Join``."""
    ip: str
    gpu: str | None
    """As ``visible_devices`` in cluster.py names it; None on the CPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Join(Message, tag="join"):
    """A task and its ranks are ready to meet the others."""

    task: int
    pid: int
    """Host process."""
    ranks: list[int]
    host: str
    """Name of the host, "|", and a text that is equal for processes that see the same files."""
    ip: str
    """Address at which other hosts reach the ranks."""
    store: tuple[str, int] | None
    """Address of the store where ranks find each other; from task 0 of a run alone."""
    python: str
    torch: str
    gpus: list[str]
    """Accelerator of each rank, as ``visible_devices`` names it; empty on the CPU."""
    cores: int
    """Cores that the host process may use."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "store", _address(self.store))

    @property
    def host_name(self) -> str:
        """Name of the host."""
        return self.host.partition("|")[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class Peers(Message, tag="peers"):
    """All tasks have joined: the table of all ranks, in rank order."""

    store: tuple[str, int] | None
    """Address of the store where ranks find each other; None if all ranks are on one host."""
    ranks: list[RankAddress]
    nccl: bool
    """Whether no two ranks share an accelerator."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "store", _address(self.store))
        object.__setattr__(self, "ranks", [RankAddress(*one) for one in self.ranks])


@dataclass(frozen=True, kw_only=True, slots=True)
class Gather(Message, tag="gather"):
    """Tasks are missing: those that have joined exchange their joins by Spark's allGather instead."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Started(Message, tag="started"):
    """The ranks of a task have been forked."""

    pids: dict[str, int]
    """Process of each rank; JSON has only texts as keys."""


# While ranks run.


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgressReport(Message, tag="progress"):
    """A rank's heartbeat."""

    rank: int
    epoch: int | None
    step: int | None
    """Batches of the epoch so far, or the last step that the program has reported."""
    steps: int | None
    """Batches of the whole epoch; None if unknown."""
    samples: int
    """Samples that the rank has trained on."""
    ticks: int
    """``RunProgress.ticks``: it grows with each sign of progress."""
    rate: float | None
    """Samples per second since the last heartbeat; None if these would include an earlier attempt's."""
    steps_s: float
    """Steps per second since the beginning of the epoch."""
    data: float
    """Share of the time (0 to 1) that the rank waited for data."""
    waits: float
    """Share of the time that the rank waited for other ranks."""
    waits_for: dict[str, float]
    """The same for each other rank, by its number as a text."""
    loss: float | None = None
    metric: float | None = None
    """Last value that the program has reported."""
    starts: bool = False
    """Whether the function has not been called yet."""
    cpu: float | None = None
    """Busy CPUs, with those of child processes."""
    rss: int | None = None
    """Resident memory in bytes."""
    memory: int | None = None
    """Bytes that torch has allocated on the accelerator; ``rss`` on the CPU."""
    gpu: float | None = None
    """Share of the time in which the accelerator was busy; None if unknown."""
    values: dict[str, float] = field(default_factory=dict)
    """Further values by name: ``progress_values`` of ``RunProgress``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Log(Message, tag="log"):
    """A piece of a rank's output, or a text of lagom itself."""

    rank: int
    stream: str
    """"stdout", "stderr", or ``OWN`` or ``OWN_NOTICE`` of ``watch/output.py``."""
    data: str
    """One character for each byte."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Dropped(Message, tag="dropped"):
    """Pieces of output were dropped: the driver could not keep up."""

    messages: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Doing(Message, tag="doing"):
    """The current work of a rank that makes no progress."""

    stack: str
    """As in a traceback, from the training function inwards; "" if unknown."""
    line: str
    """Innermost line of the program's own code."""
    waits: bool
    """Whether the rank is in an exchange with other ranks."""
    purpose: str = ""
    """Subject of the exchange."""
    exchange: str = ""
    """Name of the exchange and more words on it."""
    number: int = 0
    """Number of the exchange."""
    missing: list[int] = field(default_factory=list)
    """Ranks that have not come to the exchange."""
    children: str = ""
    """Stacks of processes that the rank has started."""
    state: str = ""
    """A text if the process is stopped, or waits for a device; added by the host process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stalled(Message, tag="stalled", nested=("work",)):
    """A rank has made no progress for ``stall_timeout_s``."""

    rank: int
    quiet_s: float
    """Seconds without progress."""
    work: Doing


@dataclass(frozen=True, kw_only=True, slots=True)
class CutOff(Message, tag="cut off"):
    """The machine of rank ``peer`` has not answered the machine of ``rank`` for ``lost_s`` seconds."""

    is_sure = True

    rank: int
    peer: int
    lost_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class FileNote(Message, tag="files"):
    """Rank 0 is about to change a file, or has completed one. See ``WrittenFiles.take``."""

    what: str
    """"appends", "changes", "writes", "saved", "renamed", "moved", "begins to save", "made", "tracks", "gone" or
    "resumed"."""
    path: str
    """Absolute, without links; with "tracks" the id of a run in MLflow."""
    host: str
    """Host of rank 0, as ``this_host`` names it."""
    details: dict[str, Any] = field(default_factory=dict)
    """Further facts that belong to ``what``: "appends" has "begin" and "in_place", "writes" has "before", "saved" has
    "identity" and "lengths", "renamed" has "to" and "replaces", "moved" has "to", "resumed" has "at"."""


# The end of ranks.


@dataclass(frozen=True, kw_only=True, slots=True)
class Hold(Message, tag="hold"):
    """Do not check ranks for stalls from now on, or check them again."""

    on: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class RankReport(Message, tag="outcome", nested=("output",)):
    """How a rank has ended; the value or the exception itself is in the rank's file."""

    rank: int
    ok: bool
    """Whether the function has returned."""
    stopped: bool = False
    """Whether the rank was ended because of others, before it sent a report."""
    consequence: bool = False
    """Whether the failure follows from the failure of another rank."""
    error: str = ""
    """Name of the exception's class."""
    message: str = ""
    traceback: str = ""
    exited: bool = False
    """Whether the program called ``sys.exit``."""
    exit: int | str | None = None
    """The argument of ``sys.exit``."""
    died: str = ""
    """How the process ended without a report, as the rest of a sentence."""
    lost: bool = False
    """Whether the end came from outside, so that a new attempt may succeed."""
    advice: str = ""
    """Text that is shown below the error."""
    order: int = 0
    """Place among the failures of the run, in the order in which they reached the driver."""
    sha256: str = ""
    """Digest of the rank's file, if the file was sent to the driver by a connection."""
    output: list[Message] = field(default_factory=list)
    """Output and timeline that no connection has carried to the driver."""

    @property
    def ends_others(self) -> bool:
        """Whether the other ranks of the run are to end soon too, though this one has not failed."""
        return False

    @property
    def has_failed(self) -> bool:
        """Whether the rank itself failed: it did not return, and was not only stopped."""
        return not self.ok and not self.stopped


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed(Message, tag="failed", nested=("report",)):
    """A rank has failed by itself; the reports of all ranks of its task follow later."""

    report: RankReport


@dataclass(frozen=True, kw_only=True, slots=True)
class Done(Message, tag="done", nested=("reports",)):
    """All ranks of a task have ended."""

    reports: list[RankReport]


@dataclass(frozen=True, kw_only=True, slots=True)
class Lost(Message, tag="lost"):
    """A task or a slot gives up; also put by the driver's end of a connection whose messages it cannot read."""

    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Stop(Message, tag="stop"):
    """End all ranks at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stopping(Message, tag="stopping"):
    """A host process has received ``Stop``, and ends its ranks."""


# Between the processes of a Spark executor: Python worker, fork server, and host process of a task.


@dataclass(frozen=True, kw_only=True, slots=True)
class GatherRequest(Message, tag="gather texts"):
    """The worker is to call Spark's allGather."""

    text: str
    """This task's text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gathered(Message, tag="gathered"):
    """The result of Spark's allGather."""

    texts: list[str]
    """Texts of all tasks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PayloadRequest(Message, tag="write payload"):
    """The worker is to write the payload, which Spark has broadcast."""

    path: str
    """File to write."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PayloadWritten(Message, tag="payload written"):
    """The worker has written the payload."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskBegan(Message, tag="task began"):
    """The host process has been forked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskEnded(Message, tag="task ended"):
    """The host process has ended."""

    status: int
    """Status of ``os.waitpid``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskRefused(Message, tag="task refused"):
    """The host process could not be forked."""

    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchMissing(Message, tag="torch missing"):
    """The executor's Python cannot import torch."""

    problem: str


# Events within the driver.


@dataclass(frozen=True, kw_only=True, slots=True)
class Closed(LocalEvent):
    """The connection of a task or of a slot has closed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobOver(LocalEvent):
    """The job of all tasks is over."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Warned(LocalEvent):
    """The driver's own threads have something to tell the user."""

    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StallsDue(LocalEvent):
    """The stalled ranks so far are to be shown together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskJoined(LocalEvent):
    """A task has joined."""

    host: str
    """Name of the host."""
    ranks: list[int]
    cores: int
    """Cores of the host; 0 if unknown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RanksStarted(LocalEvent):
    """The ranks of a task have been forked."""

    pids: dict[str, int]
    """As in ``Started``."""


def _address(pair: Sequence[Any] | None) -> tuple[str, int] | None:
    return None if pair is None else (str(pair[0]), int(pair[1]))
