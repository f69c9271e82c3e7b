"""Optimizers, learning rates, averages of weights and what happens between the steps."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils.data import DataLoader, TensorDataset


def _data(num_samples: int = 27) -> tuple[Tensor, Tensor, DataLoader[Any]]:
    x = torch.randn(num_samples, 6)
    y = x[:, :3].argmax(1)
    return x, y, DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)


def _mlp(norm: bool = False) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16) if norm else nn.Identity(), nn.Tanh(), nn.Linear(16, 3))


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor, labels: Tensor) -> float:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(inputs), labels)
    loss.backward()
    optimizer.step()
    return loss.item()


def range_test() -> dict[str, Any]:
    """A learning-rate finder: the rate grows until the smoothed loss explodes; weights are put back."""
    _, _, loader = _data()
    model = _mlp()
    start = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    rates, losses, smooth, best = [], [], 0.0, math.inf
    batches = iter(loader)
    for step in range(30):
        try:
            inputs, labels = next(batches)
        except StopIteration:
            batches = iter(loader)
            inputs, labels = next(batches)
        optimizer.param_groups[0]["lr"] = rate = 1e-3 * 1.6**step
        smooth = 0.7 * smooth + 0.3 * _step(model, optimizer, inputs, labels)
        corrected = smooth / (1 - 0.7 ** (step + 1))
        rates.append(rate)
        losses.append(corrected)
        best = min(best, corrected)
        if corrected > 4 * best:
            break
    steepest = min(range(1, len(losses)), key=lambda i: losses[i] - losses[i - 1])
    print(f"stopped after {len(losses)}, suggests {rates[steepest]:.6f}")
    model.load_state_dict(start)
    optimizer = torch.optim.SGD(model.parameters(), lr=rates[steepest])
    for inputs, labels in loader:
        _step(model, optimizer, inputs, labels)
    return {"weights": model.state_dict(), "losses": losses}


def stochastic_averages() -> dict[str, Any]:
    """SWA: averaged weights from the second epoch, its own schedule, statistics of BatchNorm made anew."""
    x, y, loader = _data()
    model = _mlp(norm=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    average, ema = AveragedModel(model), AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    rates, swa = lr_scheduler.CosineAnnealingLR(optimizer, 4), SWALR(optimizer, 0.05, anneal_epochs=2)
    for epoch in range(4):
        for inputs, labels in loader:
            _step(model, optimizer, inputs, labels)
            ema.update_parameters(model)
        if epoch > 1:
            average.update_parameters(model)
            swa.step()
        else:
            rates.step()
        print(f"{optimizer.param_groups[0]['lr']:.10f}")
    update_bn(loader, average)
    average.eval()
    ema.eval()
    with torch.no_grad():
        print([(one(x).argmax(1) == y).sum().item() for one in (average, ema)])
    return {"average": average.state_dict(), "ema": ema.state_dict()}


def snapshots() -> dict[str, Any]:
    """Warm restarts of a cosine; the weights at the end of each cycle vote together."""
    x, y, loader = _data()
    model = _mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    rates = lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=1, T_mult=2)
    kept = []
    for epoch in range(3):
        for step, (inputs, labels) in enumerate(loader):
            _step(model, optimizer, inputs, labels)
            rates.step(epoch + step / len(loader))
        if epoch in (0, 2):
            kept.append({name: one.clone() for name, one in model.state_dict().items()})
            torch.save(kept[-1], f"snapshot_{epoch}.pt")
    votes = torch.zeros(len(x), 3)
    for weights in kept:
        model.load_state_dict(weights)
        with torch.no_grad():
            votes += model(x).softmax(1)
    print((votes.argmax(1) == y).sum().item())
    return {"kept": kept, "votes": votes}


def frozen_in_stages() -> dict[str, Any]:
    """Rates for each layer; the body frozen at first, thawed by a new parameter group, one layer frozen at last."""
    _, _, loader = _data()
    model = _mlp(norm=True)
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(
        [{"params": model[3].parameters(), "lr": 0.2}, {"params": model[1].parameters()}], lr=0.05
    )
    for epoch in range(3):
        if epoch == 1:
            model[0].requires_grad_(True)
            optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.01, "weight_decay": 0.1})
        if epoch == 2:
            model[3].requires_grad_(False)
            model[1].eval()
        total = sum(_step(model, optimizer, inputs, labels) for inputs, labels in loader)
        print(f"{total:.10f}", [one.grad is not None for one in model.parameters()])
    return {"weights": model.state_dict()}


def restored_best() -> dict[str, Any]:
    """Early stopping with patience on a metric of the validation set; the best weights restored from memory."""
    x, y, loader = _data()
    model = _mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.3)
    best, kept, patience, epoch = -1.0, copy.deepcopy(model.state_dict()), 2, 0
    while patience and epoch < 12:
        for inputs, labels in loader:
            _step(model, optimizer, inputs, labels)
        model.eval()
        with torch.no_grad():
            accuracy = (model(x[:20]).argmax(1) == y[:20]).double().mean().item()
        model.train()
        if accuracy > best:
            best, kept, patience = accuracy, copy.deepcopy(model.state_dict()), 2
        else:
            patience -= 1
        epoch += 1
    model.load_state_dict(kept)
    print(f"best {best} after {epoch}")
    return {"weights": model.state_dict()}


def changed_gradients() -> dict[str, Any]:
    """Clipped by value and by norm, centralised by hooks, noise added by hand, one parameter's set to None."""
    _, _, loader = _data()
    model = _mlp()
    model[0].weight.register_hook(lambda one: one - one.mean(1, keepdim=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for step, (inputs, labels) in enumerate(loader):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        F.cross_entropy(model(inputs), labels).backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.1)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.15)
        for one in model.parameters():
            one.grad += torch.randn_like(one) * 0.01 / (1 + step)
        if step == 3:
            model[3].bias.grad = None
        optimizer.step()
        print(f"{norm.item():.10f}")
    return {"weights": model.state_dict()}


