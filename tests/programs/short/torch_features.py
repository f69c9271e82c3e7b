"""Parts of torch that change modules, gradients or the way a forward runs."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from torch.utils.data import DataLoader, TensorDataset


def _data(num_samples: int = 27) -> tuple[Tensor, Tensor, DataLoader[Any]]:
    x = torch.randn(num_samples, 6)
    y = x[:, :3].argmax(1)
    return x, y, DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)


def _mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))


def _epoch(model: nn.Module, loader: DataLoader[Any], optimizer: torch.optim.Optimizer) -> float:
    total = 0.0
    for inputs, labels in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        total += loss.item()
    print(f"loss {total:.10f}")
    return total


def _sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1, momentum=0.9)


def pruned() -> dict[str, Any]:
    """Weights pruned by size in the middle of the training, then made permanent."""
    _, _, loader = _data()
    model = _mlp()
    optimizer = _sgd(model)
    _epoch(model, loader, optimizer)
    prune.l1_unstructured(model[0], "weight", amount=0.4)
    prune.ln_structured(model[2], "weight", amount=0.3, n=2, dim=1)
    _epoch(model, loader, optimizer)
    for one in (model[0], model[2]):
        prune.remove(one, "weight")
    print("zeros", int((model[0].weight == 0).sum()))
    _epoch(model, loader, _sgd(model))
    return {"weights": model.state_dict()}


def fake_quantised() -> dict[str, Any]:
    """Quantisation-aware: weights and activations rounded, gradients straight through; the range in a buffer."""

    class Quantise(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("limit", torch.tensor(2.0))

        def forward(self, x: Tensor) -> Tensor:
            scale = self.limit / 7
            return x + (torch.clamp((x / scale).round(), -7, 7) * scale - x).detach()

    _, _, loader = _data()
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), Quantise(), nn.Linear(16, 3))
    parametrize.register_parametrization(model[0], "weight", Quantise())
    _epoch(model, loader, _sgd(model))
    _epoch(model, loader, _sgd(model))
    return {"weights": model.state_dict()}


def range_followed() -> dict[str, Any]:
    """A quantiser whose range follows the largest value of each batch, as observers do."""

    class Observer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("limit", torch.tensor(1.0))

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.limit.mul_(0.9).add_(0.1 * x.detach().abs().max())
            return x + ((x / self.limit * 15).round() * self.limit / 15 - x).detach()

    x, y, loader = _data()
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), Observer(), nn.Linear(16, 3))
    _epoch(model, loader, _sgd(model))
    _epoch(model, loader, _sgd(model))
    model.eval()
    with torch.no_grad():
        print((model(x).argmax(1) == y).double().mean().item())
    return {"weights": model.state_dict()}


def orthogonal() -> dict[str, Any]:
    """torch's orthogonal parametrisation, and weight norm in a second layer."""
    _, _, loader = _data()
    model = _mlp()
    nn.utils.parametrizations.orthogonal(model[0])
    nn.utils.parametrizations.weight_norm(model[2])
    _epoch(model, loader, _sgd(model))
    _epoch(model, loader, _sgd(model))
    parametrize.remove_parametrizations(model[0], "weight")
    return {"weights": model.state_dict()}


def low_rank() -> dict[str, Any]:
    """LoRA by hand: frozen layers wrapped, one factor starts at zero; merged and compared in the end."""

    class Adapted(nn.Module):
        def __init__(self, layer: nn.Linear) -> None:
            super().__init__()
            self.layer = layer.requires_grad_(False)
            self.down = nn.Parameter(torch.randn(2, layer.in_features) * 0.1)
            self.up = nn.Parameter(torch.zeros(layer.out_features, 2))

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) + x @ self.down.T @ self.up.T

    x, _, loader = _data()
    model = _mlp()
    _epoch(model, loader, _sgd(model))
    for i in (0, 2):
        model[i] = Adapted(model[i])
    optimizer = _sgd(model)
    for _ in range(2):
        _epoch(model, loader, optimizer)
    before = model(x).detach()
    for i in (0, 2):
        model[i].layer.weight.data += model[i].up.data @ model[i].down.data
        model[i] = model[i].layer
    print(f"merged within {(model(x) - before).abs().max().item() < 1e-12}")
    return {"weights": model.state_dict(), "before": before}


