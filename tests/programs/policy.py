"""Policy gradient: rewards and log-probabilities kept on the module, many forwards for one backward, stop on reward."""

from __future__ import annotations

import argparse
import random
from itertools import count
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical


class Corridor:
    """Five places in a row; the last one ends it."""

    def reset(self) -> list[float]:
        self.place = random.randint(0, 1)
        return self.seen()

    def seen(self) -> list[float]:
        return [float(self.place == i) for i in range(5)]

    def step(self, action: int) -> tuple[list[float], float, bool]:
        if random.random() < 0.1:
            action = 1 - action
        self.place = max(0, self.place + (1 if action else -1))
        done = self.place == 4
        return self.seen(), (1.0 if done else -0.1), done


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(5, 12)
        self.drop = nn.Dropout(0.2)
        self.action = nn.Linear(12, 2)
        self.log_probabilities: list[Tensor] = []
        self.rewards: list[float] = []

    def forward(self, x: Tensor) -> Any:
        return F.softmax(self.action(F.relu(self.drop(self.hidden(x)))), dim=1)


def finish(policy: Policy, optimizer: torch.optim.Optimizer) -> None:
    reward, returns = 0.0, list[float]()
    for one in policy.rewards[::-1]:
        reward = one + 0.9 * reward
        returns.insert(0, reward)
    values = torch.tensor(returns)
    values = (values - values.mean()) / (values.std(correction=0) + 1e-6)
    losses = [-log * value for log, value in zip(policy.log_probabilities, values, strict=True)]
    optimizer.zero_grad()
    torch.stack(losses).sum().backward()
    optimizer.step()
    del policy.rewards[:]
    del policy.log_probabilities[:]


def train(episodes: int = 25, threshold: float = 0.45) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    world, policy = Corridor(), Policy()
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.05)
    running, episode = 0.0, 0
    for episode in count(1):
        seen, total = world.reset(), 0.0
        for _ in range(20):
            distribution = Categorical(policy(torch.tensor(seen).unsqueeze(0)))
            action = distribution.sample()
            policy.log_probabilities.append(distribution.log_prob(action).squeeze(0))
            seen, reward, done = world.step(int(action.item()))
            policy.rewards.append(reward)
            total += reward
            if done:
                break
        running = 0.2 * total + 0.8 * running
        finish(policy, optimizer)
        if episode % 5 == 0:
            print(f"episode {episode}\tlast {total:.2f}\taverage {running:.10f}")
        if running > threshold or episode >= episodes:
            print(f"stopped at episode {episode}")
            break
    return {"weights": policy.state_dict(), "episodes": episode, "reward": running}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--episodes", type=int, default=25)
    args = parser.parse_args()
    torch.manual_seed(543)
    random.seed(543)
    torch.save(train(args.episodes), "result.pt")
