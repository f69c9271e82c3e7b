"""pytorch-ignite: an evaluator that sets the mode in its step, metrics, and a checkpoint of the best epoch."""

import os

import torch
from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from ignite.handlers import ModelCheckpoint
from ignite.metrics import Accuracy, Loss
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(90, 5, dtype=torch.float64)
y = (x.sum(1) > 0).long()
train = DataLoader(TensorDataset(x[:60], y[:60]), 16, shuffle=True)
validation = DataLoader(TensorDataset(x[60:], y[60:]), 16)
net = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)).double()
criterion = torch.nn.CrossEntropyLoss()
trainer = create_supervised_trainer(net, torch.optim.SGD(net.parameters(), 0.3), criterion)
evaluator = create_supervised_evaluator(net, {"accuracy": Accuracy(), "loss": Loss(criterion)})
seen = [0]


@evaluator.on(Events.ITERATION_COMPLETED)
def count(engine):
    seen[0] += len(engine.state.batch[0])


@trainer.on(Events.EPOCH_COMPLETED)
def evaluate(engine):
    seen[0] = 0
    evaluator.run(validation)
    values = {name: round(value, 6) for name, value in evaluator.state.metrics.items()}
    print(engine.state.epoch, values, "of", seen[0])


best = ModelCheckpoint(
    "kept", "best", score_function=lambda engine: -engine.state.metrics["loss"], score_name="loss", n_saved=1
)
evaluator.add_event_handler(Events.COMPLETED, best, {"model": net})
trainer.run(train, max_epochs=4)
print(len(os.listdir("kept")))
