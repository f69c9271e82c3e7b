"""Models that generate, and models that learn without labels."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


def _loader(num_samples: int = 43, width: int = 6) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(num_samples, width)), batch_size=8, shuffle=True)


def _mlp(num_in: int, num_out: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(num_in, 16), nn.Tanh(), nn.Linear(16, num_out))


def _sgd(*modules: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD([one for module in modules for one in module.parameters()], lr=0.05, momentum=0.5)


def _minimise(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"{loss.item():.10f}")


def wasserstein_gan() -> dict[str, Any]:
    """A critic trained several times for each step of the generator, with a penalty on its gradient between samples."""
    generator, critic = _mlp(4, 6), _mlp(6, 1)
    steps = _sgd(generator), _sgd(critic)
    for i, (real,) in enumerate(_loader()):
        fake = generator(torch.randn(len(real), 4)).detach()
        share = torch.rand(len(real), 1)
        between = (share * real + (1 - share) * fake).requires_grad_()
        (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).pow(2).mean()
        _minimise(steps[1], critic(fake).mean() - critic(real).mean() + 10 * penalty)
        if i % 2:
            critic.requires_grad_(False)
            _minimise(steps[0], -critic(generator(torch.randn(len(real), 4))).mean())
            critic.requires_grad_(True)
    return {"weights": [generator.state_dict(), critic.state_dict()]}


def conditional_gan() -> dict[str, Any]:
    """Labels go into both networks as embeddings; real and fake samples in one call with BatchNorm; BCE."""

    class Conditional(nn.Module):
        def __init__(self, num_in: int, num_out: int) -> None:
            super().__init__()
            self.labels = nn.Embedding(3, 2)
            self.net = nn.Sequential(
                nn.Linear(num_in + 2, 8), nn.BatchNorm1d(8), nn.LeakyReLU(0.2), nn.Linear(8, num_out)
            )

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            return self.net(torch.cat([x, self.labels(labels)], 1))

    generator, judge = Conditional(4, 6), Conditional(6, 1)
    steps = _sgd(generator), _sgd(judge)
    for (real,) in _loader():
        labels = real[:, :3].argmax(1)
        fake = generator(torch.randn(len(real), 4), labels)
        both = judge(torch.cat([real, fake.detach()]), labels.repeat(2))
        truth = torch.cat([torch.full((len(real), 1), 0.9), torch.zeros(len(real), 1)])
        _minimise(steps[1], F.binary_cross_entropy_with_logits(both, truth))
        _minimise(steps[0], F.softplus(-judge(fake, labels)).mean())
    return {"weights": [generator.state_dict(), judge.state_dict()]}


def vector_quantised() -> dict[str, Any]:
    """VQ-VAE: a straight-through estimator, a commitment loss, and counts of the codes in use."""

    class Quantised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder, self.codes = _mlp(6, 4), _mlp(4, 6), nn.Embedding(8, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            found = self.encoder(x)
            chosen = torch.cdist(found, self.codes.weight).argmin(1)
            code = self.codes(chosen)
            return self.decoder(found + (code - found).detach()), found, code, chosen

    model, counts = Quantised(), torch.zeros(8, dtype=torch.long)
    optimizer = _sgd(model)
    for (x,) in _loader():
        out, found, code, chosen = model(x)
        counts += chosen.bincount(minlength=8)
        commitment = F.mse_loss(found.detach(), code) + 0.25 * F.mse_loss(found, code.detach())
        _minimise(optimizer, F.mse_loss(out, x) + commitment)
    print(counts.tolist())
    return {"weights": model.state_dict(), "counts": counts}


def normalising_flow() -> dict[str, Any]:
    """Coupling layers with a log-determinant; sampled by running them backwards; ActNorm sets itself up on data."""

    class Coupling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = _mlp(3, 6)
            self.register_buffer("is_ready", torch.tensor(False))
            self.scale, self.shift = nn.Parameter(torch.ones(6)), nn.Parameter(torch.zeros(6))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            if not self.is_ready:
                with torch.no_grad():
                    self.shift.copy_(-x.mean(0))
                    self.scale.copy_(1 / (x.std(0) + 1e-6))
                    self.is_ready.fill_(True)
            one, other = ((x + self.shift) * self.scale).chunk(2, 1)
            logs, moves = self.net(one).tanh().chunk(2, 1)
            return torch.cat([other * logs.exp() + moves, one], 1), logs.sum(1) + self.scale.abs().log().sum()

        def inverse(self, x: Tensor) -> Tensor:
            moved, one = x.chunk(2, 1)
            logs, moves = self.net(one).tanh().chunk(2, 1)
            return torch.cat([one, (moved - moves) * (-logs).exp()], 1) / self.scale - self.shift

    layers = nn.ModuleList([Coupling() for _ in range(3)])
    optimizer = _sgd(layers)
    for (x,) in _loader():
        total = torch.zeros(len(x))
        for layer in layers:
            x, part = layer(x)
            total = total + part
        prior = -0.5 * (x.pow(2) + math.log(2 * math.pi)).sum(1)
        _minimise(optimizer, -(prior + total).mean())
    with torch.no_grad():
        samples = torch.randn(5, 6)
        for layer in reversed(layers):
            samples = layer.inverse(samples)
    return {"weights": layers.state_dict(), "samples": samples}


def energy_based() -> dict[str, Any]:
    """Negatives by Langevin dynamics: gradients by the input in a loop, a replay buffer of samples."""
    model = _mlp(6, 1)
    optimizer = _sgd(model)
    buffer = torch.randn(32, 6)
    for (real,) in _loader():
        chosen = torch.randint(0, 32, (len(real),))
        fake = buffer[chosen].clone().requires_grad_()
        for _ in range(3):
            (slope,) = torch.autograd.grad(model(fake).sum(), fake)
            fake = (fake.detach() - 0.1 * slope + 0.01 * torch.randn_like(fake)).requires_grad_()
        buffer[chosen] = fake.detach()
        high, low = model(fake.detach()), model(real)
        _minimise(optimizer, (low - high).mean() + 0.1 * (low**2 + high**2).mean())
    return {"weights": model.state_dict(), "buffer": buffer}


def boltzmann_machine() -> dict[str, Any]:
    """A restricted Boltzmann machine: contrastive divergence with draws by torch.bernoulli, and without autograd."""

    class Machine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 4) * 0.1)
            self.hidden, self.visible = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(6))

        def forward(self, v: Tensor) -> tuple[Tensor, Tensor]:
            chance = torch.sigmoid(v @ self.weight + self.hidden)
            h = torch.bernoulli(chance)
            return chance, torch.bernoulli(torch.sigmoid(h @ self.weight.T + self.visible))

        def free_energy(self, v: Tensor) -> Tensor:
            return -(v @ self.visible) - F.softplus(v @ self.weight + self.hidden).sum(1)

    model = Machine()
    optimizer = _sgd(model)
    for (x,) in _loader():
        x = (x > 0).double()
        _, again = model(x)
        _minimise(optimizer, model.free_energy(x).mean() - model.free_energy(again.detach()).mean())
        with torch.no_grad():
            first, sampled = model(x)
            second, _ = model(sampled)
            model.weight += 0.01 * (x.T @ first - sampled.T @ second) / len(x)
    return {"weights": model.state_dict()}


def tied_autoencoder() -> dict[str, Any]:
    """A denoising autoencoder whose decoder is the encoder's weight transposed; sparsity by a KL over the batch."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(6, 4) * 0.3), nn.Parameter(torch.zeros(6))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            code = torch.sigmoid(x @ self.weight)
            return F.linear(code, self.weight, self.bias), code

    model = Tied()
    optimizer = _sgd(model)
    for (x,) in _loader():
        out, code = model(x * (torch.rand_like(x) > 0.2) + 0.1 * torch.randn_like(x))
        mean = code.mean(0)
        sparsity = (0.2 * (0.2 / mean).log() + 0.8 * (0.8 / (1 - mean)).log()).sum()
        _minimise(optimizer, F.mse_loss(out, x) + 0.1 * sparsity)
    return {"weights": model.state_dict()}


