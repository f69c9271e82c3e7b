"""MLflow in programs that know nothing of ranks: each run, metric and artifact is there once, whatever keeps it."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import platform
import re
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.distributed import FileStore
from torch.utils.data import DataLoader, TensorDataset

import lagom
from lagom import disk as files
from lagom import experiment
from lagom.config import TorchDistributedConfig
from lagom.exchange.run_store import SealedStore
from lagom.extensions.observe.tracking.serialization import decode, encode
from lagom.patching.importers import on_import
from lagom.session.session import Session
from tests.imported_once import forked_server
from tests.late_modules import mlflow
from tests.ranks import RankFailedError, alone, run_ranks


@pytest.fixture(autouse=True)
def _plain_mlflow(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    mlflow.imported()  # once, and not in each process that is forked
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    monkeypatch.setenv("GIT_PYTHON_REFRESH", "quiet")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """A folder where a database's many small writes need not reach a disk."""
    place = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=place) as folder:
        yield Path(folder)


def program() -> dict[str, Any]:
    """Logs what can be logged, and reads it back."""
    client = mlflow.MlflowClient()
    mlflow.set_experiment("bridges")
    with mlflow.start_run(run_name="outer", tags={"kind": "test"}) as run:
        mlflow.log_params({"lr": 0.1, "depth": 3})
        for step in range(3):
            mlflow.log_metric("loss", 1.0 / (step + 1), step=step)
        mlflow.log_metrics({"a": 1.0, "b": 2.0}, step=7)
        later = mlflow.log_metric("late", 4.0, synchronous=False)
        assert later is not None
        later.wait()
        mlflow.set_tag("colour", "red")
        Path("note.txt").write_text("a note")
        mlflow.log_artifact("note.txt", "notes")
        mlflow.log_dict({"x": 1}, "x.json")
        with mlflow.start_run(run_name="inner", nested=True) as inner:
            mlflow.log_metric("loss", 0.25)
        listed = sorted(file.path for file in client.list_artifacts(run.info.run_id))
        fetched = mlflow.artifacts.download_artifacts(run_id=run.info.run_id, artifact_path="notes/note.txt")
        text = Path(fetched).read_text()
        model = mlflow.initialize_logged_model(name="bridge", params={"depth": "3"})
        ready = mlflow.finalize_logged_model(model.model_id, "READY")
        client.create_registered_model("bridges", tags={"kind": "test"})
        version = client.create_model_version("bridges", f"runs:/{run.info.run_id}/x.json", run.info.run_id)
        client.set_registered_model_alias("bridges", "best", version.version)
        registered = client.search_registered_models()[0]
        active = mlflow.active_run()
        assert active is not None
        assert active.info.run_id == run.info.run_id
    with pytest.raises(mlflow.exceptions.MlflowException) as caught:
        client.get_run("0" * 32)
    found = client.search_runs([run.info.experiment_id], order_by=["attributes.start_time"])
    best = mlflow.search_runs(order_by=["metrics.loss"], output_format="list")[0]
    client.delete_run(inner.info.run_id)
    deleted = client.get_run(inner.info.run_id).info.lifecycle_stage
    client.restore_run(inner.info.run_id)
    mlflow.start_run(run_name="left open")
    mlflow.log_metric("z", 1.0)
    return {
        "ids": [run.info.run_id, inner.info.run_id],
        "found": sorted(one.info.run_name for one in found),
        "best": best.info.run_name,
        "metrics": client.get_run(run.info.run_id).data.metrics,
        "history": [(one.step, one.value) for one in client.get_metric_history(run.info.run_id, "loss")],
        "listed": listed,
        "model": (model.status, ready.status.to_int(), mlflow.get_logged_model(model.model_id).params),
        "registered": (registered.tags, list(registered.aliases), version.status, deleted),
        "text": text,
        "error": (type(caught.value).__name__, caught.value.error_code),
    }


def standing_in(folder: Path, uri: str, call: Callable[[], Any]) -> Any:
    os.chdir(folder)
    mlflow.set_tracking_uri(uri)
    try:
        return call()
    finally:
        mlflow.tracking.fluent._safe_end_run()  # as at the end of the process


def kept(folder: Path, uri: str) -> Any:
    """All that a store holds, but for ids and times; read by a process of its own."""

    def read() -> Any:
        client = mlflow.MlflowClient()
        (one,) = client.search_experiments(filter_string="name = 'bridges'")
        runs = client.search_runs([one.experiment_id])
        ignored = ("mlflow.source", "mlflow.user", "mlflow.parentRunId")
        return sorted(
            (
                run.info.run_name,
                run.info.status,
                sorted(run.data.params.items()),
                sorted((key, value) for key, value in run.data.tags.items() if not key.startswith(ignored)),
                "mlflow.parentRunId" in run.data.tags,
                [(key, [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, key)])
                 for key in sorted(run.data.metrics)],
                sorted(file.path for file in client.list_artifacts(run.info.run_id)),
            )
            for run in runs
        )  # fmt: skip

    return alone(lambda _: standing_in(folder, uri, read))


