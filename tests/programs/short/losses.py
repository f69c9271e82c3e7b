"""Losses that people write themselves, and losses of torch's in unusual shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

Criterion = Callable[[Tensor, Tensor], Tensor]


def _mlp(num_out: int, num_in: int = 6) -> nn.Sequential:
    return nn.Sequential(nn.Linear(num_in, 16), nn.Tanh(), nn.Linear(16, num_out))


def _fit(model: nn.Module, x: Tensor, y: Tensor, criterion: Criterion, *more: nn.Parameter) -> dict[str, Any]:
    """Train for two epochs in batches of 8, and print each epoch's loss."""
    loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
    optimizer = torch.optim.SGD([*model.parameters(), *more], lr=0.05, momentum=0.9)
    history = []
    for epoch in range(2):
        total = 0.0
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = criterion(model(inputs), targets)
            loss.backward()
            optimizer.step()
            total += loss.item()
        history.append(total / len(loader))
        print(f"epoch {epoch}: {history[-1]:.10f}")
    return {"weights": model.state_dict(), "history": history, "more": [one.detach() for one in more]}


def _classes(num_classes: int = 3, num_samples: int = 27) -> tuple[Tensor, Tensor]:
    x = torch.randn(num_samples, 6)
    return x, x[:, :num_classes].argmax(1)


def focal() -> dict[str, Any]:
    """Focal loss, with a weight for each class."""

    def criterion(scores: Tensor, labels: Tensor) -> Tensor:
        cross = F.cross_entropy(scores, labels, reduction="none")
        alpha = torch.tensor([0.2, 0.3, 0.5])[labels]
        return (alpha * (1 - torch.exp(-cross)) ** 2 * cross).mean()

    return _fit(_mlp(3), *_classes(), criterion)


def class_balanced() -> dict[str, Any]:
    """Weights by the effective number of samples of each class of the batch."""

    def criterion(scores: Tensor, labels: Tensor) -> Tensor:
        counts = labels.bincount(minlength=3).clamp_min(1)
        weights = 0.1 / (1 - 0.9**counts)
        return F.cross_entropy(scores, labels, weight=weights / weights.sum() * 3)

    return _fit(_mlp(3), *_classes(), criterion)


def smoothed() -> dict[str, Any]:
    """Label smoothing, class weights and ignored labels at once."""
    x, y = _classes()
    y[::7] = -100
    criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5]), ignore_index=-100, label_smoothing=0.1)
    return _fit(_mlp(3), x, y, criterion)


def soft_targets() -> dict[str, Any]:
    """Cross entropy against probabilities."""
    x, y = _classes()
    return _fit(_mlp(3), x, F.one_hot(y, 3).double() * 0.8 + 0.2 / 3, nn.CrossEntropyLoss())