def annealed_variational() -> dict[str, Any]:
    """A conditional VAE with Normal.rsample, KL of torch.distributions, its weight annealed; chunked outputs."""
    from torch.distributions import Normal, kl_divergence

    class Variational(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = _mlp(6, 4), _mlp(2, 6)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            mean, logs = self.encoder(x).chunk(2, 1)
            return self.decoder(Normal(mean, logs.exp()).rsample()), mean, logs

    model = Variational()
    optimizer = _sgd(model)
    for step, (x,) in enumerate(_loader()):
        out, mean, logs = model(x)
        divergence = kl_divergence(Normal(mean, logs.exp()), Normal(0.0, 1.0)).sum(1).mean()
        logs.data.clamp_(-5, 5)
        _minimise(optimizer, F.mse_loss(out, x, reduction="sum") / len(x) + min(1.0, step / 4) * divergence)
    return {"weights": model.state_dict(), "sample": model.decoder(torch.randn(3, 2)).detach()}


def diffusion() -> dict[str, Any]:
    """Noise by a cosine schedule, times embedded by sines, guidance by dropping labels, an average that samples."""
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    class Denoiser(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.labels, self.net = nn.Embedding(4, 3), _mlp(13, 6)

        def forward(self, x: Tensor, time: Tensor, labels: Tensor) -> Tensor:
            angles = time[:, None] * torch.tensor([1.0, 4.0])
            return self.net(torch.cat([x, angles.sin(), angles.cos(), self.labels(labels)], 1))

    model = Denoiser()
    optimizer, average = _sgd(model), AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8))
    for (x,) in _loader():
        labels = x[:, :3].argmax(1).masked_fill(torch.rand(len(x)) < 0.2, 3)
        time, noise = torch.rand(len(x)), torch.randn_like(x)
        keep = torch.cos(time * math.pi / 2)[:, None]
        _minimise(optimizer, F.mse_loss(model(keep * x + (1 - keep**2).sqrt() * noise, time, labels), noise))
        average.update_parameters(model)
    x, labels = torch.randn(6, 6), torch.tensor([0, 1, 2, 0, 1, 2])
    with torch.no_grad():
        for step in range(5, 0, -1):
            time = torch.full((6,), step / 6)
            free, guided = average(torch.cat([x, x]), time.repeat(2), torch.cat([labels * 0 + 3, labels])).chunk(2)
            x = x - 0.2 * (free + 2 * (guided - free)) + 0.05 * torch.randn_like(x)
    return {"weights": average.state_dict(), "samples": x}