@pytest.mark.parametrize("uri", ["file:./mlruns", pytest.param("sqlite:///runs.db", marks=pytest.mark.soak)])
def test_what_is_logged_and_read_is_that_of_one_process(uri: str, in_memory: Path) -> None:
    def folder(name: str) -> Path:
        (in_memory / name).mkdir()
        return in_memory / name

    files = "file:./mlruns"
    plain = folder("plain")
    expected = alone(lambda _: standing_in(plain, files, program))
    del expected["ids"]
    holds = kept(plain, files)
    assert [run[0] for run in holds] == ["inner", "left open", "outer"]
    shared = folder("shared")
    found = run_ranks(2, lambda _: standing_in(shared, uri, program))
    assert len({tuple(one.pop("ids")) for one in found}) == 1
    assert found == [expected] * 2
    assert kept(shared, uri) == holds


def autologged() -> list[float]:
    """Train with what MLflow logs by itself of a program that writes to TensorBoard."""
    from torch.utils.tensorboard import SummaryWriter

    mlflow.set_experiment("bridges")
    mlflow.pytorch.autolog(log_every_n_step=1)
    torch.manual_seed(0)
    model = nn.Linear(3, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(24, 3).double(), torch.randn(24, 1).double())
    losses = []
    with mlflow.start_run(run_name="by itself"), SummaryWriter("events") as writer:
        for step, (x, y) in enumerate(DataLoader(data, batch_size=6)):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            writer.add_scalar("loss", losses[-1], step)
        writer.add_hparams({"lr": 0.1}, {"last": losses[-1]})
    importlib.import_module("mlflow.pytorch._pytorch_autolog").flush_metrics_queue()  # as at the end of the process
    return losses


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.soak)])
def test_what_is_logged_by_itself_is_that_of_one_process(world_size: int, in_memory: Path) -> None:
    def run(name: str) -> Any:
        (in_memory / name).mkdir(exist_ok=True)
        return standing_in(in_memory / name, "file:./mlruns", autologged)

    plain = alone(lambda _: run("plain"))
    ((name, status, params, _, _, metrics, _),) = holds = kept(in_memory / "plain", "file:./mlruns")
    assert (name, status, params) == ("by itself", "FINISHED", [("lr", "0.1")])
    history = dict(metrics)["loss"]
    torch.testing.assert_close([value for _, value in history], plain, rtol=1e-6, atol=0.0)  # TensorBoard's float32
    assert run_ranks(world_size, lambda _: run("shared"), batches="whole", always_slices=False) == [plain] * world_size
    assert kept(in_memory / "shared", "file:./mlruns") == holds


@pytest.mark.soak  # the first test compares ids by default
def test_a_run_has_one_id_on_all_ranks(tmp_path: Path) -> None:
    def run(session: Session) -> Any:
        def call() -> Any:
            with mlflow.start_run(run_name=f"begun {time.time_ns()}") as run:  # a name of each rank's own
                return run.info.run_id, run.info.run_name

        return standing_in(tmp_path, "file:./mlruns", call)

    assert len(set(run_ranks(3, run))) == 1


def test_who_asks_for_its_rank_may_log_on_one(tmp_path: Path) -> None:
    def run(session: Session) -> Any:
        def call() -> Any:
            files.asked_for_rank()
            if session.rank == 0:
                with mlflow.start_run(run_name="by rank 0"):
                    mlflow.log_metric("a", 1.0)
            with mlflow.start_run(run_name="by all") as run:
                mlflow.log_metric(f"of rank {session.rank}", 1.0)
            if session.rank == 1:  # a question of its own, which rank 0 does not ask
                return sorted(one.info.run_name for one in mlflow.search_runs(output_format="list"))
            return run.info.run_id

        return standing_in(tmp_path, "file:./mlruns", call)

    first, second, third = run_ranks(3, run)
    assert first == third
    assert second == ["by all", "by rank 0"]


@pytest.mark.soak  # test_rank0_answers.py shows by default that no rank waits for ever
def test_a_rank_that_begins_a_run_alone_is_told_so(tmp_path: Path) -> None:
    def run(session: Session) -> None:
        def call() -> None:
            mlflow.set_experiment("one")
            if session.rank == 1:
                mlflow.start_run()

        standing_in(tmp_path, "file:./mlruns", call)

    with pytest.raises(RankFailedError, match=r"rank 1 asked MLflow for create_run\(\), and rank 0.* did not"):
        run_ranks(2, run)