def adapters() -> dict[str, Any]:
    """Bottlenecks with a residual after each frozen layer, hung in by forward hooks."""
    _, _, loader = _data()
    model = _mlp().requires_grad_(False)
    extra = nn.ModuleList([nn.Sequential(nn.Linear(n, 2), nn.GELU(), nn.Linear(2, n)) for n in (16, 3)])
    for layer, adapter in zip((model[0], model[2]), extra, strict=True):
        layer.register_forward_hook(lambda _, __, output, adapter=adapter: output + adapter(output))
    optimizer = torch.optim.AdamW(extra.parameters(), lr=0.01)
    for _ in range(2):
        _epoch(model, loader, optimizer)
    return {"weights": extra.state_dict()}


def sparse_embeddings() -> dict[str, Any]:
    """Sparse gradients and SparseAdam, dense ones by another optimizer; bags with offsets."""
    bags = nn.EmbeddingBag(20, 4, mode="sum", sparse=True)
    words = nn.Embedding(20, 4, sparse=True)
    head = nn.Linear(8, 2)
    optimizers = [torch.optim.SparseAdam([*bags.parameters(), *words.parameters()], lr=0.05), _sgd(head)]
    tokens, y = torch.randint(0, 20, (30, 5)), torch.randint(0, 2, (30,))
    for inputs, labels in DataLoader(TensorDataset(tokens, y), batch_size=7):
        flat, offsets = inputs[:, 1:].reshape(-1), torch.arange(0, 4 * len(inputs), 4)
        loss = F.cross_entropy(head(torch.cat([bags(flat, offsets), words(inputs[:, 0])], 1)), labels)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        print(f"{loss.item():.10f} {words.weight.grad.coalesce().values().shape[0]}")
    return {"weights": [one.state_dict() for one in (bags, words, head)]}


def recomputed() -> dict[str, Any]:
    """Checkpointing: a whole model from outside, its parts from inside, a sequence in segments."""

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.1)) for _ in range(3)])
            self.out = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = x + checkpoint(block, x, use_reentrant=False)
            return self.out(x)

    _, _, loader = _data()
    model, plain = Deep(), _mlp()
    optimizer = torch.optim.SGD([*model.parameters(), *plain.parameters()], lr=0.1)
    for inputs, labels in loader:
        optimizer.zero_grad()
        scores = checkpoint(plain, inputs, use_reentrant=False) + model(inputs)
        scores = scores + checkpoint_sequential(plain, 2, inputs, use_reentrant=False)
        F.cross_entropy(scores, labels).backward()
        optimizer.step()
    return {"weights": model.state_dict(), "plain": plain.state_dict()}


def half_precision() -> dict[str, Any]:
    """bfloat16 autocast on the CPU around the forward only, with a scaler that is off; numbers rounded to bits."""
    x, y, _ = _data(48)
    x = x.float()
    model = _mlp().float()
    optimizer = _sgd(model)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    losses = []
    for inputs, labels in DataLoader(TensorDataset(x, y), batch_size=12):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            scores = model(inputs)
        loss = F.cross_entropy(scores.float(), labels)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        losses.append(round(loss.item(), 2))
    print(scores.dtype, losses)
    return {"types": [str(one.dtype) for one in model.parameters()], "scale": scaler.get_scale()}


def channels_last() -> dict[str, Any]:
    """Images and weights whose channels lie last; the layout of what comes out is printed."""
    images = torch.randn(26, 3, 6, 6).contiguous(memory_format=torch.channels_last)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3))
    model = model.to(memory_format=torch.channels_last)
    optimizer = _sgd(model)
    for (inputs,) in DataLoader(TensorDataset(images), batch_size=8):
        optimizer.zero_grad()
        out = model(inputs.to(memory_format=torch.channels_last))
        print(out.is_contiguous(memory_format=torch.channels_last), out.stride())
        out.pow(2).mean().backward()
        optimizer.step()
    return {"weights": model.state_dict()}


