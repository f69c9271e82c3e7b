"""``micro_batches``: forwards in parts give the weights of whole forwards, in less memory."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from lagom import experiment
from lagom.config import TorchDistributedConfig
from lagom.config.torch_distributed import Batches
from lagom.session.session import Session
from tests import ranks
from tests.ranks import alone, run_ranks

MB = 1 << 20
WIDTH = 70
"""Rows of a matrix that is sharded at level 3."""


class Residual(nn.Module):
    """Keeps several activations, and draws random numbers."""

    def __init__(self, dropout: float = 0.3) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        kept: Tensor = self.dropout(torch.tanh(self.dense(self.norm(x))))
        return x + kept


def network(*extra: nn.Module, dropout: float = 0.3) -> nn.Sequential:
    return nn.Sequential(Residual(dropout), *extra, Residual(dropout), nn.Linear(WIDTH, 1)).double()


def batches_of(num: int = 20, size: int = 8) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(num, WIDTH, generator=generator, dtype=torch.float64)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True).sin()), batch_size=size, shuffle=True)


def trained(session: Session, model: nn.Module, loss_of: Callable[[Any, Tensor, Tensor], Any]) -> dict[str, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    for _ in range(2):
        for x, y in batches_of():
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            optimizer.step()
    found = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return {"weights": found, "num": session.forwards.num_micro_batches, "draw": torch.rand(())}


def mean_loss(model: Any, x: Tensor, y: Tensor) -> Any:
    return F.mse_loss(model(x), y)


def differ(one: dict[str, Any], other: dict[str, Any]) -> float:
    assert one["draw"] == other["draw"]
    return max(float((a - other["weights"][name]).abs().max()) for name, a in one["weights"].items())


@pytest.mark.parametrize(
    ("world_size", "zero_lvl", "batches"),
    [
        (2, 3, "whole"),  # test_forms_of_a_loss has shares of batches
        *(pytest.param(2, level, "split", marks=pytest.mark.soak) for level in (0, 2, 3)),
        *(
            pytest.param(*other, marks=pytest.mark.soak)
            for other in ((2, 1, "whole"), (3, 0, "whole"), (3, 3, "split"))
        ),
    ],
)
def test_ranks_train_as_without_them(world_size: int, zero_lvl: int, batches: Batches) -> None:
    """Dropout has the numbers of the whole batch; in the tail, ranks have different numbers of rows."""

    def train(session: Session) -> Any:
        return trained(session, network(), mean_loss)

    wanted = run_ranks(world_size, train, batches=batches)
    found = run_ranks(world_size, train, batches=batches, zero_lvl=zero_lvl, micro_batches=2)
    for one, other in zip(found, wanted, strict=True):
        assert one["num"] == 2
        assert differ(one, other) < 1e-12
    if batches == "whole":
        assert differ(found[0], alone(train)) < 1e-12


class Repeating(Residual):
    """Lets the backward repeat its forward, dropout included."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        repeated: Tensor = checkpoint(super().forward, x, use_reentrant=self.use_reentrant)
        return repeated


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_of_the_program_repeats_its_draws(use_reentrant: bool, world_size: int) -> None:
    def train(session: Session) -> Any:
        return trained(session, network(Repeating(use_reentrant)), mean_loss)

    wanted = alone(train)
    for found in run_ranks(world_size, train, batches="whole", micro_batches=2):
        assert found["num"] == 2
        assert differ(found, wanted) < 1e-12