def test_mlflow_says_that_git_is_missing_as_often_as_in_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "git"]:
        monkeypatch.delitem(sys.modules, name)  # GitPython looks for git when it is imported
    monkeypatch.delenv("GIT_PYTHON_REFRESH")
    monkeypatch.setenv("PATH", str(tmp_path))

    def train() -> None:
        mlflow.set_tracking_uri(f"file:{tmp_path}/mlruns")
        with mlflow.start_run():
            mlflow.log_metric("loss", 1.0)

    def shown() -> list[str]:
        return [re.sub(r"^\d+/\S+ \S+ ", "", line) for line in capfd.readouterr().err.splitlines()]

    alone(lambda _: train())
    plain = shown()
    begin = "WARNING mlflow.utils.git_utils: Failed to import Git"
    assert sum(line.startswith(begin) for line in plain) == 3  # commit, branch and repository
    with forked_server():
        experiment.lagom(train, TorchDistributedConfig(launcher="local", world_size=2, run_dir=None, name="train"))
    assert shown() == [f"lagom: train: 2 ranks on this machine ({platform.node()}: ranks 0-1)", *plain]


def test_mlflow_is_as_before_afterwards(tmp_path: Path) -> None:
    from mlflow.store.artifact.artifact_repository_registry import ArtifactRepositoryRegistry
    from mlflow.tracking._model_registry.registry import ModelRegistryStoreRegistry
    from mlflow.tracking._tracking_service.registry import TrackingStoreRegistry

    from lagom.extensions.observe.tracking.mlflow import log_once_to_mlflow
    from tests.ranks import session_alone

    owners = (ArtifactRepositoryRegistry, ModelRegistryStoreRegistry, TrackingStoreRegistry)
    before = [dict(vars(owner)) for owner in owners], list(sys.meta_path)
    session = session_alone(tmp_path)
    session.notes = SealedStore(FileStore(str(tmp_path / "store"), -1), b"")
    with contextlib.suppress(KeyError), log_once_to_mlflow(session):
        assert all(dict(vars(owner)) != then for owner, then in zip(owners, before[0], strict=True))
        raise KeyError
    assert ([dict(vars(owner)) for owner in owners], list(sys.meta_path)) == before


@pytest.mark.parametrize("is_done", [True, False])
def test_metrics_that_a_loss_has_cut_off_are_logged_once(is_done: bool, tmp_path: Path) -> None:
    """A rank was lost just before a store had logged them, or just after."""
    from lagom.extensions.observe.tracking.mlflow import log_once_to_mlflow
    from tests.ranks import session_alone

    def log() -> None:
        mlflow.log_metric("one", 1.0, step=3)
        mlflow.log_metrics({"one": 2.0, "other": float("nan")}, step=4)

    def cut_off(journal: Path, step: int) -> None:
        """Remove what follows the beginning of the call at ``step``."""
        lines = journal.read_text().splitlines(keepends=True)
        (at,) = (at for at, line in enumerate(lines) if f'_step\\", {step}'.replace(" ", "") in line)
        journal.write_text("".join(lines[: at + 1]))

    def run(_: Any) -> Any:
        session: Any = session_alone(tmp_path)
        session.resumption.is_resumable, session.resumption.journal = True, str(tmp_path / "calls")
        with log_once_to_mlflow(session):
            run = mlflow.start_run()
            state, go_on = session.resumption.services["mlflow"]
            before = state()
            log()
            for step in (4, 3):
                cut_off(tmp_path / "calls", step)
                for path in tmp_path.glob("mlruns/*/*/metrics/*"):
                    rows = path.read_text().splitlines(keepends=True)
                    path.write_text("".join(row for row in rows if int(row.split()[-1]) < step + is_done))
                go_on(before)
                log()
            client = mlflow.MlflowClient()
            return [
                [(m.step, repr(m.value)) for m in client.get_metric_history(run.info.run_id, key)]
                for key in ("one", "other")
            ]

    found = alone(lambda _: standing_in(tmp_path, "file:./mlruns", lambda: run(_)))
    assert found == [[(3, "1.0"), (4, "2.0")], [(4, "nan")]]


