"""Lightning Fabric: a loop with its set-up of model and loader, clipping, and a checkpoint that is loaded again."""

import torch
from lightning_fabric import Fabric, seed_everything
from torch.utils.data import DataLoader, TensorDataset

seed_everything(1, verbose=False)
fabric = Fabric(accelerator="cpu")
fabric.launch()
x = torch.randn(60, 4, dtype=torch.float64)
loader = DataLoader(TensorDataset(x, x.pow(2).sum(1, keepdim=True)), batch_size=8, shuffle=True)
loader = fabric.setup_dataloaders(loader)
model = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)).double()
model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters(), 0.01))
state = {"model": model, "optimizer": optimizer, "epoch": 0}
for epoch in range(3):
    for number, (inputs, targets) in enumerate(loader):
        with fabric.no_backward_sync(model, enabled=number % 2 == 0):
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            fabric.backward(loss)
        if number % 2:
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
    state["epoch"] = epoch
    fabric.print(epoch, loss.item(), fabric.all_reduce(loss.detach()).item(), fabric.world_size)
    fabric.save(f"state-{epoch}.pt", state)
fabric.load("state-1.pt", state)
print(state["epoch"], fabric.all_gather(next(model.parameters())).sum().item())
