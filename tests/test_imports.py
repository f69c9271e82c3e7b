"""Who may import whom: one row per room, no circles, no module name twice; kept by reading the source."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from lagom.config import TorchDistributedConfig
from lagom.extensions.registry import ExtensionSettings
from tests.sources import ROOT, without_collections

ROOMS = {
    # What driver and ranks share; needs no torch.
    "accelerators": "cluster device_models torch",
    "available_memory": "cluster control_groups",
    "cluster": "",
    "contents": "numpy",
    "control_groups": "",
    "device_models": "cluster",
    "digests": "",
    "errors": "",
    "plan": "cluster config errors extensions",
    "random_states": "accelerators numpy torch",
    "run_folder": "cluster errors",
    "extension": "",
    "settings": "",
    "speed": "",
    "speed_advice": "speed whole_modules",
    "timings": "",
    "whole_modules": "",
    "world": "",
    "config": "extension extensions settings",
    "inspection": "torch",
    "program": "accelerators config errors inspection plan settings cloudpickle torch",
    "restart": "cluster digests errors run_folder",
    "wire": "errors extensions plan restart cryptography",
    "watch": "cluster digests errors restart run_folder timings wire fsspec pyarrow",
    # The driver.
    "driver": (
        "cluster config contents control_groups errors extensions host on_rank plan program random_states restart "
        "result run_folder speed timings watch wire world"
    ),
    "spark": (
        "cluster digests driver errors extensions host on_rank patching plan program restart watch wire conda_pack "
        "pyarrow pyspark venv_pack"
    ),
    "launch": "config driver spark",
    "result": "config errors extensions run_folder speed watch",
    "experiment": "config driver errors extensions launch on_rank plan program result timings",
    "cli": "__init__ cli_options config errors experiment extensions program spark watch",
    "cli_options": "config extensions",
    "__main__": "cli",
    "__init__": "",
    # The processes of a host, and the rank.
    "host": "control_groups disk errors extensions on_rank patching plan program restart watch wire numpy torch",
    "on_rank": (
        "accelerators cluster device_models available_memory config disk errors exchange exchange.sockets extensions "
        "optimizers patching plan program random_states run_state session watch wire world IPython numpy torch"
    ),
    # What a rank does with the program, from the top down.
    "session": (
        "accelerators batches disk distributed errors exchange exchange.torch_backend extensions forward forward.rows "
        "gradients gradients.reduction inspection optimizers patching program run_state speed speed_advice watch "
        "torch"
    ),
    "forward": "accelerators errors exchange forward.micro_batches forward.rows patching run_state watch torch",
    "forward.rows": (
        "accelerators errors exchange inspection patching random_states run_state watch whole_modules numpy torch"
    ),
    "forward.micro_batches": "errors forward.rows inspection patching random_states torch",
    "optimizers": "errors patching watch torch",
    "gradients": "accelerators errors exchange forward.rows gradients.reduction patching run_state watch torch",
    "gradients.reduction": "errors exchange run_state torch",
    "batches": "accelerators batches.sharing disk errors exchange patching program run_state watch world numpy torch",
    "batches.sharing": (
        "disk errors exchange forward.rows inspection patching program random_states run_state world numpy torch"
    ),
    "distributed": "disk errors exchange exchange.sockets exchange.torch_backend patching program torch",
    "disk": "cluster patching restart wire numpy torch",
    "run_state": "accelerators errors inspection patching random_states numpy torch",
    "patching": "accelerators torch",
    "exchange": "control_groups errors exchange.sockets watch numpy torch",
    "exchange.sockets": "torch",
    "exchange.torch_backend": "exchange exchange.sockets watch torch",
    # Public names of extensions.
    "data": "extensions.data",
    "compat": (
        "extensions extensions.compat extensions.compat.horovod extensions.compat.maggy extensions.compat.petastorm"
    ),
    "doctor": "extensions.observe.doctor",
}
"""Packages and modules that each room of the trunk may import, beyond itself and the standard library.

