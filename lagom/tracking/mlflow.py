"""MLflow: what all ranks log is logged once, by rank 0, whatever store it goes to; what it answers, all ranks get."""

from __future__ import annotations

import functools
import os
import re
import sys
import threading
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any, Literal

from lagom import files
from lagom.errors import LagomError
from lagom.patching.import_hooks import on_import
from lagom.patching.replace import replaced
from lagom.tracking.rank0_answers import Answer, Answers, digest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import ModuleType

    from lagom.session.session import Session

_PACKAGE = "mlflow"
_TRACKING = "mlflow.tracking._tracking_service.registry"
_MODELS = "mlflow.tracking._model_registry.registry"
_ARTIFACTS = "mlflow.store.artifact.artifact_repository_registry"

Kind = Literal["log", "read", "make", "fetch"]
_LOGS = re.compile(r"(?!delete_traces)(log|set|delete|restore|link|unlink|record|flush|end|shut|upload)_")
"""Methods that give nothing back."""
_LOGS_TOO = frozenset(
    ("update_run_info", "rename_experiment", "start_trace", "_log_artifact_async", "_await_model_version_creation")
)
_READS = re.compile(r"(get|search|list|find|batch_get|query|calculate)_")
_FETCHES = re.compile(r"download_|get_local_path$")
"""Methods of artifact repositories that leave files where the rank can read them."""
_GIVEN_BACK = ("start_trace", "log_spans")
"""Methods whose answer is what they are given."""


@contextmanager
def log_once_to_mlflow(session: Session) -> Iterator[Callable[[], None]]:
    """Have MLflow's stores of other ranks than 0 answer as rank 0's, and change nothing. See Note [Stores].

    What is yielded is to be called when the program has ended, before ranks wait for each other.
    """
    stores = _Stores(session)
    with ExitStack() as stack:

        def change(module: ModuleType) -> None:
            if not stores.is_over:
                for owner, name, value in stores.replacements(module):
                    stack.enter_context(replaced(owner, name, value))

        with on_import(dict.fromkeys((_TRACKING, _MODELS, _ARTIFACTS), change)):
            try:
                yield stores.end
            finally:
                stores.end()


class _Stores:
    """Those of one rank."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.answers = Answers(session)
        self.own = _Own()
        self.is_over = False
        self.pid = os.getpid()
        self._known: dict[Any, Any] = {}
        self._used = False

    @property
    def is_shared(self) -> bool:
        """Whether there are other ranks that log the same, and this is one of them, or was forked from one."""
        return not self.own.inside and not self.session.joined and self.session.world_size > 1

    def replacements(self, module: ModuleType) -> Iterator[tuple[object, str, Any]]:
        """What is replaced in a module that has just been imported."""
        if module.__name__ == _ARTIFACTS:
            owner: Any = vars(module)["ArtifactRepositoryRegistry"]
            yield owner, "get_artifact_repository", self._repository(owner.get_artifact_repository)
        else:
            kind = "tracking" if module.__name__ == _TRACKING else "model_registry"
            owner = vars(module)["TrackingStoreRegistry" if kind == "tracking" else "ModelRegistryStoreRegistry"]
            yield owner, "get_store", self._store(owner.get_store, kind)

    def end(self) -> None:
        """The program has ended."""
        if self.is_over:
            return
        if self._used and self.session.rank == 0 and not self.session.joined:
            self.answers.over()
        elif self._used and not self.session.joined:
            # What MLflow does at the end of a process, as long as it is known that nothing is to come of it.
            self.is_over = True
            fluent: Any = sys.modules.get("mlflow.tracking.fluent")
            if fluent is not None:
                with suppress(Exception):
                    while fluent.active_run() is not None:
                        fluent.end_run()
        self.is_over = True

    def _store(self, original: Callable[..., Any], kind: str) -> Callable[..., Any]:
        @functools.wraps(original)
        def get_store(registry: Any, store_uri: Any = None, *args: Any, **kwargs: Any) -> Any:
            if not self.is_shared:
                return original(registry, store_uri, *args, **kwargs)
            self._used = True
            if self.session.rank == 0:
                return self._wrapped(self._inside(lambda: original(registry, store_uri, *args, **kwargs)))
            with self.own:
                resolved = _resolved(kind, store_uri)
                registry.get_store_builder(resolved)  # raises where there is none
            abstract = vars(sys.modules[f"mlflow.store.{kind}.abstract_store"])["AbstractStore"]
            key = (kind, resolved, str(args), str(kwargs))
            if key not in self._known:
                make = functools.partial(original, registry, resolved, *args, **kwargs)
                self._known[key] = _Other(self, abstract, make, {})
            return self._known[key]

        return get_store

    def _repository(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def get_artifact_repository(registry: Any, artifact_uri: str, *args: Any, **kwargs: Any) -> Any:
            if not self.is_shared:
                return original(registry, artifact_uri, *args, **kwargs)
            self._used = True
            make = functools.partial(original, registry, artifact_uri, *args, **kwargs)
            if self.session.rank == 0:
                return _First(self, self._inside(make))
            module: Any = sys.modules[_ARTIFACTS]
            scheme = module.get_uri_scheme(artifact_uri)
            made_by = registry.get_registered_artifact_repositories().get(scheme)
            if made_by is None:
                return make()  # raises
            kind = made_by if isinstance(made_by, type) else module.ArtifactRepository
            return _Other(self, kind, make, {"artifact_uri": artifact_uri})

        return get_artifact_repository

    def _wrapped(self, real: Any) -> Any:
        if id(real) not in self._known:
            self._known[id(real)] = _First(self, real)
        return self._known[id(real)]

    def _inside(self, call: Callable[[], Any]) -> Any:
        """``call`` with stores as they are; the files that it writes are seen by all ranks of the host."""
        with self.own, files.downloading():
            return call()

    def first(self, kind: Kind, name: str, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A call on rank 0."""
        if not self.is_shared or os.getpid() != self.pid:
            return call(*args, **kwargs)
        if kind == "log":
            return self._inside(lambda: call(*args, **kwargs))
        key, asked = self.answers.key(name, _PACKAGE), digest(args, kwargs)
        try:
            value = self._inside(lambda: call(*args, **kwargs))
        except Exception as error:
            self.answers.tell(key, Answer(asked, None, error))
            raise
        self.answers.tell(key, Answer(asked, None if kind == "fetch" else value, None))
        return value

    def other(self, kind: Kind, name: str, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A call on another rank; ``call`` would reach the store."""
        if not self.is_shared:
            return call(*args, **kwargs)
        if kind == "log":
            return self._logged(name, args, kwargs)
        answer = None
        if os.getpid() == self.pid and not self.is_over:
            asked = digest(args, kwargs) if kind == "read" else ""
            answer = self.answers.wait(self.answers.key(name, _PACKAGE))
            if answer is not None and answer.error is not None:
                raise answer.error
            if answer is not None and kind != "fetch" and not (asked and answer.asked and asked != answer.asked):
                return answer.value
        if kind == "make" and answer is None:
            raise LagomError(
                f"rank {self.session.rank} asked MLflow for {name}(), and rank 0, which asks for all ranks, did not: "
                "make the call on every rank, or on rank 0 alone"
            )
        with self.own:  # a question of this rank's own, or files to be fetched
            return call(*args, **kwargs)

    def _logged(self, name: str, args: Any, kwargs: Any) -> Any:
        if files.has_asked():
            self.session.say_once(
                "the program has asked for its rank and logs to MLflow on several ranks: what rank 0 logs is kept"
            )
        if name in _GIVEN_BACK:
            return args[-1] if args else next(iter(kwargs.values()), None)
        if name.endswith("_async") and not name.startswith(("_", "flush", "end", "shut")):
            operations: Any = sys.modules["mlflow.utils.async_logging.run_operations"]
            return operations.RunOperations([])
        return None


class _Own(threading.local):
    """Of a thread: while it is entered, stores are as they are."""

    inside = 0

    def __enter__(self) -> None:
        self.inside += 1

    def __exit__(self, *exc: object) -> None:
        self.inside -= 1


class _First:
    """A store of rank 0's, whose answers are told."""

    def __init__(self, stores: _Stores, real: Any) -> None:
        self.__dict__["_lagom"] = stores, real

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # for isinstance
        return type(self.__dict__["_lagom"][1])

    def __getattr__(self, name: str) -> Any:
        stores, real = self.__dict__["_lagom"]
        value = getattr(real, name)
        kind = _kind(name)
        if kind is None or not callable(value):
            return value
        return functools.wraps(value)(lambda *args, **kwargs: stores.first(kind, name, value, args, kwargs))

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["_lagom"][1], name, value)


