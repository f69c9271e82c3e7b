"""Programs as users write them: scripts and notebooks of their own, with everything in ``__main__``."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from tests.integration import programs

ROOT = Path(__file__).parents[2]
CLASSIC = 'SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()'
REMOTE = 'SparkSession.builder.remote("local[2]").getOrCreate()'

EVERYTHING_IN_MAIN = """
    import torch
    from torch.utils.data import DataLoader, Dataset
    from lagom import experiment
    from lagom.config import TorchDistributedConfig

    class Waves(Dataset):
        def __init__(self, count):
            self.inputs = torch.linspace(-2, 2, count, dtype=torch.float64).unsqueeze(1)
        def __len__(self):
            return len(self.inputs)
        def __getitem__(self, index):
            return self.inputs[index], self.inputs[index].sin()

    class Net(torch.nn.Module):
        def __init__(self, width):
            super().__init__()
            self.first = torch.nn.Linear(1, width)
            self.last = torch.nn.Linear(width, 1)
        def forward(self, inputs):
            return self.last(torch.tanh(self.first(inputs)))

    torch.manual_seed(3)
    model = Net(8).double()
    loader = DataLoader(Waves(37), batch_size=4)
    rate = 0.1

    def epoch_of(loss):
        def train():
            optimizer = torch.optim.SGD(model.parameters(), lr=rate)
            for inputs, targets in loader:
                optimizer.zero_grad()
                loss(model(inputs), targets).backward()
                optimizer.step()
            return torch.cat([value.detach().flatten() for value in model.parameters()])
        return train

    train = epoch_of(torch.nn.functional.mse_loss)
    found = experiment.lagom(train, TorchDistributedConfig(launcher="spark", world_size=2))
    wanted = train()
    for weights in found.per_rank:
        assert torch.allclose(weights, wanted, rtol=0, atol=1e-12), (weights - wanted).abs().max()
    print("equal")
"""


@pytest.mark.parametrize(
    "session",
    [pytest.param(CLASSIC, id="classic"), pytest.param(REMOTE, id="connect")],
)
@pytest.mark.soak  # tests/driver/test_local.py has classes of a notebook by default
def test_everything_in_main_travels(tmp_path: Path, session: str) -> None:
    assert "equal" in run_script(tmp_path, session, EVERYTHING_IN_MAIN)


@pytest.mark.soak  # tests/notebooks has notebooks by default, and test_kinds.py Spark Connect
@pytest.mark.parametrize("spark", ["connect"], indirect=True, scope="session")
def test_a_notebook_runs_like_a_script(spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    # With the server that is there, as another user of it.
    session = f"SparkSession.builder.remote('sc://{spark.client._builder.endpoint}').create()"
    text = textwrap.dedent(EVERYTHING_IN_MAIN)
    cells = [f"from pyspark.sql import SparkSession\nspark = {session}", *text.split("\n\n"), "spark.stop()"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    before = signal.getsignal(signal.SIGINT)
    try:
        nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    finally:
        signal.signal(signal.SIGINT, before)  # nbclient leaves the one of its event loop
    assert "equal" in str(notebook.cells)


@pytest.fixture
def not_activated(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first Python on the path has no packages."""
    folder = tmp_path_factory.mktemp("bin")
    (folder / "python3").symlink_to(Path(sys.base_prefix, "bin", "python3"))
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


@pytest.mark.soak  # test_special.py shows it by default where a session is there
@pytest.mark.usefixtures("not_activated")
def test_tasks_on_this_machine_run_the_drivers_python_where_its_environment_is_not_activated(tmp_path: Path) -> None:
    text = """
    import sys
    from lagom import experiment
    from lagom.config import TorchDistributedConfig

    config = TorchDistributedConfig(launcher="spark", world_size=2)
    print(experiment.lagom(lambda: sys.executable, config).value == sys.executable, spark.sparkContext.pythonExec)
    """
    assert run_script(tmp_path, CLASSIC, text, activated=False) == "True python3\n"


@pytest.mark.soak  # tests/driver/test_local.py has edits by default, and test_failing.py Ctrl-C
@pytest.mark.usefixtures("not_activated")
def test_edits_of_helper_modules_are_seen_and_ctrl_c_in_a_terminal_leaves_the_session_usable(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("VALUE = 1\n")
    (tmp_path / "late.py").write_text("VALUE = 10\n")
    text = """
    import os, sys, time
    from pathlib import Path
    import beside
    import lagom
    from lagom import experiment
    from lagom.config import TorchDistributedConfig

    def train():
        import torch, late
        assert torch.distributed.is_available()
        assert sys.executable == driver
        return beside.VALUE + late.VALUE

    driver = sys.executable
    config = TorchDistributedConfig(launcher="spark")
    print(experiment.lagom(train, config).value)
    Path("beside.py").write_text("VALUE = 2" + chr(10))
    Path("late.py").write_text("VALUE = 20" + chr(10))
    print(experiment.lagom(train, config).value)
    print("torch" in sys.modules, flush=True)

    def sleep():
        os.system(f"echo {os.getpid()} > pids/{lagom.rank()}")  # there at once, unlike what rank 1 writes itself
        time.sleep(1000)

    config = TorchDistributedConfig(launcher="spark", world_size=2)
    try:
        experiment.lagom(sleep, config)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    while spark.sparkContext.statusTracker().getActiveJobsIds():
        time.sleep(0.02)
    print("gone", flush=True)
    print(experiment.lagom(lagom.world_size, config).value)
    """
    pids = tmp_path / "pids"
    pids.mkdir()
    process = start_script(tmp_path, CLASSIC, text, activated=False)
    try:
        assert process.stdout is not None
        assert [process.stdout.readline().strip() for _ in range(3)] == ["11", "22", "False"]
        ranks = programs.pids_in(pids, 2)
        # As a terminal does: to every process in the foreground.
        os.killpg(process.pid, signal.SIGINT)
        while process.stdout.readline() not in ("gone\n", ""):
            pass
        while any(programs.alive(pid) for pid in ranks):
            time.sleep(0.02)
        assert process.stdout.read() == "2\n"
        assert process.wait() == 0
    finally:
        process.kill()
        process.wait()
        process.__exit__(None, None, None)


def run_script(folder: Path, session: str, text: str, *, activated: bool = True) -> str:
    """Run the script, and return its output."""
    process = start_script(folder, session, text, activated=activated)
    try:
        output, _ = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 0, (folder / "errors").read_text()[-3000:]
    return output


def start_script(folder: Path, session: str, text: str, *, activated: bool = True) -> subprocess.Popen[str]:
    """A Python of its own that runs the script in ``folder``; as if activated, it is the one that Spark takes."""
    python = {"PYSPARK_PYTHON": sys.executable} if activated else {}
    script = folder / "script.py"
    script.write_text(
        f"from pyspark.sql import SparkSession\nspark = {session}\n{textwrap.dedent(text)}\nspark.stop()\n"
    )
    with (folder / "errors").open("w") as errors:
        return subprocess.Popen(
            [sys.executable, script.name],
            cwd=folder,
            env={key: value for key, value in os.environ.items() if key != "PYSPARK_PYTHON"}
            | {"PYTHONPATH": str(ROOT), **python},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
