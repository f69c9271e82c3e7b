"""Private names of torch that lagom uses: each is listed here, and exists in the torch that is installed.

A new version of torch is tried first with this file: it names what has gone.
"""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator

import pytest
import torch

from lagom.session.patched import NEWEST, OLDEST, untried
from tests.sources import ROOT, without_collections

NAMES = (
    "torch.Tensor._make_subclass",
    "torch.UntypedStorage._new_with_weak_ptr",
    "torch._C",
    "torch._C.DispatchKey",
    "torch._C.TensorBase",
    "torch._C._TorchDispatchModeKey",
    "torch._C._autograd",
    "torch._C._autograd._get_sequence_nr",
    "torch._C._current_graph_task_id",
    "torch._C._dispatch_get_all_op_names",
    "torch._C._dispatch_has_kernel",
    "torch._C._dispatch_has_kernel_for_dispatch_key",
    "torch._C._dispatch_key_for_device",
    "torch._C._dispatch_keys",
    "torch._C._dispatch_tls_is_dispatch_key_included",
    "torch._C._dispatch_tls_set_dispatch_key_included",
    "torch._C._distributed_c10d.Store",
    "torch._C._functions",
    "torch._C._functorch",
    "torch._C._functorch.is_functorch_wrapped_tensor",
    "torch._C._functorch.peek_interpreter_stack",
    "torch._C._get_dispatch_mode",
    "torch._C._get_mkldnn_enabled",
    "torch._C._get_operation_overload",
    "torch._C._get_privateuse1_backend_name",
    "torch._C._get_tracing_state",
    "torch._C._len_torch_dispatch_stack",
    "torch._C._nn",
    "torch._C._nn.nll_loss_nd",
    "torch._C._set_mkldnn_enabled",
    "torch._C._storage_Use_Count",
    "torch._C._vmapmode_decrement_nesting",
    "torch._C._vmapmode_increment_nesting",
    "torch._C._will_engine_execute_node",
    "torch._add_batch_dim",
    "torch._disable_dynamo",
    "torch._foreach_add_",
    "torch._foreach_copy_",
    "torch._foreach_norm",
    "torch._functorch.pyfunctorch.temporarily_pop_interpreter_stack",
    "torch._fused_adam_",
    "torch._fused_adamw_",
    "torch._ops.OpOverload",
    "torch._remove_batch_dim",
    "torch._subclasses.fake_tensor.FakeTensorMode",
    "torch._tensor_str",
    "torch._tensor_str.PRINT_OPTS",
    "torch._utils.ExceptionWrapper",
    "torch.autograd._engine_run_backward",
    "torch.autograd._profiler_enabled",
    "torch.autograd.forward_ad._current_level",
    "torch.autograd.graph._allow_mutation_on_saved_tensors_enabled",
    "torch.distributed.Backend._plugins",
    "torch.distributed.distributed_c10d._DistributedBackendOptions",
    "torch.distributed.distributed_c10d._get_default_store",
    "torch.distributed.distributed_c10d._world",
    "torch.distributions.Distribution._validate_args",
    "torch.jit._builtins",
    "torch.jit._builtins._get_builtin_table",
    "torch.jit._state",
    "torch.jit._state._python_cu",
    "torch.nn.modules.batchnorm._BatchNorm",
    "torch.utils._python_dispatch.TorchDispatchMode",
    "torch.utils._python_dispatch._disable_current_modes",
    "torch.utils._pytree.TreeSpec",
    "torch.utils._pytree.tree_flatten",
    "torch.utils._pytree.tree_leaves",
    "torch.utils._pytree.tree_map_only",
    "torch.utils._pytree.tree_unflatten",
    "torch.utils.data.DataLoader._index_sampler",
    "torch.utils.data._utils.collate.collate",
    "torch.utils.data._utils.collate.collate_tensor_fn",
    "torch.utils.data._utils.collate.default_collate",
    "torch.utils.data._utils.collate.default_collate_fn_map",
    "torch.utils.data._utils.fetch._MapDatasetFetcher",
    "torch.utils.data._utils.signal_handling",
    "torch.utils.data._utils.signal_handling._remove_worker_pids",
    "torch.utils.data._utils.signal_handling._set_worker_pids",
    "torch.utils.data._utils.worker._IterableDatasetStopIteration",
    "torch.utils.data._utils.worker._ResumeIteration",
    "torch.utils.data._utils.worker._worker_loop",
    "torch.utils.data.dataloader._BaseDataLoaderIter",
    "torch.utils.data.dataloader._DatasetKind",
    "torch.utils.data.dataloader._MultiProcessingDataLoaderIter",
    "torch.utils.data.dataloader._SingleProcessDataLoaderIter",
)
"""Dotted private names, as far as the first attribute that is no module."""
LATE_NAMES = (
    "torch._dynamo.callback.callback_handler.register_start_callback",
    "torch._dynamo.callback.callback_handler.remove_start_callback",
    "torch._dynamo.trace_rules.get_torch_obj_rule_map",
)
"""Names that lagom/patching/dynamo.py uses of a package that it does not import."""