def bootstrapped() -> dict[str, Any]:
    """BYOL: a predictor on an online network, a target that follows it, two views, stopped gradients."""
    import copy

    online, predictor = nn.Sequential(_mlp(6, 8), nn.BatchNorm1d(8)), _mlp(8, 8)
    target = copy.deepcopy(online).requires_grad_(False)
    optimizer = _sgd(online, predictor)
    for (x,) in _loader(45):
        views = x + 0.1 * torch.randn_like(x), x * (torch.rand_like(x) > 0.1)
        loss = sum(
            2 - 2 * F.cosine_similarity(predictor(online(one)), target(other), dim=1).mean()
            for one, other in (views, views[::-1])
        )
        _minimise(optimizer, loss)
        with torch.no_grad():
            for mine, theirs in zip(target.parameters(), online.parameters(), strict=True):
                mine.mul_(0.9).add_(theirs, alpha=0.1)
    return {"weights": [one.state_dict() for one in (online, predictor, target)]}


def memory_bank() -> dict[str, Any]:
    """MoCo: a momentum encoder and a queue in a buffer of the model, advanced by a pointer in every forward."""

    class Contrast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key = _mlp(6, 4), _mlp(6, 4)
            self.key.load_state_dict(self.query.state_dict())
            self.key.requires_grad_(False)
            self.register_buffer("queue", F.normalize(torch.randn(4, 24), dim=0))
            self.place = 0

        def forward(self, one: Tensor, other: Tensor) -> Tensor:
            query = F.normalize(self.query(one))
            with torch.no_grad():
                for mine, theirs in zip(self.key.parameters(), self.query.parameters(), strict=True):
                    mine.lerp_(theirs, 0.05)
                key = F.normalize(self.key(other))
            scores = torch.cat([(query * key).sum(1, keepdim=True), query @ self.queue.clone()], 1) / 0.2
            end = min(24, self.place + len(key))
            self.queue[:, self.place : end] = key[: end - self.place].T
            self.place = end % 24
            return scores

    model = Contrast()
    optimizer = torch.optim.SGD(model.query.parameters(), lr=0.1)
    for (x,) in _loader():
        scores = model(x + 0.1 * torch.randn_like(x), x)
        _minimise(optimizer, F.cross_entropy(scores, torch.zeros(len(x), dtype=torch.long)))
    return {"weights": model.state_dict(), "place": model.place}


def simple_contrast() -> dict[str, Any]:
    """SimCLR over both views in one call; Barlow Twins' correlations; DINO's center, kept outside of modules."""
    model = _mlp(6, 8)
    optimizer, center = _sgd(model), torch.zeros(8)
    for (x,) in _loader(48):
        one, other = model(torch.cat([x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x)])).chunk(2)
        both = F.normalize(torch.cat([one, other]))
        scores = (both @ both.T / 0.5).fill_diagonal_(-1e9)
        twins = torch.arange(len(both)).roll(len(x))
        correlation = (
            F.batch_norm(one, None, None, training=True).T @ F.batch_norm(other, None, None, training=True)
        ) / len(x)
        barlow = (correlation.diagonal() - 1).pow(2).sum() + 0.01 * correlation.pow(2).sum()
        dino = -(((other.detach() - center) / 0.1).softmax(1) * one.log_softmax(1)).sum(1).mean()
        _minimise(optimizer, F.cross_entropy(scores, twins) + 0.1 * barlow + 0.1 * dino)
        center = 0.9 * center + 0.1 * other.detach().mean(0)
    return {"weights": model.state_dict(), "center": center}


