"""Architectures and ways to learn that are not a plain classifier."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


def _loader(x: Tensor, *more: Tensor) -> DataLoader[Any]:
    return DataLoader(TensorDataset(x, *more), batch_size=8, shuffle=True)


def _mlp(num_in: int, num_out: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(num_in, 16), nn.Tanh(), nn.Linear(16, num_out))


def _sgd(*modules: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD([one for module in modules for one in module.parameters()], lr=0.05, momentum=0.5)


def _minimise(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"{loss.item():.10f}")


def physics_informed() -> dict[str, Any]:
    """A differential equation by first and second derivatives of a network; points drawn anew; boundaries besides."""
    model = _mlp(2, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(5):
        points = torch.rand(20, 2, requires_grad=True)
        u = model(points)
        (first,) = torch.autograd.grad(u.sum(), points, create_graph=True)
        (second,) = torch.autograd.grad(first[:, 0].sum(), points, create_graph=True)
        inside = (first[:, 1] - 0.1 * second[:, 0]).pow(2).mean()
        start = torch.stack([torch.rand(10), torch.zeros(10)], 1)
        _minimise(optimizer, inside + F.mse_loss(model(start), start[:, :1].sin()))
    return {"weights": model.state_dict()}


def laplacian() -> dict[str, Any]:
    """Laplacians by torch.func: vmap of hessian for each point of a batch from a loader."""
    model = _mlp(2, 1)
    optimizer = _sgd(model)
    for points, wanted in _loader(torch.rand(30, 2), torch.rand(30)):
        traces = torch.func.vmap(lambda one: torch.func.hessian(lambda p: model(p).squeeze())(one).trace())(points)
        _minimise(optimizer, F.mse_loss(traces, wanted) + F.mse_loss(model(points).squeeze(1), wanted))
    return {"weights": model.state_dict()}


def neural_equation() -> dict[str, Any]:
    """A neural ODE by Runge-Kutta with the network called in each stage; time as a number; then with the adjoint."""
    field = _mlp(3, 2)
    optimizer = _sgd(field)

    def slope(time: float, y: Tensor) -> Tensor:
        return field(torch.cat([y, torch.full((len(y), 1), time)], 1))

    for start, end in _loader(torch.randn(30, 2), torch.randn(30, 2)):
        y = start
        for step in range(3):
            one = slope(step / 3, y)
            two = slope(step / 3 + 1 / 6, y + one / 6)
            y = y + two / 3
        _minimise(optimizer, F.mse_loss(y, end))
        # The adjoint: gradients by autograd.grad along the way back, put into .grad by hand.
        with torch.no_grad():
            adjoint = 2 * (y - end) / y.numel()
        optimizer.zero_grad()
        for step in range(2, -1, -1):
            held = y.detach().requires_grad_()
            found = torch.autograd.grad(slope(step / 3, held), [held, *field.parameters()], adjoint)
            adjoint = adjoint + found[0] / 3
            for one, gradient in zip(field.parameters(), found[1:], strict=True):
                one.grad = gradient / 3 if one.grad is None else one.grad + gradient / 3
            y = held.detach() - slope(step / 3, held).detach() / 3
        optimizer.step()
    return {"weights": field.state_dict()}


def fixed_point() -> dict[str, Any]:
    """A deep equilibrium model: iterates without a graph until it stands still, and a hook solves the backward."""

    class Equilibrium(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside, self.given = nn.Linear(6, 6), nn.Linear(6, 6)
            with torch.no_grad():
                self.inside.weight.mul_(0.3)

        def forward(self, x: Tensor) -> Tensor:
            z = torch.zeros_like(x)
            with torch.no_grad():
                for _ in range(40):
                    following = torch.tanh(self.inside(z) + self.given(x))
                    if (following - z).norm() < 1e-9:
                        break
                    z = following
            z = torch.tanh(self.inside(z) + self.given(x))
            if z.requires_grad:
                held = z.detach().requires_grad_()
                again = torch.tanh(self.inside(held) + self.given(x))

                def solve(gradient: Tensor) -> Tensor:
                    found = gradient
                    for _ in range(20):
                        found = torch.autograd.grad(again, held, found, retain_graph=True)[0] + gradient
                    return found

                z.register_hook(solve)
            return z

    model, head = Equilibrium(), nn.Linear(6, 3)
    optimizer = _sgd(model, head)
    x = torch.randn(30, 6)
    for inputs, labels in _loader(x, x[:, :3].argmax(1)):
        _minimise(optimizer, F.cross_entropy(head(model(inputs)), labels))
    return {"weights": [model.state_dict(), head.state_dict()]}


def hypernetwork() -> dict[str, Any]:
    """One network gives the weights of another, for a batch of tasks; bmm; and one for a single task by F.linear."""
    hyper, single = _mlp(4, 6 * 3 + 3), nn.Linear(2, 8)
    optimizer = _sgd(hyper, single)
    for tasks, x, wanted in _loader(torch.randn(30, 4), torch.randn(30, 5, 6), torch.randn(30, 5, 3)):
        weights, bias = hyper(tasks).split([18, 3], 1)
        out = torch.baddbmm(bias[:, None], x, weights.view(-1, 6, 3))
        made = single(torch.ones(1, 2)).view(1, 8)
        _minimise(optimizer, F.mse_loss(out, wanted) + F.mse_loss(F.linear(out[:, 0], made[:, :3]), tasks[:, :1]))
    return {"weights": hyper.state_dict(), "single": single.state_dict()}


def learned_to_learn() -> dict[str, Any]:
    """MAML by functional_call with second derivatives, and Reptile by copies that train on their own."""
    model, other = _mlp(1, 1), _mlp(1, 1)
    optimizer = _sgd(model)
    for _ in range(3):
        losses = []
        for _ in range(3):
            amplitude, x = torch.rand(()) * 2, torch.randn(12, 1)
            y = amplitude * x.sin()
            weights = dict(model.named_parameters())
            for _ in range(2):
                loss = F.mse_loss(torch.func.functional_call(model, weights, (x[:6],)), y[:6])
                found = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
                weights = {n: w - 0.1 * g for (n, w), g in zip(weights.items(), found, strict=True)}
            losses.append(F.mse_loss(torch.func.functional_call(model, weights, (x[6:],)), y[6:]))
            fast = copy.deepcopy(other)
            inner = torch.optim.SGD(fast.parameters(), lr=0.1)
            for _ in range(3):
                inner.zero_grad()
                F.mse_loss(fast(x), y).backward()
                inner.step()
            with torch.no_grad():
                for one, quick in zip(other.parameters(), fast.parameters(), strict=True):
                    one += 0.3 * (quick - one)
        _minimise(optimizer, torch.stack(losses).mean())
    return {"weights": model.state_dict(), "other": other.state_dict()}


def prototypes() -> dict[str, Any]:
    """Few-shot episodes: support and query in one call, prototypes as means of the support of each class."""
    model = _mlp(6, 4)
    optimizer = _sgd(model)
    for _ in range(5):
        centers = torch.randn(3, 6) * 2
        samples = centers[:, None] + torch.randn(3, 7, 6)
        found = model(samples.flatten(0, 1)).view(3, 7, 4)
        scores = -torch.cdist(found[:, 4:].flatten(0, 1), found[:, :4].mean(1)).pow(2)
        _minimise(optimizer, F.cross_entropy(scores, torch.arange(3).repeat_interleave(3)))
    return {"weights": model.state_dict()}


def point_clouds() -> dict[str, Any]:
    """PointNet: shared layers over points, a maximum over them, BatchNorm over all, a regularised transform."""

    class Points(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.turn = nn.Sequential(nn.Conv1d(3, 8, 1), nn.BatchNorm1d(8), nn.ReLU(), nn.AdaptiveMaxPool1d(1))
            self.matrix, self.body, self.head = nn.Linear(8, 9), nn.Conv1d(3, 8, 1), nn.Linear(8, 2)

        def forward(self, points: Tensor) -> tuple[Tensor, Tensor]:
            turned = self.matrix(self.turn(points).squeeze(-1)).view(-1, 3, 3) + torch.eye(3)
            return self.head(self.body(torch.bmm(turned, points)).amax(2)), turned

    points = torch.randn(40, 3, 10)
    model = Points()
    optimizer = _sgd(model)
    for inputs, labels in _loader(points, (points.norm(dim=1).amax(1) > 2.6).long()):
        scores, turned = model(inputs)
        apart = (turned @ turned.transpose(1, 2) - torch.eye(3)).norm(dim=(1, 2)).mean()
        _minimise(optimizer, F.cross_entropy(scores, labels) + 0.01 * apart)
    return {"weights": model.state_dict()}


def graphs_in_batches() -> dict[str, Any]:
    """Graphs put together into one by the collate_fn: nodes, edges and a number of the graph for each node."""
    graphs = []
    for size in torch.randint(3, 7, (33,)).tolist():
        nodes, edges = torch.randn(size, 4), torch.randint(0, size, (2, 2 * size))
        graphs.append((nodes, edges, int(nodes.mean() > 0)))

    def collate(batch: list[Any]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        sizes = torch.tensor([len(nodes) for nodes, _, _ in batch])
        starts = sizes.cumsum(0) - sizes
        edges = torch.cat([one + start for (_, one, _), start in zip(batch, starts, strict=True)], 1)
        numbers = torch.repeat_interleave(torch.arange(len(batch)), sizes)
        return torch.cat([nodes for nodes, _, _ in batch]), edges, numbers, torch.tensor([y for _, _, y in batch])

    class Messages(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.out = nn.Linear(8, 8), nn.Linear(12, 4), nn.Linear(4, 2)

        def forward(self, nodes: Tensor, edges: Tensor, numbers: Tensor) -> Tensor:
            messages = self.one(torch.cat([nodes[edges[0]], nodes[edges[1]]], 1)).relu()
            around = torch.zeros(len(nodes), 8).index_add(0, edges[1], messages)
            nodes = self.two(torch.cat([nodes, around], 1)).relu()
            total = torch.zeros(int(numbers[-1]) + 1, 4).index_add(0, numbers, nodes)
            return self.out(total / numbers.bincount()[:, None])

    model = Messages()
    optimizer = _sgd(model)
    for nodes, edges, numbers, labels in DataLoader(graphs, 6, shuffle=True, collate_fn=collate):
        _minimise(optimizer, F.cross_entropy(model(nodes, edges, numbers), labels))
    return {"weights": model.state_dict()}


def attention_over_a_graph() -> dict[str, Any]:
    """A graph attention network over one dense adjacency that is as long as the batch; dropout on edges."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.values, self.scores, self.out = nn.Linear(5, 8), nn.Linear(8, 2), nn.Linear(8, 3)

        def forward(self, nodes: Tensor, adjacency: Tensor) -> Tensor:
            values = self.values(nodes)
            to, of = self.scores(values).unbind(1)
            weights = F.leaky_relu(to[:, None] + of).masked_fill(adjacency == 0, -1e9).softmax(1)
            return self.out(F.dropout(weights, 0.2, self.training) @ values)

    nodes, adjacency = torch.randn(20, 5), (torch.rand(20, 20) < 0.3).double() + torch.eye(20)
    labels, seen = nodes[:, :3].argmax(1), torch.rand(20) < 0.6
    model = Attention()
    optimizer = _sgd(model)
    for _ in range(5):
        _minimise(optimizer, F.cross_entropy(model(nodes, adjacency)[seen], labels[seen]))
    model.eval()
    print((model(nodes, adjacency).argmax(1) == labels)[~seen].double().mean().item())
    return {"weights": model.state_dict()}