def top_k_hardest() -> dict[str, Any]:
    """The mean over the hardest half of the batch, as torch orders it."""

    def criterion(scores: Tensor, labels: Tensor) -> Tensor:
        losses = nn.CrossEntropyLoss(reduction="none")(scores, labels)
        return losses.topk(max(1, len(losses) // 2)).values.mean()

    return _fit(_mlp(3), *_classes(), criterion)


def triplet() -> dict[str, Any]:
    """Triplets with the hardest positive and negative of the batch."""

    def criterion(embedded: Tensor, labels: Tensor) -> Tensor:
        distances = torch.cdist(embedded, embedded)
        same = labels[:, None] == labels
        hardest = distances.masked_fill(~same, 0.0).amax(1)
        nearest = distances.masked_fill(same, 1e6).amin(1)
        return F.relu(hardest - nearest + 0.5).mean()

    return _fit(_mlp(4), *_classes(), criterion)


def triplet_of_torch() -> dict[str, Any]:
    """torch's triplet loss; anchor, positive and negative go through one network in three calls."""
    x, y = torch.randn(40, 3, 6), torch.zeros(40)
    model = _mlp(4)
    loss = nn.TripletMarginWithDistanceLoss(distance_function=lambda a, b: 1 - F.cosine_similarity(a, b), margin=0.3)
    return _fit(
        nn.Identity(),
        x,
        y,
        lambda triplets, _: loss(model(triplets[:, 0]), model(triplets[:, 1]), model(triplets[:, 2])),
        *model.parameters(),
    )


def contrastive_pairs() -> dict[str, Any]:
    """Siamese: both samples of a pair concatenated into one call; a margin loss over the halves of its output."""
    x = torch.randn(40, 2, 6)
    y = (x[:, 0, 0] * x[:, 1, 0] > 0).double()
    model = _mlp(4)

    def criterion(pairs: Tensor, same: Tensor) -> Tensor:
        left, right = model(torch.cat([pairs[:, 0], pairs[:, 1]])).chunk(2)
        distance = F.pairwise_distance(left, right)
        return (same * distance**2 + (1 - same) * F.relu(1 - distance) ** 2).mean()

    return _fit(nn.Identity(), x, y, criterion, *model.parameters())


def cosine_embedding() -> dict[str, Any]:
    """torch's CosineEmbeddingLoss between outputs of two networks."""
    x = torch.randn(40, 12)
    one, other = _mlp(4), _mlp(4)
    y = torch.where(x[:, 0] > 0, 1.0, -1.0)
    return _fit(
        nn.Identity(),
        x,
        y,
        lambda both, same: F.cosine_embedding_loss(one(both[:, :6]), other(both[:, 6:]), same, margin=0.2),
        *one.parameters(),
        *other.parameters(),
    )


def ranking() -> dict[str, Any]:
    """Learning to rank: all pairs of the batch, by RankNet, and a ListNet over the whole list."""

    def criterion(scores: Tensor, relevance: Tensor) -> Tensor:
        scores = scores.squeeze(1)
        better = relevance[:, None] > relevance
        pairs = F.softplus(-(scores[:, None] - scores))[better].mean()
        return pairs - (relevance.softmax(0) * scores.log_softmax(0)).sum()

    x = torch.randn(27, 6)
    return _fit(_mlp(1), x, x[:, 0] + 0.1 * torch.randn(27), criterion)


def margin_ranking() -> dict[str, Any]:
    """torch's MarginRankingLoss between the batch and the batch in reverse."""

    def criterion(scores: Tensor, relevance: Tensor) -> Tensor:
        sign = torch.sign(relevance - relevance.flip(0))
        return F.margin_ranking_loss(scores.squeeze(1), scores.squeeze(1).flip(0), sign, margin=0.1)

    x = torch.randn(27, 6)
    return _fit(_mlp(1), x, x[:, 0], criterion)


def survival() -> dict[str, Any]:
    """Cox's partial likelihood: each death against all who were alive then."""

    def criterion(risk: Tensor, both: Tensor) -> Tensor:
        time, died = both.unbind(1)
        order = time.argsort(descending=True)
        risk, died = risk.squeeze(1)[order], died[order]
        return -((risk - risk.logcumsumexp(0)) * died).sum() / died.sum().clamp_min(1)

    x = torch.randn(27, 6)
    time = torch.rand(27) * torch.exp(-x[:, 0])
    return _fit(_mlp(1), x, torch.stack([time, (torch.rand(27) > 0.3).double()], 1), criterion)


def quantiles() -> dict[str, Any]:
    """Three quantiles by the pinball loss."""
    levels = torch.tensor([0.1, 0.5, 0.9])

    def criterion(found: Tensor, wanted: Tensor) -> Tensor:
        error = wanted[:, None] - found
        return torch.maximum(levels * error, (levels - 1) * error).mean(0).sum()

    x = torch.randn(27, 6)
    return _fit(_mlp(3), x, x[:, 0].sin(), criterion)


def mixture_density() -> dict[str, Any]:
    """A mixture of Gaussians, by torch.distributions."""
    from torch.distributions import Categorical, MixtureSameFamily, Normal

    def criterion(found: Tensor, wanted: Tensor) -> Tensor:
        weights, means, logs = found.chunk(3, 1)
        return -MixtureSameFamily(Categorical(logits=weights), Normal(means, logs.exp())).log_prob(wanted).mean()

    x = torch.randn(27, 6)
    return _fit(_mlp(9), x, x[:, 0].sin() + (x[:, 1] > 0) * 2.0, criterion)


def counts_and_variances() -> dict[str, Any]:
    """Poisson and Gaussian likelihoods of torch on parts of one output."""

    def criterion(found: Tensor, wanted: Tensor) -> Tensor:
        poisson = F.poisson_nll_loss(found[:, 0], wanted[:, 0], full=True)
        return poisson + F.gaussian_nll_loss(found[:, 1], wanted[:, 1], F.softplus(found[:, 2]))

    x = torch.randn(27, 6)
    return _fit(_mlp(3), x, torch.stack([x[:, 0].abs().round(), x[:, 1].cos()], 1), criterion)


def uncertainty_weights() -> dict[str, Any]:
    """Two tasks whose losses are weighted by trained uncertainties outside any module."""
    logs = nn.Parameter(torch.zeros(2))

    def criterion(found: Tensor, wanted: Tensor) -> Tensor:
        losses = torch.stack([F.mse_loss(found[:, 0], wanted[:, 0]), F.l1_loss(found[:, 1], wanted[:, 1])])
        return (losses * torch.exp(-logs) + logs).sum()

    x = torch.randn(27, 6)
    return _fit(_mlp(2), x, torch.stack([x[:, 0].sin(), x[:, 1] * 3], 1), criterion, logs)


def dice() -> dict[str, Any]:
    """A small U-Net with skip connections; Dice over the batch, plus BCE, plus IoU of the last batch."""

    class UNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
            self.deep = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(4, 8, 3, padding=1), nn.ReLU())
            self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
            self.out = nn.Conv2d(8, 1, 1)

        def forward(self, images: Tensor) -> Tensor:
            skipped = self.down(images)
            return self.out(torch.cat([skipped, self.up(self.deep(skipped))], 1))

    def criterion(scores: Tensor, masks: Tensor) -> Tensor:
        found = scores.sigmoid()
        overlap = 2 * (found * masks).sum() + 1
        return F.binary_cross_entropy_with_logits(scores, masks) + 1 - overlap / (found.sum() + masks.sum() + 1)

    images = torch.randn(26, 1, 8, 8)
    model = UNet()
    found = _fit(model, images, (F.avg_pool2d(images, 3, 1, 1) > 0).double(), criterion)
    model.eval()
    with torch.no_grad():
        masks = model(images) > 0
    print("intersection over union", (masks & (images > 0)).sum().item() / (masks | (images > 0)).sum().item())
    return found


def tversky_per_sample() -> dict[str, Any]:
    """Tversky per sample with positive weights, over flattened outputs."""

    def criterion(scores: Tensor, masks: Tensor) -> Tensor:
        found, masks = scores.sigmoid().flatten(1), masks.flatten(1)
        hit, extra, missed = (found * masks).sum(1), (found * (1 - masks)).sum(1), ((1 - found) * masks).sum(1)
        tversky = 1 - (hit + 1) / (hit + 0.3 * extra + 0.7 * missed + 1)
        return tversky.pow(0.75).mean() + F.binary_cross_entropy_with_logits(
            scores.flatten(1), masks, pos_weight=torch.tensor(2.0)
        )

    images = torch.randn(26, 1, 6, 6)
    return _fit(nn.Conv2d(1, 1, 3, padding=1), images, (images > 0.5).double(), criterion)


def masked_mean() -> dict[str, Any]:
    """A recurrent tagger; the mean of the losses of steps that a mask keeps, selected by the mask."""
    lengths = torch.randint(1, 7, (40,))
    mask = torch.arange(6) < lengths[:, None]
    x = torch.randn(40, 6, 6)

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru, self.out = nn.GRU(6, 8, batch_first=True, bidirectional=True), nn.Linear(16, 3)

        def forward(self, steps: Tensor) -> Tensor:
            return self.out(self.gru(steps)[0])

    def criterion(scores: Tensor, both: Tensor) -> Tensor:
        kept, labels = both[..., 0].bool(), both[..., 1]
        return F.cross_entropy(scores[kept], labels[kept])

    return _fit(Tagger(), x, torch.stack([mask.long(), x[..., :3].argmax(-1)], -1), criterion)


def ctc() -> dict[str, Any]:
    """CTC over lengths of their own, decoded greedily in the end."""
    lengths = torch.randint(3, 6, (30,))
    x, words = torch.randn(30, 12, 6), torch.randint(1, 5, (30, 5))
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 5), nn.LogSoftmax(-1))

    def criterion(scores: Tensor, both: Tensor) -> Tensor:
        steps = torch.full((len(scores),), 12)
        return F.ctc_loss(scores.transpose(0, 1), both[:, 1:], steps, both[:, 0], zero_infinity=True)

    found = _fit(model, x, torch.cat([lengths[:, None], words], 1), criterion)
    with torch.no_grad():
        best = model(x[:4]).argmax(-1)
    decoded = [[i for i in line.unique_consecutive().tolist() if i] for line in best]
    print(decoded)
    return found | {"decoded": decoded}