def scripted() -> dict[str, Any]:
    """torch.jit.script of the model before training, saved and loaded in the middle."""
    import warnings

    _, _, loader = _data()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = torch.jit.script(_mlp())
        _epoch(model, loader, _sgd(model))
        torch.jit.save(model, "model.ts")
        model = torch.jit.load("model.ts")
    import os

    _epoch(model, loader, _sgd(model))
    os.remove("model.ts")
    return {"weights": dict(model.state_dict())}


def traced() -> dict[str, Any]:
    """torch.jit.trace of a trained model, called in the evaluation and in a second training."""
    import warnings

    x, _, loader = _data()
    model = _mlp()
    _epoch(model, loader, _sgd(model))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fast = torch.jit.trace(model, x[:4])
    _epoch(fast, loader, _sgd(model))
    return {"weights": model.state_dict(), "out": fast(x).detach()}


def copied() -> dict[str, Any]:
    """An average of the weights in a deep copy, made after some calls; the copy is called in between too."""
    x, y, loader = _data()
    model = _mlp()
    optimizer = _sgd(model)
    _epoch(model, loader, optimizer)
    average = copy.deepcopy(model).requires_grad_(False)
    for inputs, labels in loader:
        optimizer.zero_grad()
        with torch.no_grad():
            teacher = average(inputs).softmax(1)
        scores = model(inputs)
        (F.cross_entropy(scores, labels) + F.mse_loss(scores.softmax(1), teacher)).backward()
        optimizer.step()
        for mine, theirs in zip(average.parameters(), model.parameters(), strict=True):
            mine.lerp_(theirs, 0.1)
    accuracy = (average(x).argmax(1) == y).double().mean().item()
    print(accuracy)
    return {"weights": model.state_dict(), "average": average.state_dict()}


def pickled() -> dict[str, Any]:
    """Model and optimizer pickled together and unpickled in mid-training; training goes on with the copies."""
    _, _, loader = _data()
    model = _mlp()
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(2):
        _epoch(model, loader, optimizer)
        model, optimizer = pickle.loads(pickle.dumps((model, optimizer)))
    held = io.BytesIO()
    torch.save({"model": model, "optimizer": optimizer.state_dict()}, held)
    held.seek(0)
    both = torch.load(held, weights_only=False)
    model = both["model"]
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.load_state_dict(both["optimizer"])
    _epoch(model, loader, optimizer)
    return {"weights": model.state_dict()}


def functional() -> dict[str, Any]:
    """torch.func.functional_call with weights that the program computes from others."""
    _, _, loader = _data()
    model = _mlp()
    scale = nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([*model.parameters(), scale], lr=0.1)
    for inputs, labels in loader:
        optimizer.zero_grad()
        weights = {name: one * scale for name, one in model.named_parameters()}
        F.cross_entropy(torch.func.functional_call(model, weights, (inputs,)), labels).backward()
        optimizer.step()
    return {"weights": model.state_dict(), "scale": scale.detach()}


def vectorised_ensemble() -> dict[str, Any]:
    """Several networks as one, by stack_module_state and vmap."""
    x, _, loader = _data()
    models = [_mlp() for _ in range(3)]
    weights, buffers = torch.func.stack_module_state(models)
    base = copy.deepcopy(models[0]).to("meta")
    optimizer = torch.optim.SGD(weights.values(), lr=0.3)

    def scores_of(inputs: Tensor) -> Tensor:
        return torch.func.vmap(
            lambda some, held, one: torch.func.functional_call(base, (some, held), (one,)), in_dims=(0, 0, None)
        )(weights, buffers, inputs)

    for inputs, labels in loader:
        optimizer.zero_grad()
        scores = scores_of(inputs)
        loss = F.cross_entropy(scores.flatten(0, 1), labels.repeat(3))
        loss.backward()
        optimizer.step()
        print(f"{loss.item():.10f}")
    return {"weights": {k: v.detach() for k, v in weights.items()}, "out": scores_of(x).mean(0).detach()}