def hopfield() -> dict[str, Any]:
    """A modern Hopfield layer: stored patterns are parameters, retrieved by several softmax steps; energies printed."""

    class Memory(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stored, self.out = nn.Parameter(torch.randn(7, 6)), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            for _ in range(3):
                x = (2 * x @ self.stored.T).softmax(1) @ self.stored
            return self.out(x), -torch.logsumexp(x @ self.stored.T, 1)

    x = torch.randn(40, 6)
    model = Memory()
    optimizer = _sgd(model)
    for inputs, labels in _loader(x, x[:, :3].argmax(1)):
        scores, energy = model(inputs)
        print(f"{energy.min().item():.10f}")
        _minimise(optimizer, F.cross_entropy(scores, labels))
    return {"weights": model.state_dict()}


def gaussian_process() -> dict[str, Any]:
    """The marginal likelihood by Cholesky over all points, and deep kernel learning with features of a network."""
    x = torch.randn(25, 2)
    y = x[:, 0].sin()
    logs, features = nn.Parameter(torch.zeros(3)), _mlp(2, 2)
    optimizer = torch.optim.SGD([logs, *features.parameters()], lr=0.01)

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        return logs[0].exp() * torch.exp(-0.5 * (a[:, None] - b).pow(2).sum(-1) / logs[1].exp())

    for _ in range(5):
        found = features(x)
        factor = torch.linalg.cholesky(kernel(found, found) + (logs[2].exp() * 0.1 + 1e-6) * torch.eye(25))
        alpha = torch.cholesky_solve(y[:, None], factor)
        _minimise(optimizer, 0.5 * (y @ alpha).squeeze() + factor.diagonal().log().sum())
    with torch.no_grad():
        mean = kernel(features(torch.zeros(2, 2)), features(x)) @ alpha
    return {"weights": features.state_dict(), "logs": logs.detach(), "mean": mean}


def inducing_points() -> dict[str, Any]:
    """A sparse variational Gaussian process on minibatches.

    The inducing points are parameters of a module, whose forward computes their kernel matrix.
    """

    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.points, self.mean = nn.Parameter(torch.randn(5, 2)), nn.Parameter(torch.zeros(5))
            self.factor = nn.Parameter(torch.eye(5))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            def kernel(a: Tensor, b: Tensor) -> Tensor:
                return torch.exp(-0.5 * torch.cdist(a, b).pow(2))

            inner = torch.linalg.cholesky(kernel(self.points, self.points) + 1e-4 * torch.eye(5))
            a = torch.linalg.solve_triangular(inner, kernel(self.points, x), upper=False)
            lower = self.factor.tril()
            divergence = 0.5 * (self.mean.pow(2).sum() + lower.pow(2).sum() - 5) - lower.diagonal().abs().log().sum()
            return a.T @ self.mean, 1 - a.pow(2).sum(0) + (lower.T @ a).pow(2).sum(0), divergence

    x = torch.randn(40, 2)
    model = Sparse()
    optimizer = _sgd(model)
    for inputs, y in _loader(x, x[:, 0].sin()):
        mean, variance, divergence = model(inputs)
        _minimise(optimizer, 5 * ((y - mean).pow(2) + variance).mean() + divergence / 40)
    return {"weights": model.state_dict()}


def routed_experts() -> dict[str, Any]:
    """A mixture of experts with capacity: the best two of a softmax, a balance loss kept on the side."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(6, 4)
            self.experts = nn.ModuleList([nn.Linear(6, 3) for _ in range(4)])
            self.balance = torch.zeros(())

        def forward(self, x: Tensor) -> Tensor:
            chances = self.gate(x).softmax(1)
            best, chosen = chances.topk(2, 1)
            share = F.one_hot(chosen, 4).double().sum(1).mean(0)
            self.balance = (share * chances.mean(0)).sum()
            out = torch.zeros(len(x), 3)
            for i, expert in enumerate(self.experts):
                rows, place = torch.where(chosen == i)
                out = out.index_add(0, rows, expert(x[rows]) * best[rows, place, None])
            return out

    x = torch.randn(40, 6)
    model = Experts()
    optimizer = _sgd(model)
    for inputs, labels in _loader(x, x[:, :3].argmax(1)):
        _minimise(optimizer, F.cross_entropy(model(inputs), labels) + 0.1 * model.balance)
    return {"weights": model.state_dict()}


def early_exits() -> dict[str, Any]:
    """Exits after each block, their losses weighted; in evaluation samples leave when an exit is sure."""

    class Exits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)])
            self.heads = nn.ModuleList([nn.Linear(6, 3) for _ in range(3)])

        def forward(self, x: Tensor) -> list[Tensor]:
            found = []
            for block, head in zip(self.blocks, self.heads, strict=True):
                x = x + block(x)
                found.append(head(x))
                if not self.training and found[-1].softmax(1).amax(1).min() > 0.36:
                    break
            return found

    x = torch.randn(40, 6)
    model = Exits()
    optimizer = _sgd(model)
    for inputs, labels in _loader(x, x[:, :3].argmax(1)):
        losses = [F.cross_entropy(scores, labels) for scores in model(inputs)]
        _minimise(optimizer, sum(0.5**i * one for i, one in enumerate(reversed(losses))))
    model.eval()
    with torch.no_grad():
        for start in range(0, 40, 5):
            found = model(x[start : start + 5])
            print(len(found), found[-1].argmax(1).tolist())
    return {"weights": model.state_dict()}


def ensemble() -> dict[str, Any]:
    """Several networks in a ModuleList and one optimizer, a diversity term between them; bagging by Poisson weights."""
    models = nn.ModuleList([_mlp(6, 3) for _ in range(3)])
    optimizer = _sgd(models)
    x = torch.randn(40, 6)
    for inputs, labels in _loader(x, x[:, :3].argmax(1)):
        scores = torch.stack([model(inputs) for model in models])
        weights = torch.poisson(torch.ones(3, len(inputs)))
        each = F.cross_entropy(scores.flatten(0, 1), labels.repeat(3), reduction="none").view(3, -1)
        _minimise(optimizer, (each * weights).sum() / weights.sum() - 0.01 * scores.softmax(2).var(0).mean())
    with torch.no_grad():
        mean = torch.stack([model(x).softmax(1) for model in models]).mean(0)
    print(f"{-(mean * mean.log()).sum(1).mean().item():.10f}")
    return {"weights": models.state_dict()}


def bandits_and_actors() -> dict[str, Any]:
    """PPO on a toy world: old log-probabilities, advantages normalised over a rollout, clipped ratios, entropy."""
    from torch.distributions import Categorical

    policy, value = _mlp(3, 2), _mlp(3, 1)
    optimizer = _sgd(policy, value)
    state = torch.zeros(4, 3)
    for _ in range(2):
        states, actions, logs, rewards = [], [], [], []
        with torch.no_grad():
            for _ in range(6):
                chances = Categorical(logits=policy(state))
                action = chances.sample()
                states.append(state)
                actions.append(action)
                logs.append(chances.log_prob(action))
                rewards.append((action == (state[:, 0] > 0).long()).double())
                state = 0.7 * state + torch.randn(4, 3)
            values = torch.stack([value(one).squeeze(1) for one in [*states, state]])
        advantages: list[Tensor] = []
        running = torch.zeros(4)
        for i in range(5, -1, -1):
            running = rewards[i] + 0.9 * values[i + 1] - values[i] + 0.9 * 0.95 * running
            advantages.insert(0, running)
        flat = [torch.cat(one) for one in (states, actions, logs, advantages)]
        returns = flat[3] + values[:-1].flatten()
        for seen, action, log, advantage, target in _loader(*flat, returns):
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
            chances = Categorical(logits=policy(seen))
            ratio = (chances.log_prob(action) - log).exp()
            clipped = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
            fit = F.smooth_l1_loss(value(seen).squeeze(1), target)
            _minimise(optimizer, -clipped + 0.5 * fit - 0.01 * chances.entropy().mean())
        print(f"{torch.stack(rewards).mean().item():.10f}")
    return {"weights": policy.state_dict(), "value": value.state_dict()}


def q_learning() -> dict[str, Any]:
    """Double Q-learning with a prioritised replay: priorities are temporal errors, weights correct for them."""
    from collections import deque

    online, target = _mlp(3, 2), _mlp(3, 2)
    target.load_state_dict(online.state_dict())
    optimizer = _sgd(online)
    memory: deque[Any] = deque(maxlen=30)
    state = torch.zeros(3)
    for step in range(30):
        with torch.no_grad():
            action = int(online(state[None]).argmax()) if torch.rand(()) > 0.3 else int(torch.randint(0, 2, ()))
        following = 0.5 * state + torch.randn(3)
        memory.append([state, action, float(action == int(state[0] > 0)), following, 1.0])
        state = following
        if step < 8:
            continue
        priorities = torch.tensor([one[4] for one in memory]).pow(0.6)
        chosen = torch.multinomial(priorities / priorities.sum(), 8)
        parts = zip(*[memory[i] for i in chosen.tolist()], strict=True)
        columns = [torch.stack(part) if torch.is_tensor(part[0]) else torch.tensor(part) for part in parts]
        seen, actions, rewards, later, _ = columns
        with torch.no_grad():
            best = online(later).argmax(1, keepdim=True)
            wanted = rewards + 0.9 * target(later).gather(1, best).squeeze(1)
        errors = online(seen).gather(1, actions[:, None]).squeeze(1) - wanted
        for i, error in zip(chosen.tolist(), errors.tolist(), strict=True):
            memory[i][4] = abs(error) + 0.01
        weights = (len(memory) * priorities[chosen] / priorities.sum()).pow(-0.4)
        _minimise(optimizer, (weights / weights.max() * errors.pow(2)).mean())
        if step % 5 == 0:
            target.load_state_dict(online.state_dict())
    return {"weights": online.state_dict()}


def translation() -> dict[str, Any]:
    """nn.Transformer with padding masks, scheduled sampling, label smoothing, and greedy decoding in evaluation."""

    class Translator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.out = nn.Embedding(11, 8, padding_idx=0), nn.Linear(8, 11)
            self.body = nn.Transformer(8, 2, 1, 1, 16, dropout=0.1, batch_first=True)

        def forward(self, source: Tensor, target: Tensor) -> Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1]).isinf()
            return self.out(
                self.body(
                    self.words(source),
                    self.words(target),
                    tgt_mask=mask,
                    src_key_padding_mask=source == 0,
                    memory_key_padding_mask=source == 0,
                )
            )

    source = torch.randint(1, 11, (33, 6)) * (torch.arange(6) < torch.randint(2, 7, (33, 1)))
    target = torch.cat([torch.ones(33, 1, dtype=torch.long), source.flip(1)], 1)
    model = Translator()
    optimizer = _sgd(model)
    for one, other in _loader(source, target):
        given = other[:, :-1].clone()
        if torch.rand(()) < 0.5:
            with torch.no_grad():
                guess = model(one, given).argmax(-1)
            given[:, 1:] = torch.where(torch.rand(given[:, 1:].shape) < 0.3, guess[:, :-1], given[:, 1:])
        scores = model(one, given).flatten(0, 1)
        _minimise(optimizer, F.cross_entropy(scores, other[:, 1:].flatten(), ignore_index=0, label_smoothing=0.1))
    model.eval()
    written = torch.ones(4, 1, dtype=torch.long)
    with torch.no_grad():
        while written.shape[1] < 7 and not (written[:, -1] == 2).all():
            written = torch.cat([written, model(source[:4], written)[:, -1:].argmax(-1)], 1)
    print(written.tolist())
    return {"weights": model.state_dict()}