def hinges() -> dict[str, Any]:
    """Multi-margin, multi-label and hinge losses added up; a reduction that is a sum, divided by hand."""

    def criterion(scores: Tensor, labels: Tensor) -> Tensor:
        many = F.one_hot(labels, 3).double()
        hinge = F.relu(1 - scores * (2 * many - 1)).sum() / scores.numel()
        return (
            F.multi_margin_loss(scores, labels, reduction="sum") / len(labels)
            + F.multilabel_soft_margin_loss(scores, many)
            + hinge
        )

    return _fit(_mlp(3), *_classes(), criterion)


def center_loss() -> dict[str, Any]:
    """Centers of classes are parameters outside the model, pulled to the features by a second term."""
    centers = nn.Parameter(torch.randn(3, 4))

    def criterion(features: Tensor, labels: Tensor) -> Tensor:
        scores = -torch.cdist(features, centers)
        return F.cross_entropy(scores, labels) + 0.1 * (features - centers[labels]).pow(2).sum(1).mean()

    return _fit(_mlp(4), *_classes(), criterion, centers)


def arc_face() -> dict[str, Any]:
    """Angles with a margin on the right class; normalised weights outside any module."""
    weights = nn.Parameter(torch.randn(3, 4))

    def criterion(features: Tensor, labels: Tensor) -> Tensor:
        cosines = F.linear(F.normalize(features), F.normalize(weights)).clamp(-0.999, 0.999)
        margin = torch.zeros_like(cosines).scatter_(1, labels[:, None], 0.2)
        return F.cross_entropy(8 * torch.cos(torch.acos(cosines) + margin), labels)

    return _fit(_mlp(4), *_classes(), criterion, weights)


