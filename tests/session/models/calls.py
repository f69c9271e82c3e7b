"""Ways of calling a forward, and what comes out."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.session.models.training import WIDTH, model, module, noised, normed, trained, trained_on_pairs


@model
def called_at_two_depths() -> Any:
    def forward(self: Any, x: Tensor) -> Any:
        return self.head(self.inner(x).tanh())

    net = module(forward, inner=normed(last=4), head=nn.Linear(4, 1))
    return trained(lambda x, y: F.mse_loss(net(x), y) + net.inner(noised(x)).square().mean(), net)


@model
def encoder_and_decoder_called_by_hand() -> Any:
    encoder, decoder = normed(last=3), nn.Sequential(nn.Linear(3, WIDTH), nn.BatchNorm1d(WIDTH)).double()

    def loss(x: Tensor, _: Tensor) -> Any:
        codes = torch.cat([encoder(x), encoder(noised(x))])
        return F.mse_loss(decoder(codes), torch.cat([x, x]))

    return trained(loss, encoder, decoder)


@model
def views_joined_into_one_batch() -> Any:
    net = normed(last=4)

    def loss(x: Tensor, _: Tensor) -> Any:
        one, two = F.normalize(net(torch.cat([noised(x), noised(x)])), dim=1).chunk(2)
        return F.cross_entropy(one @ two.T / 0.5, torch.arange(len(x)))

    return trained(loss, net)


@model
def triplets() -> Any:
    net = normed(last=4)
    return trained(lambda x, _: F.triplet_margin_loss(net(x), net(noised(x)), net(x.flip(0))), net)


@model
def barlow_twins() -> Any:
    net = normed(last=4)

    def loss(x: Tensor, _: Tensor) -> Any:
        one, two = net(noised(x)), net(noised(x))
        cross = ((one - one.mean(0)) / one.std(0)).T @ ((two - two.mean(0)) / two.std(0)) / len(x)
        return (cross - torch.eye(4, dtype=x.dtype)).square().sum()

    return trained(loss, net)


@model
def in_place() -> Any:
    net = nn.Sequential(
        nn.Linear(WIDTH, 12), nn.BatchNorm1d(12), nn.ELU(inplace=True), nn.Linear(12, 1), nn.Dropout(0.2, inplace=True)
    ).double()
    return trained(lambda x, y: F.mse_loss(net(x).tanh() - net(noised(x)), y), net)


@model
def output_changed_in_place() -> Any:
    net = normed()

    def loss(x: Tensor, y: Tensor) -> Any:
        out = net(x)
        out *= 2
        out[0] = 0
        other = net(noised(x)).clamp_(-1, 1)
        return F.mse_loss(out - other, y)

    return trained(loss, net)


@model
def nested_outputs() -> Any:
    def forward(self: Any, x: Tensor, *, deep: bool) -> Any:
        hidden = self.body(x)
        found = [head(hidden) for head in self.heads]
        ordered = OrderedDict(first=found[0], second=found[1])
        return {"out": ordered, "pair": (hidden, hidden.argmax(1)), "none": None, "deep": deep}

    net = module(forward, body=normed(last=4), heads=nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 2)]))

    def loss(x: Tensor, y: Tensor) -> Any:
        one, two = net(x, deep=True), net(noised(x), deep=False)
        agree = (one["pair"][1] == two["pair"][1]).double().mean()
        total = F.mse_loss(one["out"]["first"], y) + F.cross_entropy(two["out"]["second"], one["pair"][1] % 2)
        return total + agree * one["pair"][0].mean()

    return trained(loss, net)


@model
def inputs_in_a_dict() -> Any:
    def forward(self: Any, batch: dict[str, Any], scale: float = 1.0) -> Any:
        return self.body(batch["x"] * scale) * batch["mask"][:, None]

    net = module(forward, body=normed())

    def loss(x: Tensor, y: Tensor) -> Any:
        mask = (x[:, 0] > 0).to(x)
        return ((net({"x": x, "mask": mask}) - y).square() * mask[:, None]).sum() / mask.sum().clamp(min=1)

    return trained(loss, net)


@model
def checkpointed_batch_norm() -> Any:
    class Checkpointed(nn.Module):
        def __init__(self, reentrant: bool) -> None:
            super().__init__()
            self.first, self.body, self.reentrant = nn.Linear(WIDTH, WIDTH), normed(), reentrant

        def forward(self, x: Tensor) -> Any:
            return checkpoint(self.body, self.first(x), use_reentrant=self.reentrant)

    found = []
    for reentrant in (False, True):
        net = Checkpointed(reentrant).double()
        found += trained(lambda x, y, net=net: F.mse_loss(net(x) - net(noised(x)), y), net)  # type: ignore[misc]
    return found


@model
def checkpointed_segments() -> Any:
    def forward(self: Any, x: Tensor) -> Any:
        return self.out(checkpoint_sequential(self.body, 2, x, use_reentrant=False))

    return trained_on_pairs(
        module(
            forward,
            body=nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]),
            out=nn.Linear(WIDTH, 1),
        )
    )


@model
def checkpointed_from_outside() -> Any:
    net, head = normed(last=4), nn.Linear(4, 1).double()
    return trained(lambda x, y: F.mse_loss(head(checkpoint(net, x, use_reentrant=False)), y), net, head)


@model
def graph_with_sparse_tensors() -> Any:
    def forward(self: Any, x: Tensor, edges: Tensor) -> Any:
        return self.out(torch.sparse.mm(edges, torch.sparse.mm(x, self.into)).relu())

    net = module(forward, into=nn.Parameter(torch.randn(WIDTH, 5)), out=nn.Linear(5, 1))

    def loss(x: Tensor, y: Tensor) -> Any:
        edges = (x @ x.T > 0).to(x)
        return F.mse_loss(net(x.relu().to_sparse(), edges.to_sparse()), y) + net(x, edges.to_sparse()).square().mean()

    return trained(loss, net)


@model
def nested_tensors() -> Any:
    def forward(self: Any, sequences: Tensor) -> Any:
        hidden = self.into(sequences)
        return self.out(torch.stack([one.tanh().mean(0) for one in hidden.unbind()]))

    net = module(forward, into=nn.Linear(1, 4), out=nn.Linear(4, 1))

    def loss(x: Tensor, y: Tensor) -> Any:
        parts = [row[: 2 + i % 3, None] for i, row in enumerate(x)]
        layout = torch.jagged if len(x) % 2 else torch.strided
        return F.mse_loss(net(torch.nested.nested_tensor(parts, layout=layout)), y)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested tensors are a prototype
        return trained(loss, net)
