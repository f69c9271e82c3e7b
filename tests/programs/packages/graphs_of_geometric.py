"""PyTorch Geometric: a graph network on one whole graph, and one that classifies small graphs from its own loader."""

import torch
import torch.nn.functional as F
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GATConv, GCNConv, GINConv, global_add_pool
from torch_geometric.utils import dropout_edge, erdos_renyi_graph

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)


class Nodes(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = GCNConv(6, 16), GATConv(16, 3, heads=2, concat=False, dropout=0.2)

    def forward(self, x, edges):
        edges, _ = dropout_edge(edges, 0.1, training=self.training)
        return self.second(F.dropout(F.relu(self.first(x, edges)), 0.3, self.training), edges)


graph = Data(x=torch.randn(60, 6), edge_index=erdos_renyi_graph(60, 0.1), y=torch.randint(0, 3, (60,)))
train = torch.arange(60) < 40
model = Nodes()
optimizer = torch.optim.Adam(model.parameters(), 0.02, weight_decay=5e-4)
for epoch in range(6):
    model.train()
    optimizer.zero_grad()
    loss = F.cross_entropy(model(graph.x, graph.edge_index)[train], graph.y[train])
    loss.backward()
    optimizer.step()
    model.eval()
    with torch.no_grad():
        right = (model(graph.x, graph.edge_index).argmax(1) == graph.y)[~train].double().mean()
    print(epoch, loss.item(), right.item())
torch.save(model.state_dict(), "nodes.pt")


class Graphs(torch.nn.Module):
    def __init__(self):
        super().__init__()
        layers = [torch.nn.Linear(4, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Linear(16, 16)]
        self.layer, self.last = GINConv(torch.nn.Sequential(*layers)), torch.nn.Linear(16, 2)

    def forward(self, x, edges, batch):
        return self.last(global_add_pool(self.layer(x, edges), batch))


def small(index):
    number = 4 + index % 5
    return Data(x=torch.randn(number, 4), edge_index=erdos_renyi_graph(number, 0.5), y=torch.tensor([index % 2]))


graphs = [small(index) for index in range(33)]
train_loader, test_loader = DataLoader(graphs[:25], 8, shuffle=True), DataLoader(graphs[25:], 8)
model = Graphs()
optimizer = torch.optim.Adam(model.parameters(), 0.01)
for epoch in range(3):
    model.train()
    total = 0.0
    for data in train_loader:
        loss = F.cross_entropy(model(data.x, data.edge_index, data.batch), data.y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item() * data.num_graphs
    model.eval()
    with torch.no_grad():
        right = sum((model(d.x, d.edge_index, d.batch).argmax(1) == d.y).sum().item() for d in test_loader)
    print(epoch, total / 25, right)
torch.save(model.state_dict(), "graphs.pt")