def per_sample() -> dict[str, Any]:
    """Norms of the gradients of single samples by vmap of grad; they choose the samples of the step."""
    _, _, loader = _data()
    model = _mlp()
    optimizer = _sgd(model)

    def loss_of(weights: dict[str, Tensor], one: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(model, weights, (one[None],)), label[None])

    for inputs, labels in loader:
        weights = {name: one.detach() for name, one in model.named_parameters()}
        found = torch.func.vmap(torch.func.grad(loss_of), in_dims=(None, 0, 0))(weights, inputs, labels)
        norms = torch.stack([one.flatten(1).norm(dim=1) for one in found.values()]).norm(dim=0)
        chosen = norms.topk(min(4, len(norms))).indices
        optimizer.zero_grad()
        F.cross_entropy(model(inputs[chosen]), labels[chosen]).backward()
        optimizer.step()
        print(chosen.tolist())
    return {"weights": model.state_dict(), "norms": norms}


def several_gradients_at_once() -> dict[str, Any]:
    """autograd.grad of all classes at once, by is_grads_batched: a Jacobian that is part of the log."""
    _, _, loader = _data()
    model = _mlp()
    optimizer = _sgd(model)
    norms = []
    for inputs, labels in loader:
        scores = model(inputs)
        losses = F.cross_entropy(scores, labels, reduction="none")
        total = torch.stack([losses.mean(), scores.pow(2).mean()])
        found = torch.autograd.grad(total, list(model.parameters()), torch.eye(2), is_grads_batched=True)
        norms.append([one.norm().item() for one in found])
        for one, gradients in zip(model.parameters(), found, strict=True):
            one.grad = gradients[0] + 0.1 * gradients[1]
        optimizer.step()
    return {"weights": model.state_dict(), "norms": norms}


def vectorised_gradients() -> dict[str, Any]:
    """Jacobians and second derivatives of a sliced model by vmap over autograd.grad, with graph, and functional."""
    x, _, loader = _data()
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = _sgd(model)
    for inputs, labels in loader:
        inputs.requires_grad_()
        means = model(inputs).mean(0)

        def gradient(root: Tensor, means: Tensor = means, inputs: Tensor = inputs) -> Tensor:
            return torch.autograd.grad(means, inputs, root, create_graph=True)[0]

        (rows,) = torch.autograd.grad(means, [inputs], torch.eye(2), create_graph=True, is_grads_batched=True)
        again = torch.func.vmap(gradient)(torch.eye(2))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels % 2) + (rows * again).sum()
        loss.backward()
        optimizer.step()
        whole = torch.autograd.functional.jacobian(lambda one: model(one).mean(0), x[:9], vectorize=True)
        print(f"{loss.item():.10f} {whole.abs().sum().item():.10f}", torch.equal(rows, again))
    hessian = torch.autograd.functional.hessian(lambda one: model(one).pow(2).sum(), x[:4], vectorize=True)
    return {"weights": model.state_dict(), "hessian": hessian}


def jacobian_of_model() -> dict[str, Any]:
    """torch.func.jacrev and torch.autograd.functional.jacobian by the input, as a penalty and as a log."""
    _, _, loader = _data()
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = _sgd(model)
    for inputs, labels in loader:
        optimizer.zero_grad()
        found = torch.func.vmap(torch.func.jacrev(model))(inputs)
        loss = F.cross_entropy(model(inputs), labels % 2) + 0.1 * found.pow(2).mean()
        loss.backward()
        optimizer.step()
        whole = torch.autograd.functional.jacobian(lambda one: model(one).sum(0), inputs)
        print(f"{loss.item():.10f} {whole.abs().sum().item():.10f}")
    return {"weights": model.state_dict()}


def forward_mode() -> dict[str, Any]:
    """Directional derivatives in forward mode, in the log and by torch.func.jvp in the loss."""
    import torch.autograd.forward_ad as fwad

    _, _, loader = _data()
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = _sgd(model)
    for inputs, labels in loader:
        optimizer.zero_grad()
        direction = torch.ones_like(inputs)
        with fwad.dual_level():
            slope = fwad.unpack_dual(model(fwad.make_dual(inputs, direction))).tangent
        _, again = torch.func.jvp(model, (inputs,), (direction,))
        print(torch.allclose(slope, again), f"{slope.abs().sum().item():.10f}")
        (F.cross_entropy(model(inputs), labels) + 0.01 * again.pow(2).mean()).backward()
        optimizer.step()
    return {"weights": model.state_dict()}


