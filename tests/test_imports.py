"""Who may import whom: one row per room, no circles, no module name twice; kept by reading the source."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.sources import ROOT, without_collections

ROOMS = {
    # What driver and ranks share; needs no torch.
    "call": "",
    "cluster": "",
    "contents": "numpy",
    "control_groups": "",
    "digests": "",
    "errors": "",
    "random_states": "numpy torch",
    "timings": "",
    "world": "",
    "inspection": "torch",
    "config": "errors",
    "plan": "cluster config errors",
    "payload": "errors pickler unpicklable",
    "run_folder": "errors",
    "user_folder": "",
    "pickler": "errors unpicklable cloudpickle torch numpy",
    "unpicklable": "",
    "program": "config errors inspection cloudpickle",
    "restart": "digests errors run_folder",
    "debugger": "config errors monitor patching plan random_states restart row_split wire",
    "wire": "errors plan restart cryptography",
    "monitor": "wire",
    "records": "digests errors monitor restart run_folder timings wire fsspec pyarrow",
    # The driver.
    "aggregate": "contents",
    "result": "config errors monitor records run_folder",
    "launchers": "call cluster config control_groups data.parquet debugger digests errors executor host monitor "
    "payload plan program records restart timings user_folder wire worker world cloudpickle numpy pyarrow pyspark "
    "torch",
    "verify": "call config errors kept_call launchers plan records restart verify.on_rank",
    "search": "aggregate call cluster config errors launchers monitor payload plan preparation program random_states "
    "digests records result run_folder search.on_rank search.pages search.samplers search.slots timings wire worker "
    "optuna pandas",
    "search.pages": "records result run_folder",
    "search.samplers": "config errors program numpy optuna",
    "search.slots": "call cluster control_groups errors launchers payload plan program search.on_rank wire worker "
    "world",
    "memory_planner": "config errors launchers memory_plan plan world zero torch",
    "kept_call": "call config digests errors payload plan program records restart run_folder snapshots",
    "preparation": "cluster config debugger errors launchers plan program random_states records run_folder",
    "experiment": "aggregate call config kept_call launchers plan preparation program random_states records restart "
    "result run_folder search timings verify worker",
    "doctor": "__init__ call collectives config control_groups errors launchers memory_plan plan worker world torch",
    "horovodrun": "__init__ torch",
    "cli": "__init__ cli_options config doctor errors experiment horovodrun launchers program records result search "
    "search.on_rank worker",
    "cli_options": "config horovodrun",
    "__main__": "cli",
    "__init__": "config data errors experiment memory_plan memory_planner result world",
    # The processes of a host, and the rank.
    "host": "control_groups errors files monitor patching plan random_states restart user_folder wire worker numpy "
    "pyarrow pyspark torch",
    "executor": "errors host monitor patching wire worker pyarrow pyspark",
    "worker": "call collectives collectives.sockets config debugger errors files memory_plan monitor patching payload "
    "pickler plan program random_states restart run_state search.on_rank session snapshots verify.on_rank wire world "
    "zero numpy torch IPython",
    # What a rank does with the program, from the top down.
    "session": "call collectives collectives.torch_backend deepspeed distributed errors files forward gradients "
    "gradients.reduction inspection loaders optimizers patching program restart row_split run_state timing "
    "torch_versions tracking torch",
    "torch_versions": "",
    "snapshots": "call digests errors loaders patching payload pickler program random_states restart snapshots.passes "
    "tracking unpicklable wire torch",
    "snapshots.passes": "errors loaders loaders.sharing patching random_states run_state session numpy torch",
    "deepspeed": "errors forward gradients optimizers patching run_state zero deepspeed torch",
    "forward": "collectives errors micro_batches monitor patching row_split run_state zero torch",
    "timing": "collectives.torch_backend monitor patching torch",
    "optimizers": "collectives errors monitor patching zero zero.parameters torch",
    "memory_plan": "cluster control_groups zero zero.parameters torch",
    "zero": "collectives errors gradients gradients.reduction patching random_states run_state zero.parameters torch",
    "zero.parameters": "collectives errors gradients patching run_state torch",
    "gradients": "collectives errors gradients.reduction patching row_split run_state torch",
    "gradients.reduction": "collectives errors run_state torch",
    "micro_batches": "errors inspection patching random_states row_split run_state torch",
    "row_split": "collectives errors inspection patching random_states run_state numpy torch",
    "search.on_rank": "call config data.parquet errors patching program random_states run_state world numpy torch",
    "verify.on_rank": "contents loaders patching random_states row_split run_state snapshots torch",
    "loaders": "collectives data.parquet errors files loaders.sharing monitor patching payload program row_split "
    "run_state world numpy torch",
    "loaders.sharing": "collectives errors files patching payload run_state world numpy torch",
    "distributed": "collectives collectives.sockets collectives.torch_backend errors files patching program restart "
    "torch",
    "tracking": "collectives digests errors files patching restart",
    "files": "collectives errors patching restart run_state numpy torch",
    "run_state": "errors inspection patching random_states numpy torch",
    "patching": "torch",
    "collectives": "collectives.sockets control_groups errors monitor numpy torch",
    "collectives.sockets": "torch",
    "collectives.torch_backend": "collectives collectives.sockets monitor torch",
    # Tables.
    "data": "data.parquet",
    "data.parquet": "data.column_types data.sources errors fsspec numpy pandas pyarrow torch",
    "data.sources": "data.column_types errors deltalake fsspec numpy pyarrow",
    "data.column_types": "errors cv2 numpy PIL pyarrow torch",
    # Programs that were written for others. Nothing imports these by name.
    "compat": "",
    "compat.horovod": "__init__ collectives compat config errors experiment gradients.reduction forward monitor world "
    "cloudpickle numpy pyspark torch",
    "compat.maggy": "__init__ compat config experiment launchers result search torch",
    "compat.petastorm": "__init__ fsspec numpy packaging pyarrow torch",
}
"""Packages and modules that each room may import, beyond itself and the standard library."""

OPTIONAL = {
    "cloudpickle",
    "cryptography",
    "cv2",
    "deepspeed",
    "deltalake",
    "fsspec",
    "optuna",
    "packaging",
    "pandas",
    "PIL",
} | {
    "pyarrow",
    "pyspark",
}
"""Libraries that are imported where they are used, inside of a function."""
EAGER = {
    "lagom.compat.horovod.broadcasting": {"cloudpickle"},
    "lagom.compat.petastorm": {"pyarrow"},
    "lagom.launchers.spark": {"pyspark"},
    "lagom.launchers.spark_session": {"pyspark"},
    "lagom.pickler": {"cloudpickle"},
    "lagom.search.samplers.grid_sampler": {"optuna"},
}
"""But for these modules, and packages."""
NOTHING = {"lagom.launchers.spark_task", "lagom.run_state.malloc_trim", "lagom.user_folder"}
"""They import nothing of lagom's but each other: what travels by value to executors that have no lagom."""


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
            if imported.name.startswith("lagom.") and _room(imported.name) != _room(module):
                graph.setdefault(_room(module), set()).add(_room(imported.name))
    # lagom itself names its modules on first use, and all may ask it for the version.
    TopologicalSorter({room: found - {"__init__"} for room, found in graph.items() if room != "__init__"}).prepare()


