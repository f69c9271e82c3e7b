"""Lists the places where lagom reads a pickle, by reading the source: a pickle can run any code of its sender."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent / "lagom"

ALLOWED = {
    "spark/spark.py::task_by_value": "the driver's own function, pickled a line above, by value",
    "spark/spark_task.py::run": "the run as the driver describes it, inside Spark's job",
    "spark/spark_worker.py::run_task": "what became of ranks, from the host process, by a file without a name",
    "spark/spark_state.py::restore": "pyspark's context, which came with the task of the line below",
    "spark/task_host.py::run": "the task as a Python worker of this user's describes it, by a file without a name",
    "host/fork_server.py::_run_host": "the run as the driver describes it, over an inherited pair of sockets",
    "program/payload.py::unpack_parts": "the call, over an inherited file, Spark's job or the driver's proven channel; "
    "results, on their way home by the same ways; batches of workers, through memory that a host's ranks share; and "
    "calls and snapshots in the folder of a run, which nobody but this user can write to: see "
    "Note [Folders of runs] in run_folder.py",
    "batches/sharing/sample_exchange.py::_unpickled": "samples that ranks of this host have loaded, in memory "
    "that they share",
    "extensions/resume/passes/worker_states.py::_set_numbers": "states of a worker of this process by torch's queue, "
    "or in a snapshot, as above",
    "extensions/data/column_types/unischema.py::loads": "fields of petastorm's, by an unpickler that knows them alone",
    "extensions/data/parquet/dataset.py::_reading": "a copy of an object of this process",
    "extensions/scoring/executor_scoring.py::_scorer": "the model as the driver pickled it, in "
    "Spark's broadcast or job",
    "extensions/scoring/trained_model.py::_loaded": "weights, by torch's unpickler that knows tensors alone",
    "inspection/state_parts.py::_write_numpy_generator": "a copy of a generator's state, made by this process before a "
    "probe",
    "extensions/compat/horovod/broadcasting.py::broadcast_object": "Horovod's API: any object from the program's own "
    "rank",
    "extensions/compat/horovod/broadcasting.py::allgather_object": "the same",
}
"""For each file and function, why its pickles cannot come from a stranger."""
_READS = {"loads", "load", "Unpickler"}
_MODULES = {"pickle", "cloudpickle", "dill", "torch", "_Unpickler", "untyped"}


def test_pickles_are_read_only_where_a_stranger_cannot_have_made_them() -> None:
    found = {place for path in sorted(ROOT.rglob("*.py")) for place in _places(path)}
    assert found <= set(ALLOWED), f"{sorted(found - set(ALLOWED))}: exchange plain values (exchange/plain_values.py)"
    assert set(ALLOWED) <= found, f"{sorted(set(ALLOWED) - found)} read no pickle any more: take them off the list"


def test_a_pickle_that_is_read_is_found_by_any_of_its_names(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text(
        "import pickle\nfrom pickle import loads as read\n"
        "def a(b): return pickle.loads(b)\n"
        "def b(b): return read(b)\n"
        "def c(b): return torch.load(b, weights_only=False)\n"
        "def d(f): return pickle.Unpickler(f).load()\n"
        "def e(b): return json.loads(b)\n"
    )
    assert [place.rpartition("::")[2] for place in _places(tmp_path / "x.py", tmp_path)] == ["a", "b", "c", "d"]


def _places(path: Path, root: Path = ROOT) -> Iterator[str]:
    """Functions of a file that read pickles."""
    text = path.read_text()
    if not any(name in text for name in _READS):
        return
    tree = ast.parse(text)
    names = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module in _MODULES
        for alias in node.names
        if alias.name in _READS
    }
    for function, node in _calls(tree, ""):
        called = node.func
        base = called.value if isinstance(called, ast.Attribute) else None
        by_module = isinstance(base, ast.Name) and base.id in _MODULES and called.attr in _READS  # type: ignore[attr-defined]
        own = isinstance(called, ast.Name) and (called.id in names or called.id == "_Unpickler")
        if by_module or own:
            yield f"{path.relative_to(root)}::{function}"


def _calls(node: ast.AST, function: str) -> Iterator[tuple[str, ast.Call]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Call):
            yield function, child
        is_function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
        yield from _calls(child, child.name if is_function else function)  # type: ignore[attr-defined]