Rooms of extensions have no row: they import the trunk, their own extension and those in BETWEEN_EXTENSIONS.
"""
LIBRARIES = {
    "extensions": "",
    "extensions.compat": "torch",
    "extensions.compat.horovod": "cloudpickle torch",
    "extensions.compat.maggy": "torch",
    "extensions.compat.petastorm": "fsspec numpy packaging pyarrow torch",
    "extensions.data": "numpy pyarrow",
    "extensions.data.column_types": "cv2 numpy PIL pyarrow torch",
    "extensions.data.parquet": "fsspec numpy pandas pyarrow torch",
    "extensions.data.sources": "deltalake pyiceberg fsspec numpy pyarrow",
    "extensions.observe": "",
    "extensions.observe.debugger": "",
    "extensions.observe.doctor": "torch",
    "extensions.observe.report": "",
    "extensions.observe.timeline": "torch",
    "extensions.observe.tracking": "",
    "extensions.resume": "torch",
    "extensions.scoring": "cloudpickle mlflow numpy pandas pyarrow pyspark torch",
    "extensions.search": "optuna pandas",
    "extensions.search.on_host": "",
    "extensions.search.pages": "",
    "extensions.search.samplers": "optuna",
    "extensions.search.slots": "",
    "extensions.verify": "",
    "extensions.verify.on_rank": "torch",
    "extensions.zero": "torch",
    "extensions.zero.deepspeed": "deepspeed torch",
    "extensions.zero.memory_plan": "torch",
    "extensions.zero.parameters": "torch",
}
"""Libraries of the rooms of extensions that do not import torch, or import others too; of other rooms: torch, numpy."""

OPTIONAL = {
    "cloudpickle",
    "cryptography",
    "cv2",
    "deepspeed",
    "deltalake",
    "fsspec",
    "mlflow",
    "optuna",
    "packaging",
    "pandas",
    "pyiceberg",
    "PIL",
} | {
    "conda_pack",
    "pyarrow",
    "pyspark",
    "venv_pack",
}
"""Libraries that are imported where they are used, inside of a function."""
EAGER = {
    "lagom.extensions.compat.horovod.broadcasting": {"cloudpickle"},
    "lagom.extensions.compat.petastorm": {"pyarrow"},
    "lagom.spark.spark": {"pyspark"},
    "lagom.spark.spark_session": {"pyspark"},
    "lagom.program.pickler": {"cloudpickle"},
    "lagom.extensions.search.samplers.grid_sampler": {"optuna"},
}
"""But for these modules, and packages."""
OF_EACH_ROOM = {"messages"}
"""Modules that a room may have of its own."""
NOTHING = {
    "lagom.spark.spark_task",
    "lagom.run_state.malloc_trim",
    "lagom.program.user_folder",
    *(
        f"lagom.extensions.scoring.{name}"
        for name in ("row_scorer", "input_columns", "output_columns", "executor_scoring")
    ),
    *(f"lagom.extensions.data.column_types.{name}" for name in ("lists", "types")),
}
"""They import nothing of lagom's but each other: what travels by value to executors that have no lagom."""


BETWEEN_EXTENSIONS = {
    "compat": "search",  # Maggy's lagom() returns the result of a search
    "resume": "observe",  # a snapshot has the events that TensorBoard's writers have not written yet
    "scoring": "data",  # columns become tensors as in training, and Parquet is read as there
    "search": "data",  # an ablation study leaves out columns of a table
    "verify": "resume",  # a rehearsal of a snapshot takes one
}
"""Extensions that import another extension, which is there in the same distribution."""


@dataclass(frozen=True)
class Import:
    """One import statement: a module, of lagom's or of others."""

    name: str
    line: int
    later: bool
    """Whether the statement stands inside a function, and so does not run when its module is imported."""


@without_collections()
def test_every_module_imports_only_what_its_room_allows() -> None:
    modules = read()
    assert modules
    assert [line for module, source in modules.items() for line in violations(module, source)] == []


def test_rooms_import_each_other_without_a_circle() -> None:
    graph: dict[str, set[str]] = {}
    for module, source in read().items():
        for imported in _imports(module, source):
            rooms = _room(module), _room(imported.name)
            if _names_its_rooms(module, imported) or _ties_the_trunk(*rooms):
                continue
            if imported.name.startswith("lagom.") and len(set(rooms)) == 2:
                graph.setdefault(_room(module), set()).add(_room(imported.name))
    # lagom itself names its modules on first use, and all may ask it for the version.
    TopologicalSorter({room: found - {"__init__"} for room, found in graph.items() if room != "__init__"}).prepare()