def lion_and_others_by_hand() -> dict[str, Any]:
    """An optimizer of the program's own (Lion), one around another (Lookahead), updates without any."""

    class Lion(torch.optim.Optimizer):
        def __init__(self, params: Any, lr: float) -> None:
            super().__init__(params, {"lr": lr})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for one in group["params"]:
                    held = self.state[one].setdefault("average", torch.zeros_like(one))
                    one.add_((0.9 * held + 0.1 * one.grad).sign(), alpha=-group["lr"])
                    held.lerp_(one.grad, 0.01)

    _, _, loader = _data()
    model, other, third = _mlp(), _mlp(), _mlp()
    lion, inner = Lion(model.parameters(), 0.01), torch.optim.RMSprop(other.parameters(), lr=0.01)
    slow = [one.detach().clone() for one in other.parameters()]
    for step, (inputs, labels) in enumerate(loader):
        _step(model, lion, inputs, labels)
        _step(other, inner, inputs, labels)
        if step % 3 == 2:
            with torch.no_grad():
                for held, one in zip(slow, other.parameters(), strict=True):
                    one.copy_(held.lerp_(one, 0.5))
        for one, gradient in zip(
            third.parameters(),
            torch.autograd.grad(F.cross_entropy(third(inputs), labels), third.parameters()),
            strict=True,
        ):
            one.data -= 0.1 * gradient
    return {"weights": [one.state_dict() for one in (model, other, third)]}


def many_optimizers() -> dict[str, Any]:
    """One model for each optimizer of torch, all trained in one loop over the same batches."""
    _, _, loader = _data()
    kinds = {
        "Adadelta": {}, "Adafactor": {}, "Adagrad": {}, "Adam": {"amsgrad": True}, "AdamW": {"foreach": True},
        "Adamax": {}, "ASGD": {}, "NAdam": {}, "RAdam": {"decoupled_weight_decay": True}, "Rprop": {},
        "RMSprop": {"centered": True, "momentum": 0.5}, "SGD": {"nesterov": True, "momentum": 0.9, "maximize": False},
    }  # fmt: skip
    start = _mlp()
    models = {name: copy.deepcopy(start) for name in kinds}
    optimizers = {name: getattr(torch.optim, name)(models[name].parameters(), lr=0.01, **kinds[name]) for name in kinds}
    for inputs, labels in loader:
        print(" ".join(f"{_step(models[name], optimizers[name], inputs, labels):.9f}" for name in kinds))
    return {name: model.state_dict() for name, model in models.items()}


def schedules_of_torch() -> dict[str, Any]:
    """Warmup, one cycle, plateau, polynomial, a chain and a sequence of schedules, on one weight each."""
    _, _, loader = _data()
    makes = [
        lambda o: lr_scheduler.LambdaLR(o, lambda step: min(1.0, (step + 1) / 4)),
        lambda o: lr_scheduler.OneCycleLR(o, 0.3, total_steps=12),
        lambda o: lr_scheduler.PolynomialLR(o, 10, 2.0),
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.ExponentialLR(o, 0.8)], [3]
        ),
        lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.2, step_size_up=3),
    ]
    models = [_mlp() for _ in makes]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    rates = [make(optimizer) for make, optimizer in zip(makes, optimizers, strict=True)]
    plateau = lr_scheduler.ReduceLROnPlateau(optimizers[0], patience=0, factor=0.5)
    for _ in range(2):
        total = 0.0
        for inputs, labels in loader:
            for model, optimizer, rate in zip(models, optimizers, rates, strict=True):
                total += _step(model, optimizer, inputs, labels)
                rate.step()
        plateau.step(total)
        print([round(optimizer.param_groups[0]["lr"], 10) for optimizer in optimizers], f"{total:.9f}")
    return {"weights": [one.state_dict() for one in models]}


