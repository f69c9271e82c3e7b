"""Opacus: gradients of single samples, clipped, without noise so that runs can be compared."""

import warnings

import torch
from opacus import PrivacyEngine
from torch.utils.data import DataLoader, TensorDataset

warnings.simplefilter("ignore")
torch.manual_seed(0)
x = torch.randn(40, 3, dtype=torch.float64)
y = (x.sum(1) > 0).long()
net = torch.nn.Sequential(torch.nn.Linear(3, 6), torch.nn.ReLU(), torch.nn.Linear(6, 2)).double()
net, optimizer, loader = PrivacyEngine().make_private(
    module=net,
    optimizer=torch.optim.SGD(net.parameters(), 0.5),
    data_loader=DataLoader(TensorDataset(x, y), 8),
    noise_multiplier=0.0,
    max_grad_norm=0.5,
    poisson_sampling=False,
)
for epoch in range(2):
    total = 0.0
    for inputs, labels in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(net(inputs), labels)
        loss.backward()
        optimizer.step()
        total += loss.item()
    print(epoch, round(total, 9), [round(p.abs().sum().item(), 9) for p in net.parameters()])
torch.save(net._module.state_dict(), "net.pt")