def distances_of_distributions() -> dict[str, Any]:
    """A kernel two-sample distance (MMD) and a correlation (CORAL) between halves of each batch."""

    def criterion(features: Tensor, wanted: Tensor) -> Tensor:
        half = len(features) // 2
        one, other = features[:half], features[half:]

        def kernel(a: Tensor, b: Tensor) -> Tensor:
            return torch.exp(-torch.cdist(a, b).pow(2) / 2).mean()

        mmd = kernel(one, one) + kernel(other, other) - 2 * kernel(one, other)
        coral = (torch.cov(one.T) - torch.cov(other.T)).pow(2).sum()
        return F.smooth_l1_loss(features.mean(1), wanted) + mmd + coral

    x = torch.randn(48, 6)
    return _fit(_mlp(4), x, x[:, 0], criterion)


def perceptual() -> dict[str, Any]:
    """Features of a frozen network, of the output and of the target; total variation besides."""
    frozen = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3)).requires_grad_(False).eval()

    def criterion(found: Tensor, wanted: Tensor) -> Tensor:
        variation = (found[..., 1:] - found[..., :-1]).abs().mean() + (
            found[..., 1:, :] - found[..., :-1, :]
        ).abs().mean()
        return F.mse_loss(frozen(found), frozen(wanted)) + 0.01 * variation

    images = torch.randn(26, 1, 6, 6)
    return _fit(nn.Conv2d(1, 1, 3, padding=1), images, images.roll(1, -1), criterion)


def correlation() -> dict[str, Any]:
    """One minus the correlation over the batch, and the explained variance printed by hand."""

    def criterion(found: Tensor, wanted: Tensor) -> Tensor:
        both = torch.stack([found.squeeze(1), wanted])
        print(f"variance {(wanted - found.squeeze(1)).var().item():.8f}")
        return 1 - torch.corrcoef(both)[0, 1]

    x = torch.randn(40, 6)
    return _fit(_mlp(1), x, x[:, 0].sin(), criterion)


def sinkhorn() -> dict[str, Any]:
    """Optimal transport between the outputs and the targets of a batch, by Sinkhorn's iteration."""

    def criterion(found: Tensor, wanted: Tensor) -> Tensor:
        cost = torch.cdist(found, wanted).pow(2)
        rows, columns = torch.zeros(len(cost)), torch.zeros(len(cost))
        for _ in range(5):
            rows = -torch.logsumexp(columns - cost, 1)
            columns = -torch.logsumexp(rows[:, None] - cost, 0)
        return (torch.exp(rows[:, None] + columns - cost) * cost).sum()

    x = torch.randn(27, 6)
    return _fit(_mlp(2), x, x[:, :2].cos(), criterion)


def evidential() -> dict[str, Any]:
    """Evidence for classes as a Dirichlet distribution, with a KL that is annealed by a count of calls."""
    calls = 0

    def criterion(scores: Tensor, labels: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        alpha = F.softplus(scores) + 1
        total = alpha.sum(1, keepdim=True)
        wanted = F.one_hot(labels, 3)
        fit = ((wanted - alpha / total) ** 2 + alpha * (total - alpha) / (total**2 * (total + 1))).sum(1)
        other = wanted + (1 - wanted) * alpha
        dirichlet, flat = torch.distributions.Dirichlet(other), torch.distributions.Dirichlet(torch.ones(3))
        return (fit + min(1.0, calls / 10) * torch.distributions.kl_divergence(dirichlet, flat)).mean()

    return _fit(_mlp(3), *_classes(), criterion)
