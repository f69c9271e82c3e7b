"""Recurrent models, transformers, and other networks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.session.models.training import WIDTH, model, module, noised, normed, of_images, trained


def of_sequences(net: nn.Module) -> Any:
    def loss(x: Tensor, y: Tensor) -> Any:
        return F.mse_loss(net(x.unsqueeze(-1)) - net(noised(x).unsqueeze(-1)), y)

    return trained(loss, net)


@model
def lstm() -> Any:
    def forward(self: Any, x: Tensor) -> Any:
        return self.out(self.norm(self.lstm(x)[0][:, -1]))

    return of_sequences(
        module(
            forward,
            lstm=nn.LSTM(1, 6, num_layers=2, dropout=0.3, batch_first=True, bidirectional=True),
            norm=nn.BatchNorm1d(12),
            out=nn.Linear(12, 1),
        )
    )


@model
def lstm_of_which_the_state_comes_out() -> Any:
    net, out = nn.LSTM(1, 6, batch_first=True).double(), nn.Linear(6, 1).double()

    def loss(x: Tensor, y: Tensor) -> Any:
        _, (hidden, _) = net(x.unsqueeze(-1))
        return F.mse_loss(out(hidden[-1]), y)

    return trained(loss, net, out)


@model
def lstm_that_starts_with_zeros_of_its_own() -> Any:
    def forward(self: Any, x: Tensor) -> Any:
        start = torch.zeros(1, x.size(0), 6, dtype=x.dtype), torch.zeros(1, x.size(0), 6, dtype=x.dtype)
        return self.out(self.lstm(x, start)[0][:, -1])

    return of_sequences(module(forward, lstm=nn.LSTM(1, 6, batch_first=True), out=nn.Linear(6, 1)))


@model
def recurrent_time_first() -> Any:
    def forward(self: Any, x: Tensor) -> Any:
        return self.out(self.gru(x.transpose(0, 1))[0][-1])

    return of_sequences(module(forward, gru=nn.GRU(1, 6), out=nn.Linear(6, 1)))


@model
def packed() -> Any:
    def forward(self: Any, x: Tensor, lengths: Tensor) -> Any:
        sequence = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        _, (hidden, _) = self.lstm(sequence)
        return self.out(hidden[-1])

    net = module(forward, lstm=nn.LSTM(1, 6, batch_first=True), out=nn.Linear(6, 1))

    def loss(x: Tensor, y: Tensor) -> Any:
        lengths = (x[:, 0] > 0).long() * 3 + 2
        return F.mse_loss(net(x.unsqueeze(-1), lengths), y)

    return trained(loss, net)


@model
def transformer_encoder() -> Any:
    def forward(self: Any, x: Tensor) -> Any:
        padding = x.squeeze(-1).abs() < 0.1
        return self.out(self.body(self.into(x) + self.places, src_key_padding_mask=padding).mean(1))

    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
    return of_sequences(
        module(
            forward,
            into=nn.Linear(1, 8),
            body=nn.TransformerEncoder(layer, 2),
            out=nn.Linear(8, 1),
            places=nn.Parameter(torch.randn(1, WIDTH, 8) * 0.1),
        )
    )


@model
def transformer_with_causal_mask() -> Any:
    def forward(self: Any, x: Tensor) -> Any:
        x = self.into(x)
        mask = torch.triu(torch.ones(x.size(1), x.size(1), dtype=torch.bool), 1)
        out, weights = self.attention(x, x, x, attn_mask=mask)
        return self.out(out.mean(1)) + weights.mean((1, 2))[:, None]

    return of_sequences(
        module(
            forward,
            into=nn.Linear(1, 8),
            attention=nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=True),
            out=nn.Linear(8, 1),
        )
    )


@model
def seq_to_seq() -> Any:
    def forward(self: Any, x: Tensor) -> Any:
        x = self.into(x)
        mask = nn.Transformer.generate_square_subsequent_mask(x.size(1), dtype=x.dtype)
        return self.out(self.body(x, x, tgt_mask=mask, tgt_is_causal=True)).mean(1)

    return of_sequences(
        module(
            forward,
            into=nn.Linear(1, 8),
            body=nn.Transformer(8, 2, 1, 1, 16, dropout=0.1, batch_first=True),
            out=nn.Linear(8, 1),
        )
    )


@model
def language_model() -> Any:
    class Language(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.lstm = nn.Embedding(9, 8, padding_idx=0), nn.LSTM(8, 8, batch_first=True)
            self.out = nn.Linear(8, 9, bias=False)
            self.out.weight = self.embed.weight

        def forward(self, tokens: Tensor) -> Any:
            return self.out(self.lstm(self.embed(tokens))[0])

    net = Language().double()

    def loss(x: Tensor, _: Tensor) -> Any:
        tokens = ((x * 3).long() + 4).clamp(0, 8)
        return F.cross_entropy(net(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=0)

    return trained(loss, net)


@model
def flattened_tokens() -> Any:
    """The output has several rows for each of the batch."""

    def forward(self: Any, x: Tensor) -> Any:
        return self.out(self.norm(self.into(x).flatten(0, 1)))

    net = module(forward, into=nn.Linear(1, 8), norm=nn.BatchNorm1d(8), out=nn.Linear(8, 1))
    return trained(lambda x, y: F.mse_loss(net(x.unsqueeze(-1)).view(len(x), -1).mean(1, keepdim=True), y), net)


@model
def embedding_bag() -> Any:
    def forward(self: Any, tokens: Tensor, offsets: Tensor) -> Any:
        return self.out(self.bag(tokens, offsets))

    net = module(forward, bag=nn.EmbeddingBag(9, 8, mode="mean"), out=nn.Linear(8, 1))

    def loss(x: Tensor, y: Tensor) -> Any:
        tokens = ((x * 3).long() + 4).clamp(0, 8).flatten()
        return F.mse_loss(net(tokens, torch.arange(0, len(tokens), WIDTH)), y)

    return trained(loss, net)


@model
def residual_network() -> Any:
    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.one, self.two = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
            self.norm_one, self.norm_two = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

        def forward(self, x: Tensor) -> Any:
            out = F.relu(self.norm_one(self.one(x)), inplace=True)
            out = self.norm_two(self.two(out))
            out += x
            return F.relu(out, inplace=True)

    body = nn.Sequential(nn.Conv2d(2, 4, 3), Block(4), Block(4), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return of_images(nn.Sequential(body, nn.Linear(4, 1)).double(), (2, 6, 6))


@model
def compiled() -> Any:
    net = normed()
    compiled_net: Any = torch.compile(net, backend="eager")
    return trained(lambda x, y: F.mse_loss(compiled_net(x) - compiled_net(noised(x)), y), net)
