"""MONAI: a supervised trainer, and an evaluator that runs after each epoch."""

import torch
from ignite.engine import Events
from monai.data import DataLoader, Dataset
from monai.engines import SupervisedEvaluator, SupervisedTrainer

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
rows = [{"image": row, "label": row.sum(0, keepdim=True)} for row in torch.randn(44, 4)]
net = torch.nn.Linear(4, 1)
seen = [0]
evaluator = SupervisedEvaluator(device="cpu", val_data_loader=DataLoader(Dataset(rows[32:]), batch_size=8), network=net)


@evaluator.on(Events.ITERATION_COMPLETED)
def count(engine):
    batch = engine.state.batch
    seen[0] += len(batch) if isinstance(batch, list) else len(batch["image"])


trainer = SupervisedTrainer(
    device="cpu",
    max_epochs=2,
    train_data_loader=DataLoader(Dataset(rows[:32]), batch_size=8, shuffle=True),
    network=net,
    optimizer=torch.optim.SGD(net.parameters(), 0.05),
    loss_function=torch.nn.MSELoss(),
)


@trainer.on(Events.EPOCH_COMPLETED)
def evaluate(engine):
    seen[0] = 0
    evaluator.run()
    print("evaluated", seen[0])


trainer.run()
print([round(value, 9) for value in net.weight.flatten().tolist()])
torch.save(net.state_dict(), "net.pt")
