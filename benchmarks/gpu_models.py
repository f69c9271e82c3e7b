"""The models that ``benchmarks.gpu`` trains, as published: ResNet-50 and GPT-2 with 124 million parameters."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Bottleneck(nn.Module):
    """Residual block of three convolutions; the second one has the stride."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.body = nn.Sequential(
            *_convolution(inputs, width, 1, 1),
            nn.ReLU(inplace=True),
            *_convolution(width, width, 3, stride),
            nn.ReLU(inplace=True),
            *_convolution(width, outputs, 1, 1),
        )
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else nn.Sequential(*_convolution(inputs, outputs, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        """Map images of shape (batch, inputs, height, width)."""
        return F.relu(self.body(x) + self.shortcut(x))


def _convolution(inputs: int, outputs: int, kernel: int, stride: int) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(outputs)]


def resnet50() -> nn.Module:
    """Make ResNet-50, version 1.5 (stride in the 3x3 convolutions), for images of shape (batch, 3, 224, 224)."""
    layers: list[nn.Module] = [*_convolution(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for number, (width, blocks) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3))):
        for block in range(blocks):
            layers.append(Bottleneck(inputs, width, 2 if number and not block else 1))
            inputs = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000))


class _Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.mix, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.mix(self.norms[0](x)).view(batch, length, 3, self.heads, width // self.heads)
        queries, keys, values = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        found: Tensor = x + self.feed(self.norms[1](x))
        return found


class GPT2(nn.Module):
    """GPT-2 with 12 layers of width 768; its output layer shares the weights of the embedding."""

    def __init__(self, vocabulary: int = 50257, length: int = 1024, width: int = 768, layers: int = 12) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.layers = nn.Sequential(*(_Layer(width, 12) for _ in range(layers)), nn.LayerNorm(width))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return scores of shape (batch, length, vocabulary) for token numbers of shape (batch, length)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        found: Tensor = F.linear(self.layers(self.tokens(tokens) + self.positions(positions)), self.tokens.weight)
        return found
