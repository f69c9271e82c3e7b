"""Loaders, samplers, collate functions, streams, windows, folds and augmentations."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import (
    BatchSampler,
    ChainDataset,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    StackDataset,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    random_split,
)


def _mlp(num_in: int = 6, num_out: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(num_in, 16), nn.Tanh(), nn.Linear(16, num_out))


def _data(num_samples: int = 27) -> TensorDataset:
    x = torch.randn(num_samples, 6)
    return TensorDataset(x, x[:, :3].argmax(1))


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor, labels: Tensor) -> float:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(inputs), labels)
    loss.backward()
    optimizer.step()
    return loss.item()


def _fit(model: nn.Module, loader: Any, epochs: int = 2) -> dict[str, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(epochs):
        losses = [_step(model, optimizer, *batch) for batch in loader]
        print(f"epoch {epoch}: {len(losses)} batches, {sum(losses):.10f}")
    return {"weights": model.state_dict()}


def weighted_sampler() -> dict[str, Any]:
    """Samples drawn by the inverse frequency of their class, and accuracy for each class."""
    data = _data()
    labels = data.tensors[1]
    weights = 1.0 / labels.bincount()[labels]
    model = _mlp()
    found = _fit(model, DataLoader(data, batch_size=8, sampler=WeightedRandomSampler(weights.tolist(), 50)))
    with torch.no_grad():
        hit = model(data.tensors[0]).argmax(1) == labels
    print([round(hit[labels == kind].double().mean().item(), 10) for kind in range(3)])
    return found


def curriculum() -> dict[str, Any]:
    """Easy samples first: a sampler whose part of the data grows with the epoch, ordered by losses measured before."""
    data = _data()
    model = _mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    class Growing(Sampler[int]):
        def __init__(self) -> None:
            self.order, self.share = list(range(len(data))), 0.3

        def __iter__(self) -> Iterator[int]:
            chosen = self.order[: len(self)]
            random.shuffle(chosen)
            return iter(chosen)

        def __len__(self) -> int:
            return int(self.share * len(self.order))

    sampler = Growing()
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    for _ in range(4):
        losses = [_step(model, optimizer, *batch) for batch in loader]
        with torch.no_grad():
            each = F.cross_entropy(model(data.tensors[0]), data.tensors[1], reduction="none")
        sampler.order = each.argsort().tolist()
        sampler.share = min(1.0, sampler.share + 0.25)
        print(len(losses), f"{sum(losses):.10f}", sampler.order[:5])
    return {"weights": model.state_dict()}


def hard_examples_again() -> dict[str, Any]:
    """The losses of the samples of an epoch are the weights of the sampler of the next."""

    class Numbered(Dataset[Any]):
        def __init__(self) -> None:
            self.held = _data()

        def __len__(self) -> int:
            return len(self.held)

        def __getitem__(self, index: int) -> Any:
            return (*self.held[index], index)

    data, losses = Numbered(), torch.ones(27)
    model = _mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        for inputs, labels, indices in DataLoader(data, 8, sampler=WeightedRandomSampler(losses.tolist(), 40)):
            each = F.cross_entropy(model(inputs), labels, reduction="none")
            losses[indices] = each.detach()
            optimizer.zero_grad()
            each.mean().backward()
            optimizer.step()
        print(f"{losses.sum().item():.10f} {losses.argmax().item()}")
    return {"weights": model.state_dict(), "losses": losses}


def balanced_batches() -> dict[str, Any]:
    """A batch sampler with as many samples of each class in each batch, drawn with numpy."""
    data = _data(60)
    labels = data.tensors[1].numpy()

    class Balanced(Sampler[list[int]]):
        def __iter__(self) -> Iterator[list[int]]:
            for _ in range(6):
                yield [int(i) for kind in range(3) for i in np.random.choice(np.flatnonzero(labels == kind), 3)]

        def __len__(self) -> int:
            return 6

    return _fit(_mlp(), DataLoader(data, batch_sampler=Balanced()))


def buckets_by_length() -> dict[str, Any]:
    """Sentences in buckets of like lengths, padded, packed and averaged; the sampler draws to tell its length."""
    sentences = [torch.randn(int(n), 6) for n in torch.randint(2, 12, (41,))]
    pairs = [(one, int(one[:, 0].mean() > 0)) for one in sentences]

    class Buckets(Sampler[list[int]]):
        def __iter__(self) -> Iterator[list[int]]:
            order = sorted(range(len(pairs)), key=lambda i: (len(pairs[i][0]), random.random()))
            batches = [order[i : i + 7] for i in range(0, len(order), 7)]
            random.shuffle(batches)
            return iter(batches)

        def __len__(self) -> int:
            return len(list(iter(self)))

    def padded(batch: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor, Tensor]:
        words, labels = zip(*batch, strict=True)
        return pad_sequence(list(words), batch_first=True), torch.tensor(list(map(len, words))), torch.tensor(labels)

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.out = nn.LSTM(6, 8, batch_first=True), nn.Linear(8, 2)

        def forward(self, words: Tensor, lengths: Tensor) -> Tensor:
            packed = pack_padded_sequence(words, lengths, batch_first=True, enforce_sorted=False)
            steps, lengths = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
            return self.out(steps.sum(1) / lengths[:, None])

    model = Reader()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        total = 0.0
        for words, lengths, labels in DataLoader(pairs, batch_sampler=Buckets(), collate_fn=padded):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(words, lengths), labels)
            loss.backward()
            optimizer.step()
            total += loss.item()
        print(f"{total:.10f}")
    return {"weights": model.state_dict()}


def stream() -> dict[str, Any]:
    """An iterable data set without a length, with a shuffle buffer of its own; islice ends an epoch."""
    from itertools import islice

    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            held: list[Any] = []
            for i in range(200):
                x = torch.sin(torch.arange(6) * (i + 1.0))
                held.append((x, x[:3].argmax()))
                if len(held) > 10:
                    yield held.pop(random.randrange(len(held)))

    model = _mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = iter(DataLoader(Stream(), batch_size=8))
    for epoch in range(3):
        losses = [_step(model, optimizer, *batch) for batch in islice(batches, 5)]
        print(epoch, f"{sum(losses):.10f}")
    return {"weights": model.state_dict()}


def shards_in_files() -> dict[str, Any]:
    """Shards written as files, read one after another by a stream that asks for its worker; two streams in a chain."""
    for shard in range(3):
        x = torch.randn(11, 6)
        torch.save((x, x[:, :3].argmax(1)), f"shard_{shard}.pt")

    class Shards(IterableDataset[Any]):
        def __init__(self, names: list[str]) -> None:
            self.names = names

        def __iter__(self) -> Iterator[Any]:
            info = torch.utils.data.get_worker_info()
            for name in self.names if info is None else self.names[info.id :: info.num_workers]:
                yield from zip(*torch.load(name), strict=True)

    both = ChainDataset([Shards(["shard_0.pt", "shard_1.pt"]), Shards(["shard_2.pt"])])
    return _fit(_mlp(), DataLoader(both, batch_size=8))


def augmented() -> dict[str, Any]:
    """Crops, flips and noise drawn by Python's, numpy's and torch's generators when a sample is fetched."""

    class Images(Dataset[Any]):
        def __init__(self) -> None:
            self.images = torch.randn(40, 1, 8, 8)

        def __len__(self) -> int:
            return 40

        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            image = self.images[index]
            top, left = random.randrange(3), np.random.randint(3)
            part = image[:, top : top + 6, left : left + 6]
            if torch.rand(()) < 0.5:
                part = part.flip(-1)
            return part + 0.1 * torch.randn_like(part), (image.mean() > 0).long()

    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2))
    return _fit(model, DataLoader(Images(), batch_size=8, shuffle=True))