def test_entities_travel_and_nothing_else_does() -> None:
    from mlflow.entities import Metric, Run, RunData, RunInfo, RunTag
    from mlflow.store.entities.paged_list import PagedList

    info = RunInfo(run_id="a", experiment_id="0", user_id="u", status="RUNNING", start_time=1, end_time=None,
                   lifecycle_stage="active", artifact_uri="file:x", run_name="n")  # fmt: skip
    run = Run(info, RunData([Metric("loss", float("inf"), 1, 2)], [], [RunTag("k", "v")]))
    page = decode(encode(PagedList([run], token="next")))
    assert type(page) is PagedList
    assert page.token == "next"
    assert page[0].to_dictionary() == run.to_dictionary()
    for plain in (None, {"dict": [1, ["a"]], 3: 2.5}, [True], mlflow.entities.ViewType.ALL):
        assert decode(encode(plain)) == plain
    error = decode(encode(mlflow.exceptions.MlflowException("gone", error_code=1)))
    assert (str(error), error.message, error.get_http_status_code()) == ("gone", "gone", 500)
    assert type(decode(encode(ConnectionError("no")))) is ConnectionError
    with pytest.raises(TypeError, match="Linear"):
        encode([nn.Linear(1, 1)])
    for module, name in (("os", "_Environ"), ("mlflow.tracking.fluent", "os"), ("mlflow.tracking.fluent", "start_run")):
        with pytest.raises(TypeError):
            decode(json.dumps({"module": module, "name": name, "args": [], "items": [], "state": {"dict": []}}))


def test_modules_are_changed_when_they_are_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lagom_comes_later.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    seen: list[str] = []
    with on_import({name: lambda module: seen.append(module.__name__) for name in ("json", "lagom_comes_later")}):
        assert seen == ["json"]
        module = importlib.import_module("lagom_comes_later")
        assert seen == ["json", "lagom_comes_later"]
        assert module.value == 1
        spec = module.__spec__
        assert spec is not None
        assert "exec_module" not in vars(spec.loader)
        assert importlib.reload(module) is module
    del sys.modules["lagom_comes_later"]
    importlib.import_module("lagom_comes_later")
    del sys.modules["lagom_comes_later"]
    assert seen == ["json", "lagom_comes_later", "lagom_comes_later"]


class Server(BaseHTTPRequestHandler):
    """A small part of MLflow's tracking server, which counts requests."""

    counts: ClassVar[Counter[str]] = Counter()
    lock = threading.Lock()

    def answer(self) -> None:
        size = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(size) or b"{}")
        call = self.path.partition("?")[0].partition("/mlflow/")[2]
        with self.lock:
            self.counts[call] += 1
            if call == "runs/log-metric":
                self.counts[f"{body['key']} at {body['step']}"] += 1
            number = self.counts["runs/create"]
        info = {
            "run_id": f"{number:032x}",
            "experiment_id": "7",
            "status": "RUNNING",
            "artifact_uri": "mlflow-artifacts:/",
        }
        answers = {
            "experiments/get-by-name": {"experiment": {"experiment_id": "7", "name": "x", "lifecycle_stage": "active"}},
            "runs/create": {"run": {"info": info, "data": {}}},
            "runs/get": {"run": {"info": info, "data": {}}},
            "runs/update": {"run_info": info},
        }
        text = json.dumps(answers.get(call, {})).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_GET = do_POST = do_PATCH = answer

    def log_message(self, *args: Any) -> None:
        """Do nothing."""


@contextlib.contextmanager
def server() -> Iterator[tuple[str, Counter[str]]]:
    Server.counts = Counter()
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as listening:
        thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.server_port}", Server.counts
        finally:
            listening.shutdown()
            thread.join()


@pytest.mark.soak
def test_a_server_is_asked_as_by_one_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On two ranks through a launcher: they import MLflow, and the run is ended at the end of the process."""

    def train() -> str:
        import mlflow

        mlflow.set_experiment("x")
        mlflow.start_run()
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = TensorDataset(torch.ones(12, 2))
        for step, (x,) in enumerate(DataLoader(data, batch_size=4)):
            optimizer.zero_grad()
            loss = model(x).mean()
            loss.backward()
            optimizer.step()
            mlflow.log_metric("loss", float(loss), step=step)
        run = mlflow.active_run()
        assert run is not None
        return str(run.info.run_id)

    counts = []
    with server() as (uri, seen):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        alone(lambda _: standing_in(tmp_path, uri, train))
        counts.append(dict(seen))
        seen.clear()
        result = experiment.lagom(train, TorchDistributedConfig(world_size=2, launcher="local", run_dir=None))
        assert set(result.per_rank) == {result.value}
        counts.append(dict(seen))
    assert counts[0] == counts[1]
    assert counts[1]["runs/create"] == counts[1]["loss at 2"] == counts[1]["runs/update"] == 1
    assert lagom.rank() == 0
