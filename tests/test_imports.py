"""Who may import whom, kept by reading the source."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Rule:
    """What a part of lagom may import beyond the standard library and itself; ``lagom.x`` covers what is below it."""

    always: tuple[str, ...] = ()
    """When it is imported itself."""
    later: tuple[str, ...] = ()
    """Also inside a function."""


_FACTS = ("lagom.config", "lagom.errors")
_TORCH_SIDE = (
    *_FACTS,
    "lagom.contents",
    "lagom.plan",
    "lagom.verify.record",
    "lagom.monitor.spans",
    "lagom.collectives",
    "lagom.patching",
    "lagom.strategies",
    "torch",
    "numpy",
)
# Parts of the worker that the driver has use for; without torch, so that it need not import it.
_SHARED = tuple(
    f"lagom.worker.{name}"
    for name in ("compatible", "place", "random_states", "rendezvous", "settings", "spec", "task")
)
_DRIVER_SIDE = (
    *_FACTS,
    "lagom.aggregate",
    "lagom.monitor",
    "lagom.payload",
    "lagom.plan",
    "lagom.recognise",
    "lagom.records",
    "lagom.verify.record",
    "lagom.result",
    "lagom.script",
    "lagom.signature",
    "lagom.sources",
    *_SHARED,
)

_SPARK_SIDE = Rule(
    always=(*_DRIVER_SIDE, "lagom.launchers", "pyspark", "cloudpickle"), later=("lagom.worker", "pyarrow")
)

RULES = {
    "lagom": Rule(later=("lagom",)),
    "lagom.errors": Rule(),
    "lagom.config": Rule(always=("lagom.errors",)),
    "lagom.plan": Rule(always=_FACTS),
    "lagom.verify.record": Rule(),
    "lagom.verify.closeness": Rule(always=("lagom.verify.record",)),
    "lagom.verify.row": Rule(),
    "lagom.verify.texts": Rule(always=("lagom.verify.closeness",)),
    "lagom.verify.shown": Rule(
        always=("lagom.verify.closeness", "lagom.verify.record", "lagom.verify.row", "lagom.verify.texts")
    ),
    "lagom.verify.agreement": Rule(
        always=("lagom.verify.closeness", "lagom.verify.record", "lagom.verify.row", "lagom.verify.shown")
    ),
    "lagom.verify.advice": Rule(always=("lagom.verify.row",)),
    "lagom.verify.verification": Rule(always=("lagom.verify.row",)),
    "lagom.verify": Rule(always=(*_FACTS, "lagom.launchers", "lagom.plan", "lagom.verify")),
    "lagom.result": Rule(always=_FACTS, later=("lagom.records",)),
    "lagom.signature": Rule(always=_FACTS),
    "lagom.contents": Rule(later=("numpy",)),
    "lagom.aggregate": Rule(always=("lagom.contents",)),
    "lagom.ipynb": Rule(),
    "lagom.script": Rule(always=("lagom.ipynb",)),
    "lagom.sources": Rule(always=("lagom.script",), later=("cloudpickle",)),
    "lagom.recognise": Rule(always=("lagom.script", "lagom.sources")),
    "lagom.payload": Rule(always=("lagom.errors", "cloudpickle"), later=("torch", "numpy")),
    "lagom.monitor": Rule(),
    "lagom.monitor.certificate": Rule(always=("lagom.monitor",), later=("cryptography",)),
    "lagom.records": Rule(always=("lagom.errors", "lagom.monitor")),
    "lagom.records.remote": Rule(later=("fsspec", "pyarrow")),
    "lagom.collectives": Rule(always=("lagom.errors", "torch", "numpy"), later=("lagom._native",)),
    "lagom.patching": Rule(always=(*_TORCH_SIDE, "lagom.data.shard", "lagom.recognise", "lagom.worker.place")),
    "lagom.strategies": Rule(always=_TORCH_SIDE),
    "lagom.strategies.deepspeed": Rule(always=_TORCH_SIDE),
    "lagom.strategies.deepspeed.loading": Rule(always=_FACTS, later=("deepspeed",)),
    "lagom.data": Rule(always=(*_FACTS, "torch", "numpy"), later=("pyarrow", "fsspec", "cv2", "PIL", "pandas")),
    "lagom.data.images": Rule(
        always=("numpy", "lagom.data.unischema"), later=("cv2", "PIL", "lagom.collectives.native")
    ),
    "lagom.data.pages": Rule(
        always=("numpy", "lagom.data.footers", "lagom.data.memory", "lagom.data.types"),
        later=("lagom.collectives.native",),
    ),
    "lagom.data.plain": Rule(
        always=("lagom.data.codecs", "lagom.data.pages"),
        later=("lagom.data.columns", "lagom.data.table", "lagom.collectives.native"),
    ),
    "lagom.data.shard": Rule(always=("numpy",)),
    # What the driver sends in place of a DataFrame.
    "lagom.data.frame": Rule(later=("lagom.data", "fsspec")),
    "lagom.launchers": Rule(always=_DRIVER_SIDE, later=("lagom.worker", "torch", "cloudpickle")),
    "lagom.launchers.frames": Rule(always=("lagom.errors",), later=("lagom.data.frame", "numpy", "pyarrow")),
    "lagom.launchers.spark": _SPARK_SIDE,
    "lagom.launchers.spark_failure": Rule(),
    "lagom.launchers.spark_master": Rule(always=("lagom.errors", "lagom.launchers.spark_failure"), later=("pyspark",)),
    "lagom.launchers.spark_session": _SPARK_SIDE,
    "lagom.launchers.survey": _SPARK_SIDE,
    "lagom.memory": Rule(always=(*_TORCH_SIDE, "lagom.worker.place"), later=("lagom.launchers",)),
    "lagom.worker": Rule(
        always=(*_TORCH_SIDE, *_DRIVER_SIDE, "lagom.data", "lagom.memory", "cloudpickle"), later=("pyspark", "pyarrow")
    ),
    # It travels by value to executors that have no lagom.
    "lagom.worker.task": Rule(later=("lagom.worker", "pyspark", "pyarrow")),
    "lagom.worker.place": Rule(),
    "lagom.worker.random_states": Rule(later=("torch", "numpy")),
    "lagom.worker.settings": Rule(later=("torch", "numpy")),
    "lagom.worker.interfaces": Rule(always=("lagom.errors",)),
    "lagom.worker.rendezvous": Rule(always=("lagom.errors", "lagom.monitor")),
    "lagom.worker.spec": Rule(always=("lagom.plan",)),
    "lagom.experiment": Rule(always=(*_DRIVER_SIDE, "lagom.launchers", "lagom.verify"), later=("pyspark",)),
    "lagom.horovodrun": Rule(later=("lagom", "torch")),
    "lagom.__main__": Rule(always=("lagom.cli",)),
    "lagom.cli": Rule(
        always=("lagom", *_DRIVER_SIDE, "lagom.experiment", "lagom.horovodrun"), later=("pyspark", "lagom.doctor")
    ),
    "lagom.doctor": Rule(always=("lagom", *_DRIVER_SIDE, "lagom.launchers")),
    # Runs on ranks.
    "lagom.doctor.examination": Rule(
        always=("lagom", "lagom.worker.place"), later=("torch", "lagom.collectives", "lagom.memory", "lagom.worker")
    ),
    "lagom.compat": Rule(always=("lagom", "torch", "numpy"), later=("pyarrow", "pyspark")),
    "lagom.compat.horovod.broadcasting": Rule(always=("lagom", "torch", "cloudpickle")),
    # Beside petastorm, which brings them.
    "lagom.compat.petastorm": Rule(always=("lagom", "torch", "numpy", "pyarrow"), later=("fsspec", "packaging")),
    "lagom.worker.compatible": Rule(),
}
"""By module; the longest name that covers a module counts. Nothing but compat may import compat."""


@dataclass(frozen=True)
class Import:
    """One import statement."""

    name: str
    line: int
    later: bool
    """It stands inside a function, so does not run when its module is imported."""


def test_every_module_imports_only_what_its_rule_allows() -> None:
    modules = {_module(path): path.read_text() for path in sorted((ROOT / "lagom").rglob("*.py"))}
    assert modules
    assert [line for module, source in modules.items() for line in violations(module, source)] == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("lagom.errors", "import torch"),
        ("lagom.config.torch_distributed", "from lagom.plan import Plan"),
        ("lagom.config.torch_distributed", "from lagom import plan"),
        ("lagom.plan", "def f():\n    import torch"),
        ("lagom.launchers.local", "import torch.nn"),
        ("lagom.launchers.local", "def f():\n    import pyspark"),
        ("lagom.launchers.local", "if True:\n    from torch import nn"),
        ("lagom.launchers.local", "class A:\n    import torch"),
        ("lagom.patching.dataloader", "from lagom.launchers.spark import SparkLauncher"),
        ("lagom.strategies.zero", "def f():\n    import deepspeed"),
        ("lagom.strategies.deepspeed.loading", "import deepspeed"),
        ("lagom.worker.bootstrap", "def f():\n    from lagom import experiment"),
        ("lagom.worker.task", "import lagom.errors"),
        ("lagom.experiment", "import importlib\nimportlib.import_module('torch')"),
        ("lagom.experiment", "from lagom.compat import maggy"),
        ("lagom.monitor.channel", "from . import other, nothing\nfrom ..errors import LagomError"),
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
        ("lagom.launchers.local", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"),
        ("lagom.launchers.spark", "from pyspark.sql import SparkSession"),
        ("lagom.launchers.local", "from lagom.launchers.protocol import Launcher"),
        ("lagom.strategies.deepspeed.loading", "def f():\n    import deepspeed"),
    ],
)
def test_an_allowed_import_is_not(module: str, source: str) -> None:
    assert violations(module, source) == []


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


def violations(module: str, source: str) -> list[str]:
    """What ``module``, whose text is ``source``, imports against its rule."""
    covering = [name for name in RULES if name == module or (module.startswith(name + ".") and name != "lagom")]
    if not covering:
        return [f"{module} has no rule; give it one in RULES"]
    home = max(covering, key=len)
    rule = RULES[home]
    found = []
    for imported in _imports(module, ast.parse(source)):
        allowed = rule.always + (rule.later if imported.later else ())
        own = home if module != home or home in _PACKAGES else None
        if not _covered(imported.name, (*allowed, *([own] if own else []))):
            when = "inside a function" if imported.later else "when it is imported"
            found.append(f"{module}:{imported.line} imports {imported.name} {when}")
    return found


_PACKAGES = {name for name in RULES if (ROOT / Path(*name.split("."))).is_dir() and name != "lagom"}
"""Modules of these may import each other."""


def _covered(name: str, allowed: tuple[str, ...]) -> bool:
    top = name.split(".")[0]
    if top in sys.stdlib_module_names:
        return True
    return any(name == entry or name.startswith(entry + ".") for entry in allowed)


def _imports(module: str, tree: ast.Module) -> Iterator[Import]:
    todo: list[tuple[ast.AST, bool]] = [(tree, False)]
    while todo:
        node, later = todo.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            todo += [(child, later) for child in node.orelse]
            continue
        for name in _imported(module, node):
            yield Import(name, getattr(node, "lineno", 0), later)
        later = later or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        todo += [(child, later) for child in ast.iter_child_nodes(node)]


def _imported(module: str, node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        parents = module.split(".")[: -node.level] if node.level else []
        home = ".".join([*parents, *([node.module] if node.module else [])])
        # "from lagom import plan" imports lagom.plan.
        return [f"{home}.{alias.name}" for alias in node.names] if _is_package(home) else [home]
    if isinstance(node, ast.Call) and "import_module" in ast.dump(node.func) and node.args:
        name = node.args[0]
        return [name.value] if isinstance(name, ast.Constant) and isinstance(name.value, str) else []
    return []


def _is_package(name: str) -> bool:
    return name in _PACKAGES or name == "lagom"


def _module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