def test_the_trunk_imports_no_extension() -> None:
    found = [
        f"{module}:{number}"
        for module, source in read().items()
        if not _extension(_room(module)) and module not in PUBLIC and not module.startswith("lagom.compat")
        for number, line in enumerate(source.splitlines(), 1)
        # Imports for the type checker, too: without an extension's folder the trunk is as it was.
        if re.match(r" *(from|import) lagom\.extensions\.(?!registry\b)", line)
    ]
    assert found == []


def test_the_trunk_reads_no_setting_of_an_extension() -> None:
    """Without the extension the config has no such field."""
    settings = {each.name for each in fields(ExtensionSettings)}
    found = [
        f"{module}:{node.lineno} reads {node.attr}"
        for module, source in read().items()
        if not _extension(_room(module))
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute) and node.attr in settings and _is_config(module, node.value)
    ]
    assert found == []


def _is_config(module: str, value: ast.expr) -> bool:
    """Return whether ``value`` is a config by its name, or by ``self`` in a class of configs."""
    if isinstance(value, ast.Attribute):
        return value.attr == "config"
    return isinstance(value, ast.Name) and (value.id == "config" or (value.id == "self" and _room(module) == "config"))


PUBLIC = {"lagom", "lagom.data", "lagom.doctor", "lagom.experiment", "lagom.extensions.registry"}
"""Public names of extensions, and the list of extensions."""


def _ties_the_trunk(room: str, imported: str) -> bool:
    return _extension(imported) != "" and _extension(room) == ""


def _names_its_rooms(module: str, imported: Import) -> bool:
    """Return whether the import stands in a method of an ``Extension``, and is of a room of the same extension."""
    extension = _extension(_room(module))
    return _is_entry(module) and imported.later and _extension(_room(imported.name)) == extension


def _extension(room: str) -> str:
    """Return the name of the extension that a room belongs to; "" for the trunk."""
    first, _, rest = room.partition(".")
    return rest.partition(".")[0] if first == "extensions" else ""


def test_an_extension_imports_no_other_but_those_listed() -> None:
    rooms = {(_extension(_room(m)), _extension(_room(i.name))) for m, s in read().items() for i in _imports(m, s)}
    listed = {pair for pair in BETWEEN_EXTENSIONS.items() if (ROOT / "lagom" / "extensions" / pair[0]).exists()}
    assert {(own, other) for own, other in rooms if own and other and own != other} == listed


def test_no_module_name_is_there_twice() -> None:
    names = Counter(name.rsplit(".", 1)[-1] for name in read() if not name.startswith("lagom.extensions.compat"))
    packages = {room.rsplit(".", 1)[-1] for room in {*ROOMS, *_PACKAGE_ROOMS}}
    assert [name for name, count in names.items() if count > 1 and name not in packages | OF_EACH_ROOM] == []


SAME_NAMES = {
    "AblationConfig": "compat/maggy: the class that Maggy's programs import",
    "HyperparameterOptConfig": "compat/maggy: the class that Maggy's programs import",
    "TorchDistributedConfig": "compat/maggy: the class that Maggy's programs import",
    "ParquetDataset": "compat/petastorm: pyarrow's old class, as petastorm calls it",
    "Result": "forward/rows: what a watched operation gave; a user sees only that of a run",
}
"""Names of two classes, with the class that must keep the name of another."""


def test_no_class_name_is_there_twice() -> None:
    names = Counter(
        name
        for source in read().values()
        for name in {node.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)}
    )
    assert [name for name, count in names.items() if count > 1 and name not in SAME_NAMES] == []


def test_what_launches_on_spark_comes_without_torch() -> None:
    found = _closure({"lagom.experiment", "lagom.cli", "lagom.spark.spark", "lagom.driver.local"}, read())
    assert not {"torch", "numpy", "pandas"} & found


def test_a_rank_imports_snapshots_only_if_it_keeps_some() -> None:
    found = _closure({"lagom.on_rank.bootstrap", "lagom.on_rank.rank_call"}, read())
    assert [name for name in found if name.startswith("lagom.extensions.resume.")] == []


def test_importing_lagom_imports_neither_torch_nor_pyspark() -> None:
    code = """
import sys, lagom
assert "lagom.experiment" not in sys.modules
from lagom import experiment
from lagom.config import TorchDistributedConfig
lagom.rank(), lagom.world_size(), lagom.LagomError, lagom.Result, TorchDistributedConfig()
print(sorted({"torch", "pyspark", "pandas", "pyarrow"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


MOST_MODULES = 193
"""Most modules of lagom in a rank with a plain config: a rank of one host, without errors, loads what it uses.