def masked_patches() -> dict[str, Any]:
    """A masked autoencoder: patches shuffled and dropped inside the forward, decoded with a mask token."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patch, self.out = nn.Linear(4, 8), nn.Linear(8, 4)
            self.places, self.token = nn.Parameter(torch.randn(6, 8) * 0.1), nn.Parameter(torch.zeros(8))
            self.body = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

        def forward(self, patches: Tensor) -> tuple[Tensor, Tensor]:
            order = torch.rand(patches.shape[:2]).argsort(1)
            kept = order[:, :3, None].expand(-1, -1, 8)
            found = self.body((self.patch(patches) + self.places).gather(1, kept))
            full = self.token.expand(len(patches), 6, 8).scatter(1, kept, found)
            mask = torch.ones(patches.shape[:2]).scatter(1, order[:, :3], 0.0)
            return self.out(full + self.places), mask

    model = Masked()
    optimizer = _sgd(model)
    for (x,) in _loader(43, 24):
        patches = x.view(len(x), 6, 4)
        out, mask = model(patches)
        _minimise(optimizer, ((out - patches).pow(2).mean(2) * mask).sum() / mask.sum())
    return {"weights": model.state_dict()}


def self_organising() -> dict[str, Any]:
    """A self-organising map, k-means and principal components: no gradients, updates in place under no_grad."""
    map_, places = torch.randn(9, 6), torch.cartesian_prod(torch.arange(3.0), torch.arange(3.0))
    centers = torch.randn(3, 6)
    module = nn.Linear(6, 9, bias=False)
    for step, (x,) in enumerate(_loader()):
        with torch.no_grad():
            module.weight.copy_(map_)
            winners = (module(x) - 0.5 * map_.pow(2).sum(1)).argmax(1)
            near = torch.exp(-torch.cdist(places[winners], places).pow(2))
            map_ += 0.5 / (1 + step) * (near.T @ x - near.sum(0)[:, None] * map_) / len(x)
            nearest = torch.cdist(x, centers).argmin(1)
            for kind in nearest.unique():
                centers[kind] = 0.5 * centers[kind] + 0.5 * x[nearest == kind].mean(0)
        print(winners.tolist(), f"{torch.linalg.svdvals(x).sum().item():.10f}")
    return {"map": map_, "centers": centers}


def language_sampled() -> dict[str, Any]:
    """A causal transformer with tied embeddings; samples by temperature, top-k and nucleus; a beam search."""

    class Language(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.places = nn.Embedding(12, 8), nn.Parameter(torch.randn(10, 8) * 0.1)
            self.body = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 1)
            self.out = nn.Linear(8, 12, bias=False)
            self.out.weight = self.words.weight

        def forward(self, words: Tensor) -> Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(words.shape[1])
            return self.out(self.body(self.words(words) + self.places[: words.shape[1]], mask, is_causal=True))

    text = torch.randint(0, 12, (30, 9))
    model = Language()
    optimizer = _sgd(model)
    for (words,) in DataLoader(TensorDataset(text), batch_size=7):
        _minimise(optimizer, F.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten()))
    model.eval()
    words = text[:5, :2]
    with torch.no_grad():
        for _ in range(5):
            scores = model(words)[:, -1] / 0.8
            best = scores.topk(6).values[:, -1:]
            chances = scores.masked_fill(scores < best, -math.inf).softmax(1)
            ordered, order = chances.sort(1, descending=True)
            ordered[ordered.cumsum(1) - ordered > 0.9] = 0.0
            words = torch.cat([words, order.gather(1, torch.multinomial(ordered, 1))], 1)
        beams = [(0.0, text[0, :1])]
        for _ in range(4):
            logs = model(torch.stack([one for _, one in beams]))[:, -1].log_softmax(1)
            longer = [
                (total + logs[i, w].item(), torch.cat([one, torch.tensor([w])]))
                for i, (total, one) in enumerate(beams)
                for w in range(12)
            ]
            beams = sorted(longer, key=lambda pair: -pair[0])[:3]
    print(words.tolist(), [one.tolist() for _, one in beams])
    return {"weights": model.state_dict(), "scores": [total for total, _ in beams]}