def reversed_gradient() -> dict[str, Any]:
    """Gradient reversal by an autograd.Function of the program's own, between a body and two heads."""

    class Reverse(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
            ctx.factor = factor
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
            return -ctx.factor * gradient, None

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head, self.domain = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 2)

        def forward(self, x: Tensor, factor: float) -> tuple[Tensor, Tensor]:
            features = self.body(x).relu()
            return self.head(features), self.domain(Reverse.apply(features, factor))

    _, _, loader = _data()
    model = Both()
    optimizer = _sgd(model)
    for step, (inputs, labels) in enumerate(loader):
        optimizer.zero_grad()
        one, other = model(inputs, min(1.0, step / 5))
        loss = F.cross_entropy(one, labels) + F.cross_entropy(other, (inputs[:, 5] > 0).long())
        loss.backward()
        optimizer.step()
        print(f"{loss.item():.10f}")
    return {"weights": model.state_dict()}


class Output(NamedTuple):
    """Parts of an output that share memory."""

    scores: Tensor
    first: Tensor


def outputs_that_share_memory() -> dict[str, Any]:
    """Two outputs of one module are views of one tensor; the program changes one in place, and uses the other."""

    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = _mlp()

        def forward(self, x: Tensor) -> Output:
            scores = self.net(x)
            return Output(scores, scores[:, 0])

    x, _, loader = _data()
    model = Views()
    optimizer = _sgd(model)
    for inputs, labels in loader:
        optimizer.zero_grad()
        found = model(inputs)
        found.first.mul_(2.0).add_(1.0)
        loss = F.cross_entropy(found.scores, labels)
        loss.backward()
        optimizer.step()
        print(f"{loss.item():.10f}")
    with torch.no_grad():
        for _ in range(3):
            found = model(x)
            found.scores.clamp_(min=0)
            print(f"{found.first.sum().item():.10f}")
    return {"weights": model.state_dict()}


def output_that_is_the_input() -> dict[str, Any]:
    """A module returns its input, or a view of it, beside its output; the program changes it in place."""

    class Passing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = _mlp()

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return self.net(x), x, x[:, :2]

    _, _, loader = _data()
    model = Passing()
    optimizer = _sgd(model)
    for inputs, labels in loader:
        optimizer.zero_grad()
        scores, same, part = model(inputs)
        F.cross_entropy(scores, labels).backward()
        part.add_(1.0)
        print(same is inputs, f"{inputs.sum().item():.10f} {same.sum().item():.10f}")
        model(same)[0].pow(2).mean().backward()
        optimizer.step()
    return {"weights": model.state_dict()}


def expanded_output() -> dict[str, Any]:
    """An output that is expanded, one that is transposed, and one of zeros that need no gradient."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = _mlp()

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            scores = self.net(x)
            return {
                "wide": scores[:, :1].expand(-1, 3),
                "turned": scores.unsqueeze(2).expand(-1, -1, 2).transpose(1, 2),
                "zeros": torch.zeros_like(scores),
            }

    _, _, loader = _data()
    model = Odd()
    optimizer = _sgd(model)
    for inputs, labels in loader:
        optimizer.zero_grad()
        found = model(inputs)
        total = found["wide"] + found["turned"].sum(1) + found["zeros"]
        loss = F.cross_entropy(total, labels)
        loss.backward()
        optimizer.step()
        print(f"{loss.item():.10f}", [one.requires_grad for one in found.values()])
    return {"weights": model.state_dict()}


def zero_gradients() -> dict[str, Any]:
    """Functions of the program's own whose gradient is zero, absent, or lazily zero."""

    class Dead(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, kind: str) -> Tensor:
            ctx.kind = kind
            return x * 1.0

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None]:
            if ctx.kind == "lazy":
                return torch._efficientzerotensor(gradient.shape, dtype=gradient.dtype), None
            return (None if ctx.kind == "none" else torch.zeros_like(gradient)), None

    _, _, loader = _data()
    model, side = _mlp(), nn.Linear(6, 3)
    optimizer = torch.optim.SGD([*model.parameters(), *side.parameters()], lr=0.1)
    for kind in ("zeros", "lazy", "none"):
        for inputs, labels in loader:
            optimizer.zero_grad()
            scores = model(inputs) + Dead.apply(side(inputs), kind)
            F.cross_entropy(scores, labels).backward()
            optimizer.step()
        gradient = side.weight.grad
        print(kind, None if gradient is None else gradient.abs().sum().item())
    return {"weights": model.state_dict(), "side": side.state_dict()}