_IMPORT = re.compile(r"^\s*(?:import|from) torch\b", re.MULTILINE)


@pytest.mark.parametrize("name", NAMES + LATE_NAMES)
def test_the_installed_torch_has(name: str) -> None:
    assert resolve(name) is not None


@without_collections()
def test_every_private_name_is_listed() -> None:
    texts = [path.read_text() for path in (ROOT / "lagom").rglob("*.py")]
    # Parsing takes most of the time: modules that do not import torch are left out.
    used = {name for text in texts if _IMPORT.search(text) for name in private(ast.parse(text))}
    assert sorted(used) == sorted(NAMES)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch\ntorch.nn._x(3).y", ["torch.nn._x"]),
        ("from torch._ops import OpOverload", ["torch._ops.OpOverload"]),
        ("from torch.utils import _pytree\n_pytree.f(x)", ["torch.utils._pytree", "torch.utils._pytree.f"]),
        ("import torch.distributed as dist\ndist._x", ["torch.distributed._x"]),
        ("import torch\ntorch.nn.Linear(1, 1)._parameters", []),
    ],
)
def test_a_private_name_is_found(source: str, found: list[str]) -> None:
    assert sorted(private(ast.parse(source))) == found


@pytest.mark.parametrize("version", ["2.5.1", "3.0", f"{NEWEST[0]}.{NEWEST[1] + 1}.0a0+git1", "nightly"])
def test_an_untried_torch_gets_one_line(version: str) -> None:
    line = untried(version)
    assert version in line
    assert "\n" not in line


@pytest.mark.parametrize(
    "version", [torch.__version__, "2.9.1", "{}.{}.0".format(*OLDEST), "{}.{}.9+cu130".format(*NEWEST)]
)
def test_a_tried_torch_gets_none(version: str) -> None:
    assert untried(version) == ""


def private(tree: ast.AST) -> Iterator[str]:
    """Yield the private names of torch in ``tree``: dotted, as far as the first private part that is no module."""
    names: dict[str, str] = {}
    nodes = list(ast.walk(tree))
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    names[alias.asname or "torch"] = alias.name if alias.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield from _cut(f"{node.module}.{alias.name}")
    for node in nodes:
        if isinstance(node, ast.Attribute):
            parts: list[str] = []
            inner: ast.expr = node
            while isinstance(inner, ast.Attribute):
                parts.insert(0, inner.attr)
                inner = inner.value
            if isinstance(inner, ast.Name) and inner.id in names:
                yield from _cut(".".join([names[inner.id], *parts]))


def _cut(name: str) -> Iterator[str]:
    """Yield ``name`` to its last part that counts, if any part is private."""
    parts = name.split(".")
    first = next((at for at, part in enumerate(parts) if re.match(r"_(?!_)", part)), None)
    if first is not None:
        yield ".".join(parts[: max(first + 1, _num_modules(parts) + 1)])


def _num_modules(parts: list[str]) -> int:
    """Return how many ``parts`` from the first on are the name of a module."""
    found = (count for count in range(len(parts), 0, -1) if _is_module(".".join(parts[:count])))
    return next(found)


def _is_module(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


def resolve(name: str) -> object:
    """Return what ``name`` is in the installed torch; raise AttributeError if there is none."""
    parts = name.split(".")
    count = _num_modules(parts)
    found: object = importlib.import_module(".".join(parts[:count]))
    for part in parts[count:]:
        found = getattr(found, part)
    return found
