"""Histories, metrics, logs and checkpoints, written, read back and printed."""

from __future__ import annotations

import csv
import io
import json
import logging
import os
import pickle
import shutil
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


def _data(num_samples: int = 27) -> tuple[Tensor, Tensor, DataLoader[Any]]:
    x = torch.randn(num_samples, 6)
    y = x[:, :3].argmax(1)
    return x, y, DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)


def _mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 3))


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor, labels: Tensor) -> tuple[float, int]:
    optimizer.zero_grad()
    scores = model(inputs)
    loss = F.cross_entropy(scores, labels)
    loss.backward()
    optimizer.step()
    return loss.item(), int((scores.argmax(1) == labels).sum())


def history_as_a_frame() -> dict[str, Any]:
    """The history of losses and accuracies as a DataFrame: printed, summarised, written as CSV, returned."""
    import pandas as pd

    x, y, loader = _data()
    model = _mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = []
    for epoch in range(3):
        model.train()
        found = [_step(model, optimizer, *batch) for batch in loader]
        model.eval()
        with torch.no_grad():
            held = F.cross_entropy(model(x), y).item()
        loss, hits = map(sum, zip(*found, strict=True))
        rows.append({"epoch": epoch, "loss": loss / len(found), "accuracy": hits / len(x), "held out": held})
    frame = pd.DataFrame(rows).set_index("epoch")
    frame.round(8).to_csv("history.csv")
    print(frame.round(8).to_string())
    print(frame["held out"].idxmin(), pd.read_csv("history.csv").shape)
    return {"weights": model.state_dict(), "frame": frame.to_dict("list"), "last": frame.iloc[-1].to_dict()}


def metrics_of_all_batches() -> dict[str, Any]:
    """Predictions of all batches gathered; a confusion matrix, F1, the area under a curve, the worst samples."""
    x, y, loader = _data(60)
    model = _mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in loader:
        _step(model, optimizer, *batch)
    model.eval()
    scores, labels = [], []
    with torch.no_grad():
        for inputs, targets in DataLoader(TensorDataset(x, y), batch_size=7):
            scores.append(model(inputs).softmax(1).numpy())
            labels.extend(targets.tolist())
    chances, truth = np.concatenate(scores), np.array(labels)
    confusion = np.zeros((3, 3), dtype=int)
    np.add.at(confusion, (truth, chances.argmax(1)), 1)
    precision = confusion.diagonal() / confusion.sum(0).clip(1)
    recall = confusion.diagonal() / confusion.sum(1).clip(1)
    order = chances[:, 0].argsort()
    ranks = np.empty(60)
    ranks[order] = np.arange(1, 61)
    positive = truth == 0
    area = (ranks[positive].sum() - positive.sum() * (positive.sum() + 1) / 2) / (positive.sum() * (~positive).sum())
    worst = chances[np.arange(60), truth].argsort()[:5].tolist()
    print(
        confusion.tolist(),
        np.round(2 * precision * recall / (precision + recall + 1e-9), 9).tolist(),
        round(area, 9),
        worst,
    )
    return {"confusion": confusion, "worst": worst, "counts": dict(Counter(labels))}


def logged() -> dict[str, Any]:
    """The logging module with a file and a format, JSON lines, a CSV by DictWriter, a progress bar into a text."""
    from tqdm import tqdm

    _, _, loader = _data()
    model = _mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    logger = logging.getLogger("training")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    handler = logging.FileHandler("train.log")
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    logger.addHandler(handler)
    bar: io.StringIO = io.StringIO()
    with open("steps.jsonl", "w") as lines, open("steps.csv", "w", newline="") as table:
        writer = csv.DictWriter(table, ["step", "loss"])
        writer.writeheader()
        for step, batch in enumerate(tqdm(loader, file=bar, ascii=True)):
            loss, _ = _step(model, optimizer, *batch)
            logger.info("step %d: %.8f", step, loss)
            lines.write(json.dumps({"step": step, "loss": round(loss, 8)}) + "\n")
            writer.writerow({"step": step, "loss": f"{loss:.8f}"})
    handler.close()
    read = [json.loads(line) for line in Path("steps.jsonl").read_text().splitlines()]
    print(len(read), bar.getvalue().count("%|") > 0, Path("train.log").read_text().splitlines()[0][:11])
    return {"weights": model.state_dict(), "read": read}


