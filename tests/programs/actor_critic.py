"""An actor that gives a distribution and a critic that gives a dataclass; several epochs over the same rollout."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Normal
from torch.utils.data import DataLoader, TensorDataset


@dataclass
class Judged:
    value: Tensor
    hidden: Tensor


class Actor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
        self.deviation = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Normal:
        return Normal(self.body(x), self.deviation.exp())


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.out = nn.Linear(3, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Judged:
        hidden = torch.tanh(self.body(x))
        return Judged(self.out(hidden), hidden)


def train(epochs: int = 2) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    actor, critic = Actor(), Critic()
    optimizer = torch.optim.SGD([*actor.parameters(), *critic.parameters()], lr=0.05)
    for epoch in range(epochs):
        states = torch.randn(30, 3)
        with torch.no_grad():
            policy = actor(states)
            actions = policy.sample()
            before = policy.log_prob(actions).sum(1)
            gained = -(actions - states[:, :2]).square().sum(1) - critic(states).value.squeeze(1)
        gained = (gained - gained.mean()) / gained.std()
        for x, action, old, advantage in DataLoader(
            TensorDataset(states, actions, before, gained), batch_size=8, shuffle=True
        ):
            policy, judged = actor(x), critic(x)
            ratio = (policy.log_prob(action).sum(1) - old).exp()
            clipped = ratio.clamp(0.8, 1.2) * advantage
            loss = -torch.min(ratio * advantage, clipped).mean() - 0.01 * policy.entropy().mean()
            loss = loss + 0.5 * F.mse_loss(judged.value.squeeze(1), advantage) + 0.01 * judged.hidden.square().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(actor.parameters(), 0.5)
            optimizer.step()
        print(f"epoch {epoch}: {loss.item():.10f}")
    return {"actor": actor.state_dict(), "critic": critic.state_dict()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(7)
    torch.save(train(args.epochs), "result.pt")
