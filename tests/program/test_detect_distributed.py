"""Whether a program is distributed already, told from its code."""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import init_process_group as joins
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from lagom import experiment
from lagom.config import TorchDistributedConfig
from lagom.program.detect_distributed import is_distributed, names_device, needs_nccl
from lagom.program.script import Script


def by_attribute() -> None:
    dist.init_process_group()


def by_alias() -> None:
    joins()


def by_import() -> None:
    from torch.distributed import init_process_group as start

    start()


def by_call() -> None:
    by_attribute()


def by_closure(function: Callable[[], None]) -> Callable[[], None]:
    return lambda: function()


def by_mesh() -> Any:
    return dist.init_device_mesh("cpu", (2,))


class Trainer:
    """A class whose method the caller looks up."""

    def fit(self) -> None:
        """Train."""
        by_attribute()


def ordinary() -> bool:
    return isinstance(print, DistributedDataParallel) or dist.is_initialized()


@pytest.mark.parametrize(
    "program",
    [
        by_attribute,
        by_alias,
        by_import,
        by_call,
        by_closure(by_attribute),
        by_mesh,
        functools.partial(by_call),
        Trainer().fit,
        Script(
            "x.py", "if True:\n    def f():\n        import torch\n        torch.distributed.init_process_group()", ()
        ),
    ],
)
def test_programs_that_start_a_process_group_are(program: Any) -> None:
    assert is_distributed(program)


@pytest.mark.parametrize(
    "program",
    [
        ordinary,
        print,
        dist.is_initialized,
        dist.destroy_process_group,
        Script("x.py", "import torch\ntorch.distributed.is_initialized()  # init_process_group", ()),
    ],
)
def test_others_are_not(program: Any) -> None:
    assert not is_distributed(program)


SETUP = "import torch.distributed as dist\ndef setup():\n    dist.init_process_group()\n"
MODELS = """
from torch.distributed import init_process_group
from own_setup import setup

class Net:
    def forward(self, x):
        return scaled(x)

def scaled(x):
    return x

class Trainer:
    def fit(self):
        setup()

def main():
    init_process_group()
"""
"""A network, beside what trains it under torchrun."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Modules and a package of the user's own, and a script that imports some."""
    files = {
        "own_setup.py": SETUP,
        "own_indirect.py": "from own_setup import *\n",
        "own_plain.py": "import torch\n",
        "own_renamed.py": "from own_setup import setup as begin\n",
        "own_models.py": MODELS,
        "own_registry.py": "kinds = []\n@kinds.append\ndef one():\n    import own_setup\n    own_setup.setup()\n",
        "own_guarded.py": "class Net: ...\nif __name__ == '__main__':\n    import own_setup\n    own_setup.setup()\n",
        "own_at_import.py": "import own_setup\nif True:\n    own_setup.setup()\n",
        "own_package/__init__.py": "",
        "own_package/ordinary.py": "from . import layers\n",
        "own_package/layers.py": "",
        "own_package/distributed.py": "from .deep import run\n",
        "own_package/deep/__init__.py": "from ..parallel import setup as run\n",
        "own_package/parallel.py": SETUP,
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("own_")]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("import own_setup\nown_setup.setup()", True),
        ("import own_setup\ngetattr(own_setup, 'setup')()", True),
        ("import own_setup", False),
        ("from own_indirect import setup\nsetup()", True),
        ("from own_renamed import begin\nbegin()", True),
        ("from own_models import Net\nNet()", False),
        ("from own_models import Trainer\nTrainer()", True),
        ("from own_models import main\nmain()", True),
        ("from own_registry import kinds\nkinds[0]()", True),
        ("from own_guarded import Net\nNet()", False),
        ("import own_at_import", True),
        ("def f():\n    from own_setup import setup", True),
        ("import own_plain", False),
        ("import own_package.ordinary", False),
        ("from own_package import ordinary", False),
        ("from own_package import distributed\ndistributed.run()", True),
        ("import own_package.distributed as d\nd.run()", True),
        ("import own_package.distributed as d", False),
        ("import own_nowhere", False),
    ],
)
def test_modules_that_a_program_imports_are_read(folder: Path, text: str, wanted: bool) -> None:
    assert is_distributed(Script(str(folder / "x.py"), text, ())) is wanted


@pytest.mark.parametrize(("name", "wanted"), [("own_indirect", True), ("own_plain", False)])
def test_modules_that_a_function_knows_are_read(folder: Path, name: str, wanted: bool) -> None:
    module = importlib.import_module(name)
    assert is_distributed(eval("lambda: module.setup()", {"module": module})) is wanted
    assert is_distributed(lambda: module.setup()) is wanted


