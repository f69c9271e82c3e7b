"""A network over one whole graph: every node in every step, masks for training and test, no loader."""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class GraphLayer(nn.Module):
    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.empty(num_in, num_out))
        self.bias = nn.Parameter(torch.zeros(num_out))
        nn.init.xavier_normal_(self.kernel)

    def forward(self, x: Tensor, adjacency: Tensor) -> Any:
        return torch.sparse.mm(adjacency, x @ self.kernel) + self.bias


class GraphNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = GraphLayer(6, 8)
        self.second = GraphLayer(8, 3)
        self.drop = nn.Dropout(0.3)

    def forward(self, inputs: tuple[Tensor, Tensor]) -> Any:
        x, adjacency = inputs
        hidden = F.relu(self.first(x, adjacency))
        return F.log_softmax(self.second(self.drop(hidden), adjacency), dim=1)


def normalised(num_nodes: int) -> Tensor:
    edges = (torch.rand(num_nodes, num_nodes) < 0.15).double()
    edges = ((edges + edges.T) > 0).double() + torch.eye(num_nodes)
    scale = edges.sum(1).pow(-0.5)
    return (scale.unsqueeze(1) * edges * scale.unsqueeze(0)).to_sparse()


def train(epochs: int = 5) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    labels = torch.randint(0, 3, (30,))
    x = torch.randn(30, 6) + F.one_hot(labels, 6)
    adjacency = normalised(30)
    order = torch.randperm(30)
    for_training, for_test = order[:20], order[20:]
    model = GraphNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, weight_decay=5e-4)
    criterion = nn.NLLLoss()
    for epoch in range(epochs):
        model.train()
        optimizer.zero_grad()
        output = model((x, adjacency))
        loss = criterion(output[for_training], labels[for_training])
        loss.backward()
        optimizer.step()
        print(f"epoch {epoch}: loss {loss.item():.10f}")
    model.eval()
    with torch.no_grad():
        output = model((x, adjacency))
        accuracy = (output[for_test].argmax(1) == labels[for_test]).double().mean().item()
        test_loss = criterion(output[for_test], labels[for_test]).item()
    print(f"test loss {test_loss:.10f}, accuracy {accuracy:.4f}")
    return {"weights": model.state_dict(), "test loss": test_loss}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()
    torch.manual_seed(42)
    torch.save(train(args.epochs), "result.pt")
