"""pytorch-metric-learning: a miner and a triplet loss, a loss with weights of its own, a memory bank, its accuracy."""

import numpy
import torch
from pytorch_metric_learning import distances, losses, miners, reducers, samplers
from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
numpy.random.seed(0)  # the sampler's
x = torch.randn(80, 10, dtype=torch.float64)
labels = (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()
sampler = samplers.MPerClassSampler(labels.tolist(), m=3, batch_size=12, length_before_new_iter=60)
loader = DataLoader(TensorDataset(x, labels), batch_size=12, sampler=sampler)
trunk = torch.nn.Sequential(torch.nn.Linear(10, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4)).double()
distance, reducer = distances.CosineSimilarity(), reducers.AvgNonZeroReducer()
miner = miners.TripletMarginMiner(margin=0.2, distance=distance, type_of_triplets="semihard")
triplet = losses.TripletMarginLoss(margin=0.2, distance=distance, reducer=reducer)
arc = losses.ArcFaceLoss(num_classes=4, embedding_size=4, margin=10, scale=8).double()
memory = losses.CrossBatchMemory(losses.NTXentLoss(0.5), embedding_size=4, memory_size=40)
memory.embedding_memory = memory.embedding_memory.double()
optimizer = torch.optim.Adam([*trunk.parameters(), *arc.parameters()], 0.01)
for epoch in range(3):
    for inputs, targets in loader:
        embeddings = trunk(inputs)
        triplets = miner(embeddings, targets)
        loss = triplet(embeddings, targets, triplets) + arc(embeddings, targets) + memory(embeddings, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(epoch, loss.item(), miner.num_triplets, memory.queue_idx)
trunk.eval()
with torch.no_grad():
    found = trunk(x)
print(found.abs().sum().item())


def nearest(query, k, reference, same):
    order = torch.cdist(query, reference).sort(1)
    return order.values[:, int(same) : k + int(same)], order.indices[:, int(same) : k + int(same)]


calculator = AccuracyCalculator(include=("precision_at_1", "r_precision"), k=10, knn_func=nearest)
print(calculator.get_accuracy(found, labels))
torch.save({"trunk": trunk.state_dict(), "arc": arc.state_dict()}, "weights.pt")