def cut_and_mixed() -> dict[str, Any]:
    """CutMix and random erasing in the loop, labels blended; RandAugment-like choices by random.choices."""
    images = torch.randn(40, 1, 8, 8)
    labels = (images.mean((1, 2, 3)) > 0).long()
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    changes = [lambda x: x.flip(-1), lambda x: x.rot90(1, (-2, -1)), lambda x: x * 1.2]
    for inputs, targets in DataLoader(TensorDataset(images, labels), batch_size=9, shuffle=True):
        for change in random.choices(changes, k=2):
            inputs = change(inputs)
        partner, (top, left) = torch.randperm(len(inputs)), np.random.randint(0, 4, 2)
        inputs[:, :, top : top + 4, left : left + 4] = inputs[partner, :, top : top + 4, left : left + 4]
        scores = model(inputs)
        loss = 0.75 * F.cross_entropy(scores, targets) + 0.25 * F.cross_entropy(scores, targets[partner])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"{loss.item():.10f}")
    return {"weights": model.state_dict()}


def windows() -> dict[str, Any]:
    """Windows over one long series, normalised by the training part; a forecast by its own outputs."""
    series = torch.sin(torch.arange(80) / 5) + 0.1 * torch.randn(80)
    mean, spread = series[:60].mean(), series[:60].std()
    series = (series - mean) / spread
    windows = series.unfold(0, 9, 1)
    data = TensorDataset(windows[:, :8], windows[:, 8:])
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for inputs, wanted in DataLoader(Subset(data, range(52)), batch_size=8):
        optimizer.zero_grad()
        F.mse_loss(model(inputs), wanted).backward()
        optimizer.step()
    window = series[52:60].clone()
    forecast = []
    with torch.no_grad():
        for _ in range(10):
            following = model(window[None])[0]
            forecast.append((following * spread + mean).item())
            window = torch.cat([window[1:], following])
    print(" ".join(f"{one:.8f}" for one in forecast))
    return {"weights": model.state_dict(), "forecast": forecast}


