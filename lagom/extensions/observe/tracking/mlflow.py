"""MLflow: rank 0 alone calls its stores, whatever they are; the other ranks get rank 0's answers. See Note [Stores]."""

from __future__ import annotations

import functools
import inspect
import os
import pkgutil
import sys
import time
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from lagom import disk as files
from lagom.errors import LagomError
from lagom.extensions.observe.tracking.call_journal import CallJournal, log_missing_metrics
from lagom.extensions.observe.tracking.mlflow_state import mlflow_state, set_mlflow_state
from lagom.extensions.observe.tracking.rank0_answers import Answers
from lagom.patching.importers import on_import
from lagom.patching.replace import replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

    from lagom.session.session import Session

    MakeStore = Callable[[], Any]

_STORES = "TrackingStoreRegistry", "mlflow.store.tracking.abstract_store:AbstractStore"
_MODELS = "ModelRegistryStoreRegistry", "mlflow.store.model_registry.abstract_store:AbstractStore"
_ARTIFACTS = "ArtifactRepositoryRegistry", "mlflow.store.artifact.artifact_repo:ArtifactRepository"
_REGISTRIES = {
    "mlflow.tracking._tracking_service.registry": (*_STORES, "_get_store_with_resolved_uri"),
    "mlflow.tracking._model_registry.registry": (*_MODELS, "_get_store_with_resolved_uri"),
    "mlflow.store.artifact.artifact_repository_registry": (*_ARTIFACTS, "get_artifact_repository"),
}
"""For each module, its registry of stores, the base class of stores, and the registry's method that returns a store."""
_WAITS = ("flush_", "shut_", "_await_")
"""Beginnings of methods that wait until all is logged."""
_LOGS = (
    *("log_", "set_", "record_", "link_", "upload_", "update_run_info", "start_trace", "_log_"),
    *("end_", *_WAITS),
)
"""Beginnings of methods that other ranks skip: they log, or wait until all is logged."""
_RUN = "MLFLOW_RUN_ID"
"""Environment variable that names the run with which a process goes on; a search sets it for each trial."""
_DOWNLOADS = ("download_", "get_local_path")
"""Beginnings of methods that every rank calls itself, after rank 0: they give a path on the rank's disk."""
_TRACES = ("trace", "span")
"""Parts of names of methods that the journal does not keep: random ids in their arguments never match again."""
_READS = ("get_", "search_", "list_", "find_", "batch_get_", "query_", "calculate_", "load_", *_DOWNLOADS)
"""Beginnings of methods that a rank may call itself if rank 0 does not make the call: they change nothing."""


@contextmanager
def log_once_to_mlflow(session: Session) -> Iterator[Callable[[], None]]:
    """Patch MLflow so that rank 0 alone calls its stores, and the other ranks get rank 0's answers.

    Yields a function to be called when the program has ended, before ranks wait for each other.
    """
    tracker = _Tracker(session)
    with ExitStack() as stack:

        def change(module: ModuleType) -> None:
            owner, base, method = _REGISTRIES[module.__name__]
            registry = vars(module)[owner]
            stack.enter_context(replaced(registry, method, tracker.shared_stores(getattr(registry, method), base)))

        def follow_experiment(module: ModuleType) -> None:
            stack.enter_context(replaced(module, "set_experiment", _leaving_run(vars(module)["set_experiment"])))

        changes: dict[str, Callable[[ModuleType], None]] = dict.fromkeys(_REGISTRIES, change)
        if session.plan.searches and _RUN in os.environ:
            changes["mlflow"] = follow_experiment
        with on_import(changes):
            try:
                yield tracker.end
            finally:
                tracker.end()