@pytest.mark.parametrize(("name", "wanted"), [("parallel", True), ("layers", False), ("horovod", False)])
def test_relative_imports_of_functions_and_modules_are_of_their_package(folder: Path, name: str, wanted: bool) -> None:
    (folder / "own_package" / "horovod.py").write_text("")
    text = f"def train():\n    from .{name} import setup\n    setup()\n"
    (folder / "own_package" / "training.py").write_text(text)
    function = importlib.import_module("own_package.training").train
    assert is_distributed(function) is wanted
    assert is_distributed(Script("training.py", text, (), module="own_package.training")) is wanted


@pytest.mark.parametrize(("name", "wanted"), [("Net", False), ("Trainer", True)])
def test_of_a_loaded_module_what_is_used_counts(folder: Path, name: str, wanted: bool) -> None:
    models = importlib.import_module("own_models")
    cls = getattr(models, name)
    made = cls()
    for program in (lambda: cls(), lambda: made, functools.partial(cls)):
        assert is_distributed(program) is wanted


def test_an_edited_module_is_read_again(folder: Path) -> None:
    script = Script(str(folder / "x.py"), "import own_plain\nown_plain.setup()", ())
    assert not is_distributed(script)
    (folder / "own_plain.py").write_text(SETUP)
    assert is_distributed(script)


backend = "nccl"


def by_global() -> None:
    dist.init_process_group(backend=backend)


def by_argument() -> None:
    dist.init_process_group("nccl")


def by_choice(has_gpu: bool) -> None:
    dist.init_process_group("nccl" if has_gpu else "gloo")


def by_device(_: bool) -> None:
    dist.init_process_group("cpu:gloo,cuda:nccl")


@pytest.mark.parametrize(
    ("function", "wanted"),
    [(by_global, True), (by_argument, True), (by_choice, False), (by_device, False), (by_attribute, False)],
)
def test_a_program_that_can_do_with_nccl_alone_is_told_from_others(function: Callable[..., None], wanted: bool) -> None:
    assert needs_nccl(function) == wanted


def test_a_script_that_can_do_with_nccl_alone_is_told() -> None:
    text = (
        "import os\nfrom torch.distributed import init_process_group\n"
        "backend = 'nccl' # or 'gloo'\n"
        "if int(os.environ.get('RANK', -1)) != -1:\n    init_process_group(backend=backend)\n"
    )
    assert needs_nccl(Script("train.py", text, ()))


def _trains_where_rank_is_not_set() -> tuple[int, float]:
    ddp = int(os.environ.get("RANK", -1)) != -1
    if ddp:
        dist.init_process_group(backend=backend)
    model = torch.nn.Linear(1, 1, dtype=torch.float64)
    for (batch,) in DataLoader(TensorDataset(torch.arange(6, dtype=torch.float64)), 3):
        model(batch.unsqueeze(1)).square().mean().backward()
    assert model.weight.grad is not None
    return ddp, round(model.weight.grad.item(), 9)


def test_a_program_for_nccl_runs_as_an_ordinary_one_where_there_are_no_gpus(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    torch.manual_seed(3)
    plain = _trains_where_rank_is_not_set()
    torch.manual_seed(3)
    config = TorchDistributedConfig(launcher="local", world_size=2, batches="whole", run_dir=None)
    assert list(experiment.lagom(_trains_where_rank_is_not_set, config).per_rank) == [plain, plain]
    assert "by NCCL alone" in caplog.text


def moves() -> Any:
    return torch.ones(1).cuda()


def chooses(rank: int) -> Any:
    return torch.ones(1).to(f"cuda:{rank}")


def follows(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros(3, device=x.device).to("cpu")


@pytest.mark.parametrize(
    ("program", "wanted"),
    [
        (moves, True),
        (chooses, True),
        (functools.partial(chooses, 0), True),
        (Script("x.py", "import torch\nd = 'cuda' if torch.cuda.is_available() else 'cpu'", ()), True),
        (Script("x.py", "trainer = Trainer(accelerator='gpu')", ()), True),
        (follows, False),
        (ordinary, False),
    ],
)
def test_programs_that_place_their_tensors_are_known(program: Any, wanted: bool) -> None:
    assert names_device("cuda", program) is wanted


def test_a_module_of_the_program_may_name_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_places.py").write_text("def place(x):\n    return x.to('cuda:1')\n\ndef other(x):\n    return x\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert names_device("cuda", Script("x.py", "from own_places import place\nplace(1)", ()))
    assert not names_device("cuda", Script("x.py", "from own_places import other\nother(1)", ()))
