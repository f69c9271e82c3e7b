"""torchmetrics: a collection with averages and curves, a tracker, a mean of losses, and a confusion matrix."""

import torch
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric, MetricCollection, MetricTracker
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
)

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
x = torch.randn(100, 8)
y = (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()
train, test = DataLoader(TensorDataset(x[:63], y[:63]), 10, shuffle=True), DataLoader(TensorDataset(x[63:], y[63:]), 10)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Dropout(0.1), torch.nn.ReLU(), torch.nn.Linear(32, 3))
optimizer = torch.optim.AdamW(model.parameters(), 0.02)
both = {"accuracy": MulticlassAccuracy(3), "f1": MulticlassF1Score(3, average="macro")}
train_metrics = MetricCollection(both, prefix="train_")
test_metrics = MetricTracker(MetricCollection({**both, "auroc": MulticlassAUROC(3)}, prefix="test_"))
confusion, mean = MulticlassConfusionMatrix(3), MeanMetric().set_dtype(torch.float64)
for epoch in range(3):
    model.train()
    for inputs, targets in train:
        scores = model(inputs)
        loss = torch.nn.functional.cross_entropy(scores, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        now = train_metrics(scores.detach(), targets)
        mean.update(loss.item(), weight=len(targets))
    print(epoch, mean.compute().item(), {k: v.item() for k, v in now.items()})
    print({name: value.item() for name, value in train_metrics.compute().items()})
    train_metrics.reset()
    mean.reset()
    model.eval()
    test_metrics.increment()
    with torch.no_grad():
        for inputs, targets in test:
            scores = model(inputs)
            test_metrics.update(scores.softmax(-1), targets)
            confusion.update(scores, targets)
    print({name: value.item() for name, value in test_metrics.compute().items()}, confusion.compute().tolist())
    confusion.reset()
best, steps = test_metrics.best_metric(return_step=True)
print(best, steps)
torch.save(model.state_dict(), "model.pt")
