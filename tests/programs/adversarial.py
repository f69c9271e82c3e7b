"""A GAN: two optimizers, three forwards of the discriminator a step, weights drawn anew by ``apply`` after building."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

CODE = 5


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(CODE, 6, 2, bias=False),
            nn.BatchNorm2d(6),
            nn.ReLU(True),
            nn.ConvTranspose2d(6, 1, 3, bias=False),
            nn.Tanh(),
        )

    def forward(self, code: Tensor) -> Any:
        return self.main(code)


class Discriminator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(1, 6, 3, bias=False),
            nn.BatchNorm2d(6),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(6, 1, 2, bias=False),
            nn.Sigmoid(),
        )

    def forward(self, images: Tensor) -> Any:
        return self.main(images).view(-1, 1).squeeze(1)


def init(module: Any) -> None:
    name = module.__class__.__name__
    if "Conv" in name:
        nn.init.normal_(module.weight, 0.0, 0.2)
    elif "BatchNorm" in name:
        nn.init.normal_(module.weight, 1.0, 0.02)
        nn.init.zeros_(module.bias)


def train(epochs: int = 2) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    images = torch.tanh(torch.randn(26, 1, 4, 4).cumsum(3))
    loader = DataLoader(TensorDataset(images), batch_size=8, shuffle=True)
    generator, discriminator = Generator(), Discriminator()
    generator.apply(init)
    discriminator.apply(init)
    criterion = nn.BCELoss()
    fixed = torch.randn(4, CODE, 1, 1)
    for_d = torch.optim.SGD(discriminator.parameters(), lr=0.05, momentum=0.5)
    for_g = torch.optim.SGD(generator.parameters(), lr=0.05, momentum=0.5)
    for epoch in range(epochs):
        for i, (real,) in enumerate(loader):
            discriminator.zero_grad()
            count = real.size(0)
            label = torch.full((count,), 1.0)
            output = discriminator(real)
            loss_real = criterion(output, label)
            loss_real.backward()
            on_real = output.mean().item()
            fake = generator(torch.randn(count, CODE, 1, 1))
            label.fill_(0.0)
            output = discriminator(fake.detach())
            loss_fake = criterion(output, label)
            loss_fake.backward()
            for_d.step()
            generator.zero_grad()
            label.fill_(1.0)
            output = discriminator(fake)
            loss = criterion(output, label)
            loss.backward()
            for_g.step()
            print(f"[{epoch}][{i}/{len(loader)}] D {loss_real.item() + loss_fake.item():.10f} G {loss.item():.10f}")
            print(f"D(x) {on_real:.10f} D(G(z)) {output.mean().item():.10f}")
        torch.save(generator(fixed).detach(), f"fake_{epoch}.pt")
        torch.save(generator.state_dict(), "generator.pt")
    return {"generator": generator.state_dict(), "discriminator": discriminator.state_dict()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(1)
    torch.save(train(args.epochs), "result.pt")