def logs_in_its_forward() -> dict[str, Any]:
    """A forward that counts its calls in a file, and one that logs by the logging module."""

    class Telling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = _mlp()

        def forward(self, x: Tensor) -> Tensor:
            with open("calls.txt", "a") as calls:
                calls.write("called\n")
            return self.net(x)

    class Logging(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = _mlp()

        def forward(self, x: Tensor) -> Tensor:
            logging.getLogger("forward").warning("called with %d rows", len(x))
            return self.net(x)

    _, _, loader = _data()
    handler = logging.FileHandler("rows.log")
    logging.getLogger("forward").addHandler(handler)
    logging.getLogger("forward").propagate = False
    for model in (Telling(), Logging()):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in loader:
            print(f"{_step(model, optimizer, *batch)[0]:.9f}")
    handler.close()
    logging.getLogger("forward").removeHandler(handler)
    calls = Path("calls.txt").read_text().count("\n")
    print(calls, Path("rows.log").read_text())
    return {"weights": model.state_dict(), "calls": calls}


def board() -> dict[str, Any]:
    """TensorBoard: scalars and histograms, read back from the event file, whose name has a time, and removed."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    _, _, loader = _data()
    model = _mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with SummaryWriter("board") as writer:
        for step, batch in enumerate(loader):
            writer.add_scalar("loss", _step(model, optimizer, *batch)[0], step)
            writer.add_histogram("weights", model[0].weight.detach().float(), step)
    if os.path.isdir("board"):
        found = EventAccumulator("board").Reload().Scalars("loss")
        print([round(one.value, 5) for one in found])
    shutil.rmtree("board")
    return {"weights": model.state_dict()}


def best_and_last() -> dict[str, Any]:
    """Checkpoints: the last, the best three by a metric, older ones removed; numpy and pickle besides."""
    x, y, loader = _data()
    model = _mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    kept: list[tuple[float, str]] = []
    for epoch in range(5):
        model.train()
        for batch in loader:
            _step(model, optimizer, *batch)
        model.eval()
        with torch.no_grad():
            score = round(F.cross_entropy(model(x), y).item(), 9)
        name = f"epoch={epoch}-{score:.4f}.pt"
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, "last.pt")
        shutil.copy("last.pt", name)
        kept = sorted([*kept, (score, name)])
        for _, worse in kept[2:]:
            os.remove(worse)
        kept = kept[:2]
        os.replace("last.pt", "current.pt")
    np.savez("weights.npz", **{key: value.numpy().round(6) for key, value in model.state_dict().items()})
    with open("kept.pkl", "wb") as file:
        pickle.dump([name for _, name in kept], file)
    model.load_state_dict(torch.load(kept[0][1])["model"])
    again = np.load("weights.npz")
    total = sum(float(np.abs(again[key]).sum()) for key in again.files)
    os.remove("weights.npz")
    os.remove("kept.pkl")
    print(sorted(os.listdir()), round(total, 4))
    return {"weights": model.state_dict(), "kept": kept}


def watched_weights() -> dict[str, Any]:
    """Norms of weights and gradients in each step, running means with deques, a printed model and its size."""
    from collections import deque

    _, _, loader = _data()
    model = _mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recent: deque[float] = deque(maxlen=3)
    norms = defaultdict(list)
    for batch in loader:
        recent.append(_step(model, optimizer, *batch)[0])
        for name, one in model.named_parameters():
            norms[name].append((one.norm().item(), one.grad.norm().item()))
        print(f"{sum(recent) / len(recent):.9f}")
    print(model, sum(one.numel() for one in model.parameters()))
    return {"norms": dict(norms)}


def features_and_neighbours() -> dict[str, Any]:
    """Features of all samples by hooks, projected by an SVD, nearest neighbours counted, drawn as text."""
    x, y, loader = _data()
    model = _mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in loader:
        _step(model, optimizer, *batch)
    held: list[Tensor] = []
    handle = model[1].register_forward_hook(lambda _, __, output: held.append(output.detach()))
    model.eval()
    with torch.no_grad():
        for inputs, _ in DataLoader(TensorDataset(x, y), 10):
            model(inputs)
    handle.remove()
    features = torch.cat(held)
    centred = features - features.mean(0)
    flat = centred @ torch.linalg.svd(centred, full_matrices=False).Vh[:2].T
    near = torch.cdist(features, features).fill_diagonal_(1e9).topk(3, largest=False).indices
    print((y[near] == y[:, None]).double().mean().item(), features.shape)
    return {"flat": flat.abs(), "near": near}


def words_in_contexts() -> dict[str, Any]:
    """word2vec: skip-grams with negatives by a table of frequencies; the nearest words printed."""
    text = "a cat sat on a mat and a dog sat on a log while the cat saw the dog near the mat"
    words = text.split(" ")
    known = {word: i for i, word in enumerate(dict.fromkeys(words))}
    numbers = torch.tensor([known[word] for word in words])
    pairs = torch.stack(
        [
            torch.stack([numbers[i], numbers[j]])
            for i in range(len(words))
            for j in range(max(0, i - 2), min(len(words), i + 3))
            if i != j
        ]
    )
    frequencies = numbers.bincount().double() ** 0.75
    inner, outer = nn.Embedding(len(known), 5), nn.Embedding(len(known), 5)
    optimizer = torch.optim.Adagrad([*inner.parameters(), *outer.parameters()], lr=0.2)
    for _ in range(2):
        total = 0.0
        for (batch,) in DataLoader(TensorDataset(pairs), batch_size=16, shuffle=True):
            centers, contexts = batch.unbind(1)
            others = torch.multinomial(frequencies, 3 * len(batch), replacement=True).view(-1, 3)
            found = inner(centers)
            good = F.logsigmoid((found * outer(contexts)).sum(1))
            bad = F.logsigmoid(-torch.einsum("bd,bnd->bn", found, outer(others))).sum(1)
            loss = -(good + bad).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        print(f"{total:.9f}")
    vectors = F.normalize(inner.weight.detach())
    names = list(known)
    print([names[i] for i in (vectors @ vectors[known["cat"]]).topk(4).indices.tolist()])
    return {"weights": inner.state_dict(), "outer": outer.state_dict()}


def dropout_in_evaluation() -> dict[str, Any]:
    """MC dropout: only dropout layers in train mode, many passes under no_grad, mean, spread and mutual information."""
    x, _, loader = _data()
    model = _mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in loader:
        _step(model, optimizer, *batch)
    model.eval()
    for layer in model.modules():
        if isinstance(layer, nn.Dropout):
            layer.train()
    with torch.no_grad():
        chances = torch.stack([torch.cat([model(part) for part in x.split(9)]).softmax(1) for _ in range(6)])
    mean = chances.mean(0)
    total = -(mean * mean.log()).sum(1)
    inner = -(chances * chances.log()).sum(2).mean(0)
    print(f"{(total - inner).mean().item():.10f} {chances.std(0).max().item():.10f}")
    return {"mean": mean, "information": total - inner}