def hidden_state_over_batches() -> dict[str, Any]:
    """Truncated backpropagation through time: the hidden state is detached and carried to the next window."""
    text = torch.randint(0, 10, (121,))
    streams = text[:120].view(6, 20)

    class Language(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.gru, self.out = nn.Embedding(10, 6), nn.GRU(6, 8, batch_first=True), nn.Linear(8, 10)

        def forward(self, words: Tensor, hidden: Tensor | None) -> tuple[Tensor, Tensor]:
            steps, hidden = self.gru(self.words(words), hidden)
            return self.out(steps), hidden

    model = Language()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for _ in range(2):
        hidden = None
        for start in range(0, 16, 4):
            scores, hidden = model(streams[:, start : start + 4], hidden)
            hidden = hidden.transpose(0, 1).contiguous().transpose(0, 1).detach()
            loss = F.cross_entropy(scores.flatten(0, 1), streams[:, start + 1 : start + 5].flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            optimizer.step()
            print(f"{loss.item():.10f} {hidden.norm().item():.10f}")
    return {"weights": model.state_dict()}


class Sample(NamedTuple):
    """A sample with a name."""

    inputs: Tensor
    label: Tensor
    name: str


def dicts_and_names() -> dict[str, Any]:
    """Batches as dicts of dicts, as named tuples with names, as a StackDataset; nothing that the model is given."""
    x = torch.randn(40, 6)
    named = [Sample(one, one[:3].argmax(), f"sample {i}") for i, one in enumerate(x)]
    stacked = StackDataset(inputs=x, deep=StackDataset(labels=x[:, :3].argmax(1), index=torch.arange(40)))
    model = _mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for one, other in zip(DataLoader(named, 8, shuffle=True), DataLoader(stacked, 8, shuffle=True), strict=True):
        first = _step(model, optimizer, one.inputs, one.label)
        second = _step(model, optimizer, other["inputs"], other["deep"]["labels"])
        print(one.name[0], other["deep"]["index"].tolist(), f"{first:.10f} {second:.10f}")
    return {"weights": model.state_dict()}


def collate_with_masks() -> dict[str, Any]:
    """A collate_fn that masks words at random, drops short samples, and gives a dict; a masked language model."""

    def collate(batch: list[Tensor]) -> dict[str, Tensor]:
        words = pad_sequence([one for one in batch if len(one) > 2], batch_first=True)
        hidden = (torch.rand(words.shape) < 0.3) & (words > 0)
        return {"words": words.masked_fill(hidden, 1), "wanted": words.masked_fill(~hidden, -100)}

    sentences = [torch.randint(2, 12, (int(n),)) for n in torch.randint(2, 9, (45,))]
    model = nn.Sequential(
        nn.Embedding(12, 8, padding_idx=0),
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True),
        nn.Linear(8, 12),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in DataLoader(sentences, 9, shuffle=True, collate_fn=collate):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch["words"]).transpose(1, 2), batch["wanted"])
        loss.backward()
        optimizer.step()
        print(f"{loss.item():.10f}", (batch["wanted"] >= 0).sum().item())
    return {"weights": model.state_dict()}


def splits_and_folds() -> dict[str, Any]:
    """random_split with a generator, a stratified fold by hand, ConcatDataset of parts, drop_last."""
    data = _data(61)
    train, test = random_split(data, [45, 16], generator=torch.Generator().manual_seed(3))
    found = _fit(
        _mlp(), DataLoader(ConcatDataset([train, Subset(data, test.indices[:4])]), 8, shuffle=True, drop_last=True)
    )
    labels, scores = data.tensors[1], []
    for fold in range(3):
        held = torch.cat([torch.where(labels == kind)[0][fold::3] for kind in range(3)])
        rest = sorted(set(range(61)) - set(held.tolist()))
        model = _mlp()
        _fit(model, DataLoader(Subset(data, rest), 8, shuffle=True), 1)
        with torch.no_grad():
            hits = [(model(x).argmax(1) == y).sum().item() for x, y in DataLoader(Subset(data, held.tolist()), 5)]
        scores.append(sum(hits) / len(held))
    print(f"{np.mean(scores):.10f} +- {np.std(scores):.10f}")
    return found | {"scores": scores}