def test_no_module_name_is_there_twice() -> None:
    names = Counter(name.rsplit(".", 1)[-1] for name in read() if not name.startswith("lagom.compat"))
    packages = {room.rsplit(".", 1)[-1] for room in ROOMS}
    assert [name for name, count in names.items() if count > 1 and name not in packages] == []


def test_what_launches_on_spark_comes_without_torch() -> None:
    found = _closure({"lagom.experiment", "lagom.cli", "lagom.launchers.spark", "lagom.launchers.local"}, read())
    assert not {"torch", "numpy", "pandas"} & found


def test_a_rank_imports_snapshots_only_if_it_keeps_some() -> None:
    found = _closure({"lagom.worker.bootstrap", "lagom.worker.rank_call"}, read())
    assert [name for name in found if name.startswith("lagom.snapshots")] == []


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


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("lagom.errors", "import torch"),
        ("lagom.config.torch_distributed", "from lagom.plan import Plan"),
        ("lagom.config.torch_distributed", "from lagom import plan"),
        ("lagom.plan", "def f():\n    import torch"),
        ("lagom.records.report", "if True:\n    from torch import nn"),
        ("lagom.wire.server", "class A:\n    import torch"),
        ("lagom.launchers.local", "import pyspark"),
        ("lagom.loaders.dataloader", "from lagom.launchers.spark import SparkLauncher"),
        ("lagom.zero.partition", "def f():\n    import deepspeed"),
        ("lagom.deepspeed.loading", "import deepspeed"),
        ("lagom.worker.bootstrap", "def f():\n    from lagom import experiment"),
        ("lagom.launchers.spark_task", "import lagom.errors"),
        ("lagom.experiment", "import importlib\nimportlib.import_module('torch')"),
        ("lagom.experiment", "from lagom.compat import maggy"),
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
        ("lagom.launchers.local", "def f():\n    import torch"),
        ("lagom.wire.server", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"),
        ("lagom.launchers.spark", "from pyspark.sql import SparkSession"),
        ("lagom.launchers.local", "from lagom.launchers.protocol import Launcher"),
        ("lagom.deepspeed.loading", "def f():\n    import deepspeed"),
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
    if room not in ROOMS:
        return [f"{module} is in no room; give {room} a row in ROOMS"]
    allowed = set(ROOMS[room].split()) | {room}
    eager = EAGER.get(module, set()) | EAGER.get(f"lagom.{room}", set())
    found = []
    for imported in _imports(module, source):
        top = imported.name.split(".")[0]
        if top in sys.stdlib_module_names or imported.name == "lagom._native":
            continue
        name = _room(imported.name) if top == "lagom" else top
        if name not in allowed or (
            top == "lagom" and module in NOTHING and imported.name not in NOTHING and not imported.later
        ):
            found.append(f"{module}:{imported.line} imports {imported.name}")
        elif name in OPTIONAL - eager and top != "lagom" and not imported.later:
            found.append(f"{module}:{imported.line} imports {imported.name} outside of the function that needs it")
    return found


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


def _room(module: str) -> str:
    """The package of a module, or the module itself where it lies beside the packages; without ``lagom.``."""
    if module == "lagom":
        return "__init__"
    name = module.removeprefix("lagom.")
    return name if module in _PACKAGES or "." not in name else name.rpartition(".")[0]
