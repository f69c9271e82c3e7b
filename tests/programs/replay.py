"""Q-learning from a replay memory, with a target network that is blended in softly; no loader."""

from __future__ import annotations

import argparse
import random
from collections import deque
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Transition = tuple[Tensor, int, float, Tensor]


def train(epochs: int = 2) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    policy, target = (nn.Sequential(nn.Linear(3, 10), nn.ReLU(), nn.Linear(10, 2)) for _ in range(2))
    target.load_state_dict(policy.state_dict())
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    memory: deque[Transition] = deque(maxlen=100)
    state = torch.zeros(3)
    for step in range(20 * epochs):
        if random.random() > 0.9 - 0.02 * step:
            with torch.no_grad():
                action = int(policy(state.unsqueeze(0)).argmax(1).item())
        else:
            action = random.randrange(2)
        following = torch.roll(state, 1) * 0.5 + (2 * action - 1) * torch.tensor([1.0, 0.0, -1.0])
        memory.append((state, action, -abs(following.sum().item() - 1), following))
        state = following
        if len(memory) < 8:
            continue
        states, actions, rewards, nexts = zip(*random.sample(memory, 8), strict=True)
        chosen = policy(torch.stack(states)).gather(1, torch.tensor(actions).unsqueeze(1)).squeeze(1)
        with torch.no_grad():
            expected = torch.tensor(rewards) + 0.9 * target(torch.stack(nexts)).max(1).values
        loss = F.smooth_l1_loss(chosen, expected)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(policy.parameters(), 0.5)
        optimizer.step()
        blended = target.state_dict()
        for name, value in policy.state_dict().items():
            blended[name] = value * 0.1 + blended[name] * 0.9
        target.load_state_dict(blended)
        if step % 10 == 9:
            print(f"step {step}: {loss.item():.10f}")
    return {"policy": policy.state_dict(), "target": target.state_dict()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    random.seed(7)
    torch.manual_seed(7)
    torch.save(train(args.epochs), "result.pt")