def lazy_layers() -> dict[str, Any]:
    """Layers that learn their sizes at the first call, in the middle of an epoch."""
    _, _, loader = _data()
    model = nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyBatchNorm1d(), nn.LazyLinear(3))
    model(torch.randn(4, 6))
    _epoch(model, loader, _sgd(model))
    _epoch(model, loader, _sgd(model))
    return {"weights": model.state_dict()}


def complex_numbers() -> dict[str, Any]:
    """Complex weights, a Fourier transform in the forward, magnitudes out."""

    class Spectrum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 3, dtype=torch.complex128))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            found = torch.fft.rfft(x) @ self.weight
            return found.abs(), found.conj()

    _, _, loader = _data()
    model = Spectrum()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for inputs, labels in loader:
        optimizer.zero_grad()
        scores, conjugate = model(inputs)
        (F.cross_entropy(scores, labels) + 0.01 * conjugate.imag.pow(2).mean()).backward()
        optimizer.step()
        print(f"{conjugate.real.sum().item():.10f}")
    return {"weights": model.state_dict()}


def saved_tensors_packed() -> dict[str, Any]:
    """Hooks that pack what autograd saves into halves of its size, and on disk-like lists."""
    _, _, loader = _data()
    model = _mlp()
    optimizer = _sgd(model)
    for inputs, labels in loader:
        optimizer.zero_grad()
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach().numpy().copy(), torch.from_numpy):
            loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        print(f"{loss.item():.10f}")
    return {"weights": model.state_dict()}


def retained_graph() -> dict[str, Any]:
    """A graph used twice, gradients of outputs kept by retain_grad and read, and inputs that need a gradient."""
    _, _, loader = _data()
    model = _mlp()
    optimizer = _sgd(model)
    for inputs, labels in loader:
        optimizer.zero_grad()
        inputs.requires_grad_()
        scores = model(inputs)
        scores.retain_grad()
        loss = F.cross_entropy(scores, labels)
        loss.backward(retain_graph=True)
        scores.pow(2).mean().backward()
        optimizer.step()
        print(f"{inputs.grad.abs().sum().item():.10f} {scores.grad.abs().sum().item():.10f}")
    return {"weights": model.state_dict()}


def inference_modes() -> dict[str, Any]:
    """Evaluations inside an epoch under inference_mode, no_grad and set_grad_enabled; train mode left on in one."""
    x, _, loader = _data()
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = _sgd(model)
    for inputs, labels in loader:
        model.eval()
        with torch.inference_mode():
            first = model(x).sum().item()
        with torch.no_grad():
            model.train()
            second = model(x).sum().item()
        with torch.set_grad_enabled(False):
            third = model(x[:11]).sum().item()
        print(f"{first:.10f} {second:.10f} {third:.10f}")
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    return {"weights": model.state_dict()}


def attention_weights() -> dict[str, Any]:
    """Multi-head attention with masks that say more than a row, and weights that are returned."""

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.out = nn.MultiheadAttention(6, 2, batch_first=True), nn.Linear(6, 3)

        def forward(self, x: Tensor, causal: Tensor, padded: Tensor) -> tuple[Tensor, Tensor]:
            found, weights = self.attention(x, x, x, attn_mask=causal, key_padding_mask=padded)
            return self.out(found[:, 0]), weights

    x = torch.randn(40, 8, 6)
    causal = torch.triu(torch.ones(8, 8, dtype=torch.bool), 1)
    model = Reader()
    optimizer = _sgd(model)
    for inputs, labels in DataLoader(TensorDataset(x, x[:, 0, :3].argmax(1)), batch_size=8):
        optimizer.zero_grad()
        padded = torch.zeros(len(inputs), 8, dtype=torch.bool)
        padded[:, 6:] = True
        scores, weights = model(inputs, causal, padded)  # the mask has as many rows as the batch
        (F.cross_entropy(scores, labels) + weights.pow(2).mean()).backward()
        optimizer.step()
        print(f"{weights[:, 0].std().item():.10f}")
    return {"weights": model.state_dict()}