class Odd(nn.Module):
    """A forward that is odd in one way, named by ``kind``."""

    seen: Tensor

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.dense, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))
        self.calls = 0
        self.shown: list[Tensor] = []

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        h = torch.tanh(self.dense(x))
        if self.kind == "mixes rows":
            h = h - h.mean(0)
        elif self.kind == "keeps a buffer":
            self.seen += 1
        elif self.kind == "counts":
            self.calls += 1
        elif self.kind == "keeps a tensor":
            self.shown.append(h)
        elif self.kind == "decides by numbers" and h.sum() > 0:
            h = 2 * h
        elif self.kind == "draws by row":
            h = h * torch.tensor([random.random() for _ in range(len(h))], dtype=h.dtype)[:, None]
        elif self.kind == "draws for all":
            h = h * torch.rand(WIDTH, dtype=h.dtype)
        elif self.kind == "draws from Python":
            h = h * torch.rand(WIDTH, dtype=h.dtype) if random.random() < 0.5 else h * random.random()
        elif self.kind == "decides by chance":
            h = F.dropout(h, 0.3) if torch.rand(()) < 0.5 else h - h.mean(0)
        elif self.kind == "checkpoints":
            h = checkpoint(lambda h: torch.sin(self.other(h)), h, use_reentrant=False)
        elif self.kind == "by coincidence" and scale is not None:
            h = h * (x @ torch.ones(WIDTH, 1, dtype=h.dtype)).abs() + (scale * h[:1].sum(1)).sum()
        return torch.sin(torch.tanh(self.other(h)))


SPLIT = {"plain": True, "draws for all": True, "checkpoints": True, "decides by chance": True}
WHOLE = [
    *("mixes rows", "keeps a buffer", "counts", "keeps a tensor", "decides by numbers", "draws by row"),
    "draws from Python",
    "by coincidence",
]


def test_what_is_not_exact_in_parts_runs_whole() -> None:
    """The weights are right whatever a forward does, and it runs in parts where it may."""

    def loss_of(model: Any, x: Tensor, y: Tensor) -> Any:
        rest = (torch.linspace(0, 1, len(x), dtype=x.dtype),) if model.kind == "by coincidence" else ()
        return model(x, *rest).square().mean()

    def train(session: Session) -> Any:
        rows = {}
        for kind in (*SPLIT, *WHOLE):
            session.forwards.num_micro_batches = 1
            torch.manual_seed(1)
            random.seed(1)
            model = Odd(kind).double()
            rows[kind] = trained(session, model, loss_of)
            rows[kind]["calls"] = model.calls
        return rows

    plain, found = alone(train), run_ranks(1, train, micro_batches=2)[0]
    for kind, row in found.items():
        assert differ(row, plain[kind]) < 1e-12, kind
        assert row["calls"] == plain[kind]["calls"]
        assert (row["num"] == 2) == (kind in SPLIT), kind


def test_rows_that_are_all_alike_do_not_show_how_others_fare() -> None:
    """A warm-up with zeros, as in many programs; then batches."""

    def train(session: Session) -> Any:
        model = Odd("mixes rows").double()
        model(torch.zeros(8, WIDTH, dtype=torch.float64)).sum().backward()
        model.zero_grad()
        return trained(session, model, lambda model, x, y: (model(x) * y).mean())

    found = run_ranks(1, train, micro_batches=2)[0]
    assert found["num"] == 1
    assert differ(found, alone(train)) < 1e-12