def in_one_pass() -> dict[str, Any]:
    """Statistics of the data by a pass over the loader before training; a model that is given them as buffers."""
    loader = DataLoader(_data(), batch_size=8)
    total, squares, num = torch.zeros(6), torch.zeros(6), 0
    for inputs, _ in loader:
        total, squares, num = total + inputs.sum(0), squares + inputs.pow(2).sum(0), num + len(inputs)

    class Normalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", total / num)
            self.register_buffer("spread", (squares / num - (total / num) ** 2).sqrt())
            self.net = _mlp()

        def forward(self, x: Tensor) -> Tensor:
            return self.net((x - self.mean) / self.spread)

    return _fit(Normalised(), loader)


def no_loader_at_all() -> dict[str, Any]:
    """Indices shuffled by torch.randperm and cut by split; a second epoch shuffled by numpy."""
    x, y = _data().tensors
    model = _mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for part in torch.randperm(len(x)).split(8):
        print(f"{_step(model, optimizer, x[part], y[part]):.10f}")
    for rows in np.array_split(np.random.permutation(len(x)), 6):
        print(f"{_step(model, optimizer, x[rows], y[rows]):.10f}")
    return {"weights": model.state_dict()}


def loaders_in_turns() -> dict[str, Any]:
    """Labelled and unlabelled loaders of different lengths, cycled; pseudo-labels above a threshold."""
    from itertools import cycle

    labelled, unlabelled = DataLoader(_data(20), 4, shuffle=True), DataLoader(_data(27), 8, shuffle=True)
    model = _mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for (inputs, labels), (free, _) in zip(cycle(labelled), unlabelled, strict=False):
        with torch.no_grad():
            chance, guess = model(free).softmax(1).max(1)
        sure = chance > 0.4
        loss = F.cross_entropy(model(inputs), labels)
        if sure.any():
            loss = loss + 0.5 * F.cross_entropy(model(free[sure] + 0.1 * torch.randn_like(free[sure])), guess[sure])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(int(sure.sum()), f"{loss.item():.10f}")
    return {"weights": model.state_dict()}


def single_samples() -> dict[str, Any]:
    """batch_size=None, batches made by hand of single samples, and a loader whose batches hold one sample."""
    data = _data(24)
    model = _mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    held: list[Any] = []
    for sample in DataLoader(data, batch_size=None, shuffle=True):
        held.append(sample)
        if len(held) == 6:
            print(f"{_step(model, optimizer, *default_collate(held)):.10f}")
            held.clear()
    for inputs, labels in DataLoader(data, batch_size=1, shuffle=True):
        _step(model, optimizer, inputs, labels)
    batches = DataLoader(data, sampler=BatchSampler(range(24), 6, drop_last=False), batch_size=None)
    return _fit(model, batches, 1)


def negative_samples() -> dict[str, Any]:
    """A recommender: negatives drawn for each positive by the collate_fn, a BPR loss, hits among the best ten."""
    pairs = torch.stack([torch.randint(0, 15, (50,)), torch.randint(0, 30, (50,))], 1)

    def collate(batch: list[Tensor]) -> tuple[Tensor, Tensor]:
        return torch.stack(batch), torch.from_numpy(np.random.randint(0, 30, len(batch)))

    class Factors(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.users, self.items, self.bias = nn.Embedding(15, 4), nn.Embedding(30, 4), nn.Embedding(30, 1)

        def forward(self, users: Tensor, items: Tensor) -> Tensor:
            return (self.users(users) * self.items(items)).sum(1) + self.bias(items).squeeze(1)

    model = Factors()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    for _ in range(2):
        for positives, negatives in DataLoader(pairs, 8, shuffle=True, collate_fn=collate):
            users, items = positives.T
            loss = -F.logsigmoid(model(users, items) - model(users, negatives)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    with torch.no_grad():
        every = torch.arange(30)
        best = [model(torch.full((30,), user), every).topk(10).indices.tolist() for user in range(15)]
    hits = sum(item in best[user] for user, item in pairs.tolist())
    print(hits)
    return {"weights": model.state_dict(), "hits": hits}