def _leaving_run(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``mlflow.set_experiment``: if it sets another experiment, the run in ``MLFLOW_RUN_ID`` is not used."""
    before = os.environ.get("MLFLOW_EXPERIMENT_ID")

    @functools.wraps(original)
    def set_experiment(*args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        if found.experiment_id != before:
            os.environ.pop(_RUN, None)  # MLflow would refuse a run of another experiment
        return found

    return set_experiment


class _Tracker:
    """Calls of one rank to MLflow's stores."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._answers = None
        if session.notes is not None and session.world_size > 1:
            self._answers = Answers(session, "mlflow")
        self._pid = os.getpid()
        self.journal: CallJournal | None = None
        """Journal of rank 0's calls that change something; None without snapshots, or without a place for it."""
        self._is_told = False
        if session.resumption.is_resumable:
            if session.resumption.journal is not None:
                self.journal = CallJournal(session.resumption.journal, session.say_once)
            session.resumption.services["mlflow"] = self._state, self._restore

    def _state(self) -> Any:
        if self._is_told and self.journal is None and self._session.plan.rehearsal is None:
            raise LagomError(
                "the program tells MLflow something, and only a run_dir that all hosts share can keep what it has told"
            )
        return 0 if self.journal is None else self.journal.num, mlflow_state()

    def _restore(self, state: Any) -> None:
        num, mlflow = state
        set_mlflow_state(mlflow)
        if self.journal is not None and self._session.rank == 0:
            self.journal.restore(num)

    @property
    def _is_shared(self) -> bool:
        return not self._session.has_joined and not _is_direct.get()

    def end(self) -> None:
        """On rank 0, tell other ranks that the program has ended; on other ranks, end runs that are still active."""
        fluent: Any = sys.modules.get("mlflow.tracking.fluent")
        if self._session.rank == 0:
            if self._answers is not None:
                self._answers.end()
        elif fluent is not None and not self._session.has_joined:
            with suppress(Exception):  # MLflow itself does so later, when the call would reach the real store
                while fluent.active_run() is not None:
                    fluent.end_run()

    def shared_stores(self, original: Callable[..., Any], base: str) -> Callable[..., Any]:
        """Wrap a registry's method that returns the store at an address."""

        @functools.wraps(original)
        def get_store(registry: Any, uri: str, *args: Any, **kwargs: Any) -> Any:
            make = functools.partial(original, registry, uri, *args, **kwargs)
            self._is_told = True
            if not self._is_shared:
                return make()
            if self._session.rank == 0:
                real = self._direct(make)
                return _Store(self, type(real), lambda: real, is_repeated=base != _ARTIFACTS[1])
            if hasattr(registry, "get_store_builder"):
                registry.get_store_builder(uri)  # raises if there is no store for this address
            return _Store(self, pkgutil.resolve_name(base), lambda: self._direct(make))

        return get_store

    def _direct(self, call: Callable[..., Any], *args: Any) -> Any:
        """Run ``call`` with the real stores; all ranks of rank 0's host see the files that rank 0 writes there."""
        token = _is_direct.set(True)
        try:
            with files.downloading() if self._session.rank == 0 else nullcontext():
                return call(*args)
        finally:
            _is_direct.reset(token)

    def call(self, name: str, real: Callable[..., Any], args: Any, kwargs: Any, make: MakeStore | None = None) -> Any:
        """Make the call of a store's method ``name``, skip it, or wait for rank 0's answer, as this rank has to.

        Args:
            real: the method of the real store.
            make: returns the real store; None if the journal does not keep calls of this store.

        Raises:
            LagomError: if the call is no read, and rank 0 does not make it, or gets an answer that cannot be sent.
            Exception: the error of the call on rank 0.
        """
        is_first, is_log, is_fork = self._session.rank == 0, name.startswith(_LOGS), os.getpid() != self._pid
        if not self._is_shared or (is_first and is_fork):
            return real(*args, **kwargs)
        call = functools.partial(self._direct, functools.partial(real, *args, **kwargs))
        if is_first and make is not None and self.journal is not None and _is_change(name):
            kind: Any = type(make())
            _, *given = _signature(kind, name).bind(None, *args, **kwargs).arguments.items()
            finish = None
            if name in ("log_metric", "log_batch"):  # which add rows to a history
                finish = functools.partial(self._direct, functools.partial(log_missing_metrics, make, name))
            call = functools.partial(self.journal.call, name, dict(given), call, finish)
        if is_log or self._answers is None:
            return call() if is_first else self._skip(name, kwargs)
        key, arguments = self._answers.key(name), repr((args, kwargs))
        if is_first:
            return self._answers.give(key, arguments, call)
        answer, is_read = None if is_fork else self._answers.receive(key), name.startswith(_READS)
        if answer is not None and (answer.arguments == arguments or not is_read):
            if answer.error is not None:
                raise answer.error
            if not name.startswith(_DOWNLOADS):
                return answer.value
        if not is_read:
            raise LagomError(
                f"rank {self._session.rank} asked MLflow for {name}(), and rank 0, which asks for all ranks, did not, "
                "or got what cannot be passed on: make the call on every rank, or on rank 0 alone"
            )
        return call()

    def _skip(self, name: str, kwargs: Any) -> Any:
        if files.has_asked():
            self._session.say_once(
                "the program has asked for its rank and logs to MLflow on several ranks: what rank 0 logs is kept"
            )
        if name.endswith("_async"):
            operations: Any = sys.modules["mlflow.utils.async_logging.run_operations"]
            return operations.RunOperations([])
        return kwargs.get("trace_info")  # start_trace returns this argument; other methods return nothing


@functools.cache
def _signature(kind: type, name: str) -> inspect.Signature:
    return inspect.signature(getattr(kind, name))


def _is_change(name: str) -> bool:
    return not name.startswith((*_READS, *_WAITS)) and not any(part in name for part in _TRACES)


class _Store:
    """Replaces an MLflow store on every rank, and hands its calls to the tracker. See Note [Stores].

    On rank 0 the real store exists already; on other ranks it is made only when it is needed.

    Args:
        kind: class of the real store; on ranks other than 0 the base class of such stores.
        make: returns the real store.
        is_repeated: whether the journal keeps calls of this store, so that they are not made twice after a loss.
    """

    def __init__(self, tracker: _Tracker, kind: type, make: Callable[[], Any], is_repeated: bool = False) -> None:
        self._lagom = tracker, kind, make, is_repeated

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # for isinstance
        return self._lagom[1]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_lagom":
            raise AttributeError(name)
        tracker, kind, make, is_repeated = self._lagom
        method = getattr(kind, name, None)
        if not callable(method) or (name.startswith("_") and not name.startswith(_LOGS)):
            return getattr(make(), name)
        if name == "log_batch_async" and is_repeated and tracker.journal is not None:
            return self._log_batch_at_once

        def real(*args: Any, **kwargs: Any) -> Any:
            store = make()
            if name != "create_run":
                return getattr(store, name)(*args, **kwargs)
            _end_lost_runs(store)
            run = store.create_run(*args, **kwargs)
            files.note_tracked_run(run.info.run_id)
            return run

        repeated = make if is_repeated else None
        return functools.wraps(method)(lambda *args, **kwargs: tracker.call(name, real, args, kwargs, repeated))

    def _log_batch_at_once(self, *args: Any, **kwargs: Any) -> Any:
        """Log now instead of in the background, since a snapshot has to know all calls that were made before it."""
        self.log_batch(*args, **kwargs)
        operations: Any = sys.modules["mlflow.utils.async_logging.run_operations"]
        return operations.RunOperations([])


def _end_lost_runs(store: Any) -> None:
    """Set the status of MLflow runs that lost attempts began to KILLED: no attempt goes on with these runs."""
    for run_id in files.lost_tracked_runs():
        with suppress(Exception):  # of another store, or deleted
            if store.get_run(run_id).info.status == "RUNNING":
                killed: Any = sys.modules["mlflow.entities"].RunStatus.KILLED
                store.update_run_info(run_id, killed, int(time.time() * 1000), None)


_is_direct = ContextVar("_is_direct", default=False)
"""True while code uses the real stores."""


# Note [Stores]
#
# All calls of MLflow (fluent functions, a client, a flavour's log_model, an integration of another library) end in a
# store: of runs, of registered models, or of artifacts. MLflow gets each store from a registry, which makes the kind of
# store that an address needs: files, a database, a server. So patching the registries covers all calls.
#
# Every rank gets a _Store. On rank 0 its calls reach the real store, and the results go to the other ranks (see Note
# [Answers] in rank0_answers.py). Other ranks skip calls that log, without waiting. All their other calls wait for rank
# 0's answer, so that a run has the same id on all ranks, and reads give the state of the same moment. Another rank
# reads the real store only to fetch artifacts, or for a call that rank 0 does not make. Files that rank 0 writes
# (./mlruns) are not part of its own disk only: the other ranks of its host see them at once, as they see downloads. If
# MLflow adds a method, rank 0 answers it until it is listed above.
#
# A trial of a search usually has one rank, and a disk of its own unless it runs inline. Its calls reach the real store
# too: runs of all trials are in one place, as if they had run one after another.
#
# If only another rank logs a value, after the program has asked for its rank, the value is not recorded either. If the
# program has made its own process group, each rank calls the real stores itself.
