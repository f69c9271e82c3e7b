"""``Engines``: a program's models and optimizers, driven through DeepSpeed's engine. See Note [DeepSpeed]."""

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

from lagom.deepspeed.engine import Engine
from lagom.deepspeed.loading import as_imported, check_nvme, environment, load, variable
from lagom.errors import LagomError
from lagom.zero.optimizer_probe import Kind, probe_optimizer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch.optim import Optimizer

    Replaced = Callable[[object, str, object], Any]


class Engines:
    """The engines of a run, one for each optimizer and the module that it steps.

    Args:
        config: as ``settings`` gives it.
        replaced: sets an attribute for a while.
        at: makes sure that all ranks are at the same place.
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
        # What it takes for a local rank is the number of the device.
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
        self._by_leaf: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._deepspeed: Any = None
        self.inside = False
        """DeepSpeed's own code runs, and not the program's."""

    @contextmanager
    def loaded(self) -> Iterator[None]:
        """DeepSpeed is there; see ``load``."""
        with ExitStack() as stack:
            self._deepspeed = load(self._device.type)
            check_nvme(self._config)
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)  # of names that it still uses
            # Its third stage looks this up in every forward.
            stack.enter_context(variable("LOCAL_RANK", self._variables["LOCAL_RANK"]))
            for name in ("deepspeed.utils.groups", "deepspeed.comm.comm"):
                stack.enter_context(as_imported(sys.modules[name]))
            # Its sums through shared memory are an op that takes a compiler, and a minute.
            # By sys.modules: what deepspeed.comm calls torch is torch.
            stack.enter_context(self._replaced(sys.modules["deepspeed.comm.torch"], "build_shm_op", lambda: None))
            yield

    @property
    def keeps_parameters(self) -> bool:
        """Whether parameters are whole outside of forwards."""
        return self.stage < 3

    def start(self, module: nn.Module, optimizer: Optimizer | None, step: Callable[..., Any] | None) -> None:
        """Have an engine drive ``module`` and ``optimizer``, None for the one in the configuration; a collective.

        Raises:
            LagomError: when DeepSpeed would not step by it as one process does.
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
        found = Engine(engine, module, optimizer, self.stage)
        self._engines.append(found)
        for p in found.leaves:
            self._by_leaf[p] = found

    def _check(self, optimizer: Optimizer, step: Callable[..., Any]) -> None:
        name = type(optimizer).__name__
        if self.stage == 0:
            return
        if optimizer.state:
            raise LagomError(
                f"the {name} has state already, which DeepSpeed would drop: at zero_lvl={self.stage} it cannot be "
                "loaded into backend='deepspeed'; use backend='torch', which loads it at any level"
            )
        if probe_optimizer(optimizer, step, closure=False).kind is not Kind.ELEMENTWISE:
            raise LagomError(
                f"{name} does not step each element by itself, and DeepSpeed would cut parameters anywhere: other "
                "weights would come of it. Use backend='torch', which shares it out as it can be, or zero_lvl=0"
            )

    def _sized(self, module: nn.Module) -> dict[str, Any]:
        """The configuration, with buckets that are no larger than the model: DeepSpeed allocates them whole."""
        config = copy.deepcopy(dict(self._config))
        most = min(sum(p.numel() for p in module.parameters()) + 2, 500_000_000) // 2 * 2  # it wants even ones
        if self.stage in (1, 2):
            config["zero_optimization"].setdefault("reduce_bucket_size", most)
            config["zero_optimization"].setdefault("allgather_bucket_size", most)
            if self._needs_no_norm(config):
                config["zero_optimization"].setdefault("compute_grad_norm", False)
        return config

    def _needs_no_norm(self, config: Mapping[str, Any]) -> bool:
        """Whether nothing asks for the norm of gradients, by which DeepSpeed would leave out steps that are not finite.

        One process makes them.
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
        backend = "nccl" if self._device.type == "cuda" else "gloo"
        self._init(backend, store=dist.PrefixStore("deepspeed", self._store), **self._world)

    def drives(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Whether one of them belongs to an engine."""
        return any(p in self._by_leaf for p in parameters)

    def of(self, optimizer: Optimizer) -> Engine | None:
        """The engine that steps for ``optimizer``."""
        return next((one for one in self._engines if one.optimizer is optimizer), None)

    def of_module(self, module: nn.Module) -> Engine:
        """The engine that drives ``module``, for a program that calls ``model.backward`` and ``model.step``."""
        found: set[Engine] = {self._by_leaf[p] for p in module.parameters() if p in self._by_leaf}
        if len(found) != 1:
            raise LagomError(f"no engine drives this {type(module).__name__} yet; call it on a batch first")
        return found.pop()

    def dirty(self, leaf: torch.Tensor) -> bool:
        """Whether ``leaf`` has a gradient that only DeepSpeed can give."""
        found = self._by_leaf.get(leaf)
        return found is not None and bool(found.num_backwards) and found.keeps_gradients

    def backward(self, leaves: Sequence[torch.Tensor]) -> Engine | None:
        """The engine for a backward that reaches ``leaves``; None where it reaches none of any.

        Raises:
            LagomError: when it reaches those of several engines.
        """
        found = {self._by_leaf[leaf] for leaf in leaves if leaf in self._by_leaf}
        if len(found) > 1:
            raise LagomError(
                "one backward reaches the parameters of two optimizers, which DeepSpeed's engines cannot average "
                "apart; use backend='torch', which has no such limit"
            )
        return found.pop() if found else None

    @contextmanager
    def gathered(self, module: nn.Module, place: str, *, changed: bool = False) -> Iterator[None]:
        """Parameters of ``module`` are whole, on all ranks; a collective at level 3."""
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
            if p in self._by_leaf:  # it steps by numbers of its own, which would come back with the next step
                self._deepspeed.utils.safe_set_local_fp32_param(p, self._part(p, value.float().flatten()))

    def _part(self, parameter: Any, line: torch.Tensor) -> torch.Tensor:
        """This rank's part of the ``line`` of a parameter's elements; all parts are equally long."""
        size, rank = parameter.partition_numel(), self._world["rank"]
        own = line[rank * size : (rank + 1) * size]
        return nn.functional.pad(own, (0, size - own.numel()))

    @contextmanager
    def running(self) -> Iterator[None]:
        """DeepSpeed's own code runs."""
        before, self.inside = self.inside, True
        try:
            yield
        finally:
            self.inside = before

    def close(self) -> None:
        """The program has ended."""
        for one in self._engines:
            one.close()
        self._engines.clear()


# Note [DeepSpeed]
#
# The program's loop stays as it is, so nobody calls the engine: a training forward of a module that an optimizer steps
# makes one, behind the module, which keeps its type. A backward does what engine.backward(loss) does around autograd,
# at its root, so any loss and any number of them will do; optimizer.step() is engine.step(). Loaders, BatchNorm, random
# numbers, weights of uneven shares and files are lagom's as with backend="torch"; averages and steps are DeepSpeed's.
#
# Designs seen. To hand the program an engine for a model changes type(model) and state_dict's keys. To take a stage's
# optimizer without the engine leaves out offloading, accumulation and precision, which people want it for. To call
# engine.backward needs the loss as a scalar, and divides what a backward from several roots, or with gradients of the
# program's own, does not have.
#
# DeepSpeed wants torch.distributed's own world, so it is there for the program, too, after the first forward.