def sharpness_and_surrogates() -> dict[str, Any]:
    """SAM with two passes through BatchNorm, and a closure that an optimizer calls itself."""
    _, _, loader = _data()
    model = _mlp(norm=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for inputs, labels in loader:
        F.cross_entropy(model(inputs), labels).backward()
        norm = torch.stack([one.grad.norm() for one in model.parameters()]).norm()
        moves = [one.grad * 0.05 / (norm + 1e-12) for one in model.parameters()]
        with torch.no_grad():
            for one, move in zip(model.parameters(), moves, strict=True):
                one += move
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        with torch.no_grad():
            for one, move in zip(model.parameters(), moves, strict=True):
                one -= move
        optimizer.step()
        optimizer.zero_grad()

        def closure(inputs: Tensor = inputs, labels: Tensor = labels) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), labels)
            loss.backward()
            return loss

        print(f"{norm.item():.10f} {optimizer.step(closure).item():.10f}")
    return {"weights": model.state_dict()}


def whole_newton() -> dict[str, Any]:
    """LBFGS with a strong Wolfe search over each batch, and a Gauss-Newton step by a Jacobian."""
    x, _, _ = _data(24)
    wanted = x[:, :1].sin()
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")
    for inputs, targets in DataLoader(TensorDataset(x, wanted), 8):

        def closure(inputs: Tensor = inputs, targets: Tensor = targets) -> Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(inputs), targets)
            loss.backward()
            return loss

        print(f"{optimizer.step(closure).item():.10f}")
    params = [one.detach() for one in model.parameters()]
    names = [name for name, _ in model.named_parameters()]

    def residuals(*weights: Tensor) -> Tensor:
        return (torch.func.functional_call(model, dict(zip(names, weights, strict=True)), (x,)) - wanted).squeeze(1)

    found = torch.func.jacrev(residuals, argnums=tuple(range(len(params))))(*params)
    jacobian = torch.cat([one.flatten(1) for one in found], 1)
    step = torch.linalg.solve(
        jacobian.T @ jacobian + 0.1 * torch.eye(jacobian.shape[1]), jacobian.T @ residuals(*params)
    )
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(params) - step, model.parameters())
    print(f"{F.mse_loss(model(x), wanted).item():.10f}")
    return {"weights": model.state_dict()}


def accumulated_with_clipping() -> dict[str, Any]:
    """Gradients of three batches added and clipped; one batch in between is skipped for its loss."""
    _, _, loader = _data(60)
    model = _mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step, (inputs, labels) in enumerate(loader):
        loss = F.cross_entropy(model(inputs), labels)
        if loss.item() > 1.25:
            print("skipped")
            continue
        (loss / 3).backward()
        if step % 3 == 2:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            print(f"{norm.item():.10f}")
            optimizer.step()
            optimizer.zero_grad()
    return {
        "weights": model.state_dict(),
        "left": [None if one.grad is None else one.grad for one in model.parameters()],
    }


def hooks_of_optimizers() -> dict[str, Any]:
    """Hooks before and after steps, one that steps in the backward itself, and a gradient that is watched."""
    _, _, loader = _data()
    model, fused = _mlp(), _mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[float] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(float(model[0].weight.grad.norm())))
    optimizer.register_step_post_hook(lambda *_: seen.append(float(model[0].weight.norm())))
    each = {one: torch.optim.SGD([one], lr=0.1) for one in fused.parameters()}

    def step(one: Tensor) -> None:
        each[one].step()
        each[one].zero_grad()

    for one in fused.parameters():
        one.register_post_accumulate_grad_hook(step)
    for inputs, labels in loader:
        _step(model, optimizer, inputs, labels)
        F.cross_entropy(fused(inputs), labels).backward()
    print(" ".join(f"{one:.8f}" for one in seen))
    return {"weights": model.state_dict(), "fused": fused.state_dict()}


def resumed_in_mid_epoch() -> dict[str, Any]:
    """A checkpoint of model, optimizer, schedule and generators in mid-epoch; the rest is run twice and compared."""
    _, _, loader = _data()
    model = nn.Sequential(_mlp(), nn.Dropout(0.2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    rates = lr_scheduler.StepLR(optimizer, 2, 0.5)
    ends = []
    for attempt in range(2):
        if attempt:
            held = torch.load("last.pt", weights_only=False)
            model.load_state_dict(held["model"])
            optimizer.load_state_dict(held["optimizer"])
            rates.load_state_dict(held["rates"])
            torch.set_rng_state(held["random"])
        for step, (inputs, labels) in enumerate(loader):
            if attempt == 0 and step == 2:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rates": rates.state_dict()}
                torch.save(state | {"random": torch.get_rng_state()}, "last.pt")
            _step(model, optimizer, inputs, labels)
            rates.step()
        ends.append(model[0][0].weight.detach().clone())
    print(f"{(ends[0] - ends[1]).abs().max().item():.10f}")
    return {"weights": model.state_dict(), "ends": ends}