class _Other:
    """A store of another rank's; the real one is made only where a question has to be asked there."""

    def __init__(self, stores: _Stores, kind: type, make: Callable[[], Any], known: Mapping[str, Any]) -> None:
        self.__dict__.update(known)
        self.__dict__["_lagom"] = stores, kind, make

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # for isinstance
        return self.__dict__["_lagom"][1]

    def __getattr__(self, name: str) -> Any:
        stores, abstract, make = self.__dict__["_lagom"]
        if name.startswith("__"):
            raise AttributeError(name)
        kind = _kind(name)
        if kind is None or not callable(getattr(abstract, name, None)):
            with stores.own:
                return getattr(make(), name)

        def real(*args: Any, **kwargs: Any) -> Any:
            return getattr(make(), name)(*args, **kwargs)

        method = getattr(abstract, name)
        return functools.wraps(method)(lambda *args, **kwargs: stores.other(kind, name, real, args, kwargs))


def _kind(name: str) -> Kind | None:
    """What a method of that name does; None: it concerns the object itself."""
    if _LOGS.match(name) or name in _LOGS_TOO:
        return "log"
    if name.startswith("_"):
        return None
    if _FETCHES.match(name):
        return "fetch"
    return "read" if _READS.match(name) else "make"


def _resolved(kind: str, store_uri: Any) -> Any:
    if kind == "tracking":
        return vars(sys.modules["mlflow.tracking._tracking_service.utils"])["_resolve_tracking_uri"](store_uri)
    return vars(sys.modules["mlflow.tracking._model_registry.utils"])["_resolve_registry_uri"](store_uri)


# Note [Stores]
#
# Whatever a program calls of MLflow (fluent functions, a client, a flavour's log_model, an integration of another
# library), it comes to a store: of runs, of registered models, of artifacts. Each of these is had from a registry,
# which makes the kind that an address asks for: files, a database, a server. So the registries are the one place that
# holds for all of them.
#
# Rank 0 gets the real one, and what it is told goes to the other ranks (Note [Answers]). Those get one that keeps
# nothing of what is logged, and waits for nobody then; has rank 0's answers to what it asks, so that a run's id is the
# same everywhere; and is made for real only to fetch artifacts, or where a rank asks something of its own. What rank 0
# writes as files (./mlruns) is not its disk's alone: the other ranks of its host see it at once, as they see downloads.
#
# What only another rank logs, after asking for its rank, is not kept either: that would need that rank's word for it.
