"""``Engines``: the DeepSpeed engines that drive a program's models and optimizers. See Note [DeepSpeed]."""

from __future__ import annotations

import copy
import sys
import warnings
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from lagom.accelerators import is_accelerator
from lagom.errors import LagomError
from lagom.exchange.device_backend import device_backend
from lagom.extensions.zero.deepspeed.engine import Engine
from lagom.extensions.zero.deepspeed.loading import as_imported, check_nvme, environment, load, variable
from lagom.extensions.zero.optimizer_probe import ShardingKind, probe_optimizer
from lagom.patching.object_reference import tensor_dictionary

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch.optim import Optimizer

    Replaced = Callable[[object, str, object], Any]


class Engines:
    """Makes and finds the engines of a run, one for each optimizer and the module that it steps.

    Args:
        config: DeepSpeed's configuration, from ``settings``.
        store: key-value store of the run, for a process group that DeepSpeed needs.
        replaced: context manager that sets an attribute and restores it.
        init: torch's own ``init_process_group``.
        at: is called with a place of the program; raises an error unless all ranks call it with the same place.
        say: shows a line to the user, once.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        rank: int,
        world_size: int,
        device: torch.device,
        store: dist.Store,
        replaced: Replaced,
        init: Callable[..., None],
        at: Callable[[str], None],
        say: Callable[[str], None],
    ) -> None:
        self._config = config
        self.stage: int = config["zero_optimization"]["stage"]
        self._world = {"rank": rank, "world_size": world_size}
        # DeepSpeed uses LOCAL_RANK as the index of the device.
        self._variables = {
            "RANK": str(rank),
            "LOCAL_RANK": str(device.index or 0),
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
        }
        self._device = device
        self._store = store
        self._replaced = replaced
        self._init = init
        self._at = at
        self._say = say
        self._engines: list[Engine] = []
        self._by_leaf: WeakIdKeyDictionary = tensor_dictionary()
        self._deepspeed: Any = None
        self.inside = False
        """Whether DeepSpeed's own code runs now, and not the program's."""

    @contextmanager
    def loaded(self) -> Iterator[None]:
        """Import DeepSpeed and adapt it to this process for the length of a run.

        Raises:
            LagomError: if DeepSpeed is not installed, or cannot build its op for NVMe that the configuration needs.
        """
        with ExitStack() as stack:
            self._deepspeed = load(self._device.type)
            check_nvme(self._config)
            stack.enter_context(warnings.catch_warnings())
            # DeepSpeed still uses names of torch.distributed that are deprecated.
            warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)
            # Stage 3 reads LOCAL_RANK in every forward.
            stack.enter_context(variable("LOCAL_RANK", self._variables["LOCAL_RANK"]))
            for name in ("deepspeed.utils.groups", "deepspeed.comm.comm"):
                stack.enter_context(as_imported(sys.modules[name]))
            # DeepSpeed would compile an op for sums in shared memory, which needs a compiler and a minute.
            # The attribute deepspeed.comm.torch is the package torch, so the submodule is taken from sys.modules.
            stack.enter_context(self._replaced(sys.modules["deepspeed.comm.torch"], "build_shm_op", lambda: None))
            yield

    @property
    def keeps_parameters(self) -> bool:
        """Whether each rank keeps whole parameters between forwards: below stage 3."""
        return self.stage < 3

    def start(self, module: nn.Module, optimizer: Optimizer | None, step: Callable[..., Any] | None) -> None:
        """Start an engine that drives ``module`` and ``optimizer``; a collective.

        Args:
            optimizer: None for the optimizer that ``deepspeed_config`` names.
            step: the unpatched ``step`` of the optimizer's class; None without an optimizer.

        Raises:
            LagomError: if DeepSpeed's steps with this optimizer would differ from those of one process, if DeepSpeed
                would drop the optimizer's state, or if there is no optimizer.
        """
        if optimizer is not None and step is not None:
            self._check(optimizer, step)
        elif "optimizer" not in self._config:
            raise LagomError(
                "a model is trained, and there is neither an optimizer nor one in deepspeed_config={'optimizer': ...}"
            )
        self._at("the first training forward")
        self._connect()
        self.inside = True
        try:
            with environment(**self._variables):
                engine, *_ = self._deepspeed.initialize(
                    model=module, optimizer=optimizer, config=self._sized(module), dist_init_required=False
                )
        finally:
            self.inside = False
        started = Engine(engine, module, optimizer, self.stage)
        self._engines.append(started)
        for p in started.leaves:
            self._by_leaf[p] = started

    def _check(self, optimizer: Optimizer, step: Callable[..., Any]) -> None:
        name = type(optimizer).__name__
        if self.stage == 0:
            return
        if optimizer.state:
            raise LagomError(
                f"the {name} has state already, which DeepSpeed would drop: at zero_lvl={self.stage} it cannot be "
                "loaded into backend='deepspeed'; use backend='torch', which loads it at any level"
            )
        if probe_optimizer(optimizer, step, closure=False).kind is not ShardingKind.ELEMENTWISE:
            raise LagomError(
                f"{name} does not step each element by itself, and DeepSpeed would cut parameters anywhere: other "
                "weights would come of it. Use backend='torch', which shares it out as it can be, or zero_lvl=0"
            )

    def _sized(self, module: nn.Module) -> dict[str, Any]:
        """Return the configuration with buckets no larger than the model, since DeepSpeed allocates whole buckets."""
        config = copy.deepcopy(dict(self._config))
        most = min(sum(p.numel() for p in module.parameters()) + 2, 500_000_000) // 2 * 2  # must be even
        if self.stage in (1, 2):
            config["zero_optimization"].setdefault("reduce_bucket_size", most)
            config["zero_optimization"].setdefault("allgather_bucket_size", most)
            if self._needs_no_norm(config):
                config["zero_optimization"].setdefault("compute_grad_norm", False)
        return config

    def _needs_no_norm(self, config: Mapping[str, Any]) -> bool:
        """Return whether DeepSpeed can skip the gradient norm: no clipping, no half precision, no offloading.

        If DeepSpeed computes the norm, it leaves out steps with gradients that are not finite; one process does not.
        """
        known = self._deepspeed.runtime.zero.config.DeepSpeedZeroConfig.model_fields
        asks = ("offload_optimizer", "cpu_offload", "zenflow")
        half = any((config.get(name) or {}).get("enabled") for name in ("fp16", "bf16", "bfloat16", "torch_autocast"))
        zero = config["zero_optimization"]
        clips = config["gradient_clipping"] != 0
        return "compute_grad_norm" in known and not (half or clips or any(zero.get(name) for name in asks))

    def _connect(self) -> None:
        if dist.is_initialized():
            return
        backend = (device_backend(self._device.type) or "gloo") if is_accelerator(self._device) else "gloo"
        self._init(backend, store=dist.PrefixStore("deepspeed", self._store), **self._world)

    def drives(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Return whether an engine drives at least one of ``parameters``."""
        return any(p in self._by_leaf for p in parameters)

    def of(self, optimizer: Optimizer) -> Engine | None:
        """Return the engine that steps in place of ``optimizer``; None if there is none."""
        return next((one for one in self._engines if one.optimizer is optimizer), None)

    def of_module(self, module: nn.Module) -> Engine:
        """Return the engine that drives ``module``, for a program that calls ``model.backward`` and ``model.step``.

        Raises:
            LagomError: if no engine, or more than one, drives the module's parameters.
        """
        engines: set[Engine] = {self._by_leaf[p] for p in module.parameters() if p in self._by_leaf}
        if not engines:
            raise LagomError(f"no engine drives this {type(module).__name__} yet; call it on a batch first")
        if len(engines) > 1:
            raise LagomError(f"{len(engines)} engines drive parts of this {type(module).__name__}; call their methods")
        return engines.pop()

    def dirty(self, leaf: torch.Tensor) -> bool:
        """Return whether DeepSpeed holds a gradient of ``leaf`` that ``leaf.grad`` does not show."""
        found = self._by_leaf.get(leaf)
        return found is not None and bool(found.num_backwards) and found.keeps_gradients

    def backward(self, leaves: Sequence[torch.Tensor]) -> Engine | None:
        """Return the engine for a backward that reaches ``leaves``; None if no engine drives any of them.

        Raises:
            LagomError: if several engines drive the leaves.
        """
        engines = {self._by_leaf[leaf] for leaf in leaves if leaf in self._by_leaf}
        if len(engines) > 1:
            raise LagomError(
                "one backward reaches the parameters of two optimizers, which DeepSpeed's engines cannot average "
                "apart; use backend='torch', which has no such limit"
            )
        return engines.pop() if engines else None

    @contextmanager
    def gathered(self, module: nn.Module, place: str, *, changed: bool = False) -> Iterator[None]:
        """Gather whole parameters of ``module`` on all ranks for the length of a block; a collective at level 3.

        Args:
            place: name of the calling function, for the check that all ranks call it.
            changed: whether the block changes parameters; rank 0's values then count.
        """
        parts = [] if self.keeps_parameters else [p for p in module.parameters() if hasattr(p, "ds_id")]
        if not parts:
            yield
            return
        self._at(place)
        written: list[torch.Tensor] = []
        with self._deepspeed.zero.GatheredParameters(parts, modifier_rank=0 if changed else None):
            yield
            if changed:
                written = [p.detach().clone() for p in parts]
        for p, value in zip(parts, written, strict=False):
            if p in self._by_leaf:  # DeepSpeed's master copy would bring the old values back with the next step
                self._deepspeed.utils.safe_set_local_fp32_param(p, self._part(p, value.float().flatten()))

    def _part(self, parameter: Any, line: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of ``line``, the flattened elements of ``parameter``; padded to the common length."""
        size, rank = parameter.partition_numel(), self._world["rank"]
        own = line[rank * size : (rank + 1) * size]
        return nn.functional.pad(own, (0, size - own.numel()))

    @contextmanager
    def running(self) -> Iterator[None]:
        """Set ``inside`` in the context, in which DeepSpeed's own code runs."""
        before, self.inside = self.inside, True
        try:
            yield
        finally:
            self.inside = before

    def close(self) -> None:
        """Close all engines, at the end of the program."""
        for one in self._engines:
            one.close()
        self._engines.clear()


# Note [DeepSpeed]
#
# The program is not changed, so it never calls the engine. lagom makes an engine in the first training forward of a
# module that an optimizer steps. The engine stays behind the module, and the module keeps its type. A backward runs the
# code that engine.backward(loss) has before and after autograd, and scales the gradient at the root; so the program may
# have any loss, and several of them. optimizer.step() calls engine.step(). lagom handles loaders, BatchNorm, random
# numbers, weights of uneven shares and files as with backend="torch"; DeepSpeed averages gradients and steps.
#
# Three other designs were rejected. If the program got an engine in the place of its model, type(model) and the keys of
# state_dict would change. If lagom used the optimizer of a stage without the engine, offloading, accumulation and
# precision would be missing, which are the reasons to choose DeepSpeed. If a backward called engine.backward, the loss
# would have to be a scalar: a backward from several roots, or with gradients of the program's own, could not be scaled.
#
# DeepSpeed needs the default process group of torch.distributed, so the program sees one after the first forward.