@pytest.mark.parametrize("timeline", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_batchnorm_keeps_the_statistics_of_the_batch_and_what_is_around_it_runs_in_parts(
    monkeypatch: pytest.MonkeyPatch, timeline: bool
) -> None:
    monkeypatch.setattr(ranks, "TIMELINE", timeline)

    def train(session: Session) -> Any:
        return trained(session, network(nn.BatchNorm1d(WIDTH), dropout=0), mean_loss)

    for world_size in (1, 2):
        for one in run_ranks(world_size, train, micro_batches=2):
            assert one["num"] == 2  # the layers before and after it
            assert differ(one, alone(train)) < 1e-12


def test_forms_of_a_loss() -> None:
    """Gradients of inputs, two forwards in one loss, a frozen part, a loss inside the module, and autocast."""

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network()

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.mse_loss(self.inner(x), y)

    def by_inputs(model: Any, x: Tensor, y: Tensor) -> Any:
        x = x.clone().requires_grad_()
        return F.mse_loss(model(x), y) + model(x * 0.5).square().mean() + x.square().mean()

    def train(session: Session) -> Any:
        frozen = network()
        for p in frozen[0].parameters():
            p.requires_grad_(False)
        return [
            trained(session, network(), by_inputs),
            trained(session, frozen, mean_loss),
            trained(session, WithLoss(), lambda model, x, y: model(x, y)),
        ]

    wanted = run_ranks(2, train)
    for row, without in zip(run_ranks(2, train, micro_batches=2), wanted, strict=True):
        for one, other in zip(row, without, strict=True):
            assert one["num"] == 2
            assert differ(one, other) < 1e-12


def test_half_precision_keeps_its_gradients() -> None:
    def train(session: Session) -> Any:
        return trained(session, network().float(), lambda model, x, y: F.mse_loss(model(x.float()), y.float()))

    for asked in ("bf16", "fp16"):
        without = run_ranks(1, train, mixed_precision=asked)[0]
        found = run_ranks(1, train, mixed_precision=asked, micro_batches=2)[0]
        assert found["num"] == 2
        assert differ(found, without) < 1e-2
        start = alone(lambda session: network().float().state_dict())
        assert max(float((found["weights"][name] - was).abs().max()) for name, was in start.items()) > 2e-2


@pytest.mark.soak  # test_what_is_not_exact_in_parts_runs_whole
def test_attention_that_drops_nothing_runs_in_parts() -> None:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(7, 16), nn.Linear(16, 1)
            self.layers = nn.TransformerEncoder(
                nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True), 2, enable_nested_tensor=False
            )

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.last(self.layers(self.first(x.view(len(x), 10, 7))).mean(1))
            return y

    def train(session: Session) -> Any:
        outer = []
        model = Reader().double()
        found = trained(session, model, lambda model, x, y: F.mse_loss(model(x.clone().requires_grad_()), y))
        loss = model(torch.randn(8, WIDTH, dtype=torch.float64))
        node = loss.grad_fn
        while node is not None and node.name() not in ("CatBackward0", "AddmmBackward0"):
            node = node.next_functions[0][0]
        outer.append(node.name() if node is not None else "")
        return {**found, "draw": found["draw"], "outer": outer}

    found = run_ranks(1, train, micro_batches=2)[0]
    assert found["outer"] == ["CatBackward0"]  # the whole, not layer by layer
    assert differ(found, alone(train)) < 1e-12


def test_single_layers_are_not_computed_twice_as_parts_would_keep_as_much() -> None:
    def train(session: Session) -> Any:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
        return trained(session, model.double(), mean_loss)

    found = run_ranks(1, train, micro_batches=2)[0]
    assert found["num"] == 1
    assert differ(found, alone(train)) == 0


def test_a_run_takes_them_from_its_config() -> None:
    def train() -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Sigmoid(), nn.Linear(8, 1)).double()
        kept: list[int] = []

        def note(tensor: Tensor) -> Tensor:
            kept.append(tensor.numel())
            return tensor.detach()

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            model(torch.randn(64, 4, dtype=torch.float64)).sum().backward()
        return [float(sum(kept)), *(float(p.grad.sum()) for p in model.parameters() if p.grad is not None)]

    plain = train()
    found = experiment.lagom(train, TorchDistributedConfig(launcher="inline", micro_batches=4)).value
    assert found[1:] == pytest.approx(plain[1:], abs=1e-12)
    assert found[0] < plain[0]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"micro_batches": 0}, "micro_batches is 0; want a number of parts of a batch, at least 1, or None"),
        ({"micro_batches": "auto"}, "micro_batches='auto' is gone; use a number"),
        ({"micro_batches": True}, "micro_batches is True"),
        ({"micro_batches": "all"}, "micro_batches is 'all'"),
        ({"micro_batches": 2, "backend": "deepspeed"}, "gradient_accumulation_steps"),
    ],
)
def test_a_wrong_setting_is_an_error(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        TorchDistributedConfig(**fields)