The folder of each extension, of which the rank loads ``__init__.py``, is not counted.
"""


def test_a_rank_with_a_plain_config_loads_few_modules() -> None:

    from lagom import experiment  # not above, since ranks import this file for ``_train``

    result = experiment.lagom(_train, TorchDistributedConfig(world_size=2, launcher="local"))
    for names in result.per_rank:
        assert {"lagom.session.session", "lagom.gradients.backward", "lagom.batches.dataloader"} <= set(names)
        counted = [name for name in names if not _is_entry(name)]
        assert len(counted) <= MOST_MODULES, counted


def _train() -> list[str]:
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in DataLoader(TensorDataset(torch.randn(64, 8), torch.randn(64, 1)), batch_size=16, shuffle=True):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return sorted(name for name in sys.modules if name.startswith("lagom."))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("lagom.errors", "import torch"),
        ("lagom.config.torch_distributed", "from lagom.plan import Plan"),
        ("lagom.config.torch_distributed", "from lagom import plan"),
        ("lagom.plan", "def f():\n    import torch"),
        ("lagom.extensions.observe.report.report", "if True:\n    from torch import nn"),
        ("lagom.wire.server", "class A:\n    import torch"),
        ("lagom.driver.local", "import pyspark"),
        ("lagom.batches.dataloader", "from lagom.spark.spark import SparkLauncher"),
        ("lagom.extensions.zero.partition", "def f():\n    import deepspeed"),
        ("lagom.extensions.zero.deepspeed.loading", "import deepspeed"),
        ("lagom.extensions.zero", "import torch"),
        ("lagom.extensions.zero", "from lagom.plan import Plan"),
        ("lagom.extensions.zero.partition", "from lagom.extensions.resume.frames import frames"),
        ("lagom.extensions.zero.partition", "from lagom import doctor"),
        ("lagom.extensions.registry", "from lagom.extensions.zero.parameters import buffers"),
        ("lagom.on_rank.bootstrap", "def f():\n    from lagom import experiment"),
        ("lagom.spark.spark_task", "import lagom.errors"),
        ("lagom.experiment", "import importlib\nimportlib.import_module('torch')"),
        pytest.param(
            "lagom.experiment", "from lagom.extensions.compat import maggy", marks=pytest.mark.needs("compat")
        ),
        ("lagom.wire.server", "from . import other, nothing\nfrom ..patching import replace"),
        ("lagom.unheard_of", "import torch"),
    ],
)
def test_a_forbidden_import_is_found(module: str, source: str) -> None:
    assert len(violations(module, source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("lagom.errors", "from __future__ import annotations\nimport os.path"),
        ("lagom.plan", "from lagom.config import TorchDistributedConfig\nfrom lagom import errors"),
        ("lagom.host.preload", "def f():\n    import torch"),
        ("lagom.wire.server", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"),
        ("lagom.spark.spark", "from pyspark.sql import SparkSession"),
        ("lagom.driver.local", "from lagom.driver.protocol import Launcher"),
        ("lagom.extensions.zero.deepspeed.loading", "def f():\n    import deepspeed"),
        ("lagom.extensions.zero", "from lagom.extension import Extension\ndef f():\n    from lagom.plan import Plan"),
        ("lagom.extensions.unheard_of.counts", "import torch\nfrom lagom.gradients.backward import TrainingThreads"),
        ("lagom.extensions.registry", "from lagom.extensions.zero import Zero"),
    ],
)
def test_an_allowed_import_is_not(module: str, source: str) -> None:
    assert violations(module, source) == []


def read() -> dict[str, str]:
    """The text of each module of lagom."""
    return {_module(path): path.read_text() for path in sorted((ROOT / "lagom").rglob("*.py"))}


def violations(module: str, source: str) -> list[str]:
    """Return the imports of ``module``, whose text is ``source``, that the row of its room does not allow."""
    room = _room(module)
    if room not in ROOMS and room != "extensions" and not _extension(room):
        return [f"{module} is in no room; give {room} a row in ROOMS"]
    allowed = _allowed(room)
    eager = EAGER.get(module, set()) | EAGER.get(f"lagom.{room}", set())
    found = []
    for imported in _imports(module, source):
        top = imported.name.split(".")[0]
        if top in sys.stdlib_module_names or imported.name == "lagom._native":
            continue
        name = _room(imported.name) if top == "lagom" else top
        if _is_entry(module) and not imported.later and name not in _FOR_ENTRIES:
            found.append(f"{module}:{imported.line} imports {imported.name} outside of the method that needs it")
        elif name not in allowed or (
            top == "lagom" and module in NOTHING and imported.name not in NOTHING and not imported.later
        ):
            found.append(f"{module}:{imported.line} imports {imported.name}")
        elif name in OPTIONAL - eager and top != "lagom" and not imported.later:
            found.append(f"{module}:{imported.line} imports {imported.name} outside of the function that needs it")
    return found


_FOR_ENTRIES = {"errors", "extension", "settings"}
"""What every process imports with the ``__init__.py`` of an extension."""


def _is_entry(module: str) -> bool:
    """Return whether ``module`` is the folder of an extension itself, and not a module in it."""
    room = _room(module)
    return module == f"lagom.{room}" and room.count(".") == 1 and _extension(room) != ""


def _allowed(room: str) -> set[str]:
    """Return the rooms and libraries that a room may import."""
    if room in ROOMS:
        return {room, *ROOMS[room].split()}
    trunk = set(ROOMS) - {"data", "compat", "doctor"}  # without public names of extensions
    libraries = set(LIBRARIES.get(room, "numpy torch").split())
    if room == "extensions":
        return {room, *libraries, *trunk, *(name.removeprefix("lagom.") for name in _PACKAGES if _is_entry(name))}
    own = _extension(room)
    extensions = {own, BETWEEN_EXTENSIONS.get(own, own)}
    return {"extensions", *libraries, *trunk, *(each for each in _PACKAGE_ROOMS if _extension(each) in extensions)}


def _closure(names: set[str], modules: Mapping[str, str]) -> set[str]:
    """All that is imported with ``names``: modules of lagom, and first names of others."""
    found, todo = set[str](), list(names)
    while todo:
        name = todo.pop()
        if name in found:
            continue
        found.add(name)
        if name not in modules:
            found.add(name.split(".")[0])
            continue
        todo += [imported.name for imported in _imports(name, modules[name]) if not imported.later]
        todo.append(name.rpartition(".")[0] or "lagom")
    return found


@functools.cache
def _imports(module: str, source: str) -> tuple[Import, ...]:
    return tuple(_walk(module, ast.parse(source), has_calls="import_module" in source))


def _walk(module: str, tree: ast.Module, has_calls: bool) -> Iterator[Import]:
    """Yield the imports of a module; expressions, which are most of it, are passed over if none of them can import."""
    todo: list[tuple[ast.AST, bool]] = [(tree, False)]
    while todo:
        node, later = todo.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            todo += [(child, later) for child in node.orelse]
            continue
        for name in _imported(module, node):
            yield Import(name, getattr(node, "lineno", 0), later)
        later = later or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        children = ast.iter_child_nodes(node)
        todo += [(child, later) for child in children if has_calls or isinstance(child, _STATEMENTS)]


_STATEMENTS = (ast.stmt, ast.ExceptHandler, ast.match_case)


def _imported(module: str, node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        inside = f"{module}.__init__" if module in _PACKAGES else module
        parents = inside.split(".")[: -node.level] if node.level else []
        home = ".".join([*parents, *([node.module] if node.module else [])])
        # "from lagom import plan" imports lagom.plan.
        members = {f"{home}.{alias.name}" for alias in node.names}
        return sorted(name if _exists(name) else home for name in members) if _exists(home, "__init__") else [home]
    if isinstance(node, ast.Call) and node.args and "import_module" in vars(node.func).values():
        name = node.args[0]
        return [name.value] if isinstance(name, ast.Constant) and isinstance(name.value, str) else []
    return []


def _exists(name: str, *below: str) -> bool:
    path = ROOT.joinpath(*name.split("."), *below)
    return path.with_suffix(".py").is_file() or path.is_dir()


def _module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


_PACKAGES = {_module(path) for path in (ROOT / "lagom").rglob("__init__.py")}
_PACKAGE_ROOMS = {name.removeprefix("lagom.") for name in _PACKAGES}


def _room(module: str) -> str:
    """The package of a module, or the module itself where it lies beside the packages; without ``lagom.``."""
    if module == "lagom":
        return "__init__"
    name = module.removeprefix("lagom.")
    return name if module in _PACKAGES or "." not in name else name.rpartition(".")[0]
