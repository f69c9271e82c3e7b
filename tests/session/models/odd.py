"""Forwards that are unusual in one way each."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.session.models.training import (
    WIDTH,
    around,
    batches,
    model,
    module,
    network,
    noised,
    normed,
    state_of,
    take_step,
    trained,
    trained_by_step,
    trained_on_pairs,
)


@model
def squeezed_output() -> Any:
    def forward(self: Any, x: Tensor) -> Any:
        return self.body(x).squeeze()

    net = around(forward)

    def loss(x: Tensor, y: Tensor) -> Any:
        small = 3 + len(x) % 2
        return F.mse_loss(net(x), y.squeeze()) + net(x[:small]).square().sum() + net(x[: small - 1]).sum()

    return trained(loss, net)


@model
def squeezed_output_of_a_tail() -> Any:
    def forward(self: Any, x: Tensor) -> Any:
        return self.body(x).squeeze()

    net = around(forward)
    return trained(lambda x, y: F.mse_loss(net(x), y.squeeze()), net)


@model
def rows_as_many_as_a_mask_has() -> Any:
    def forward(self: Any, x: Tensor, mask: Tensor) -> Any:
        x = self.into(x.unsqueeze(-1))
        return self.out(self.attend(x, x, x, attn_mask=mask)[0].mean(1))

    net = module(
        forward, into=nn.Linear(1, 8), attend=nn.MultiheadAttention(8, 2, batch_first=True), out=nn.Linear(8, 1)
    )
    mask = torch.triu(torch.ones(WIDTH, WIDTH, dtype=torch.bool), 1)
    return trained(lambda x, y: F.mse_loss(net(x, mask), y) + net(x[:WIDTH], mask).square().mean(), net)


@model
def energy_and_its_slope() -> Any:
    def forward(self: Any, x: Tensor) -> Any:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = self.body(x)
            (force,) = torch.autograd.grad(energy.sum(), x, create_graph=self.training)
        return energy, -force

    net = around(forward)

    def loss(x: Tensor, y: Tensor) -> Any:
        energy, force = net(x)
        return F.mse_loss(energy, y) + F.mse_loss(force, x.cos())

    found = trained(loss, net)
    net.eval()
    with torch.no_grad():
        found += [
            part.detach().sum() for _ in range(3) for part in net(torch.ones(8, WIDTH, dtype=torch.float64).cumsum(0))
        ]
    return found


@model
def jacobian_in_the_forward() -> Any:
    def forward(self: Any, x: Tensor) -> Any:
        slopes = torch.func.vmap(torch.func.jacrev(lambda row: self.body(row[None])[0, 0]))(x)
        return self.body(x) + slopes.square().sum(1, keepdim=True)

    return trained_on_pairs(around(forward))


@model
def ensemble_by_vmap() -> Any:
    nets = [network() for _ in range(3)]
    params, buffers = torch.func.stack_module_state(nets)
    base = nets[0]

    def loss(x: Tensor, y: Tensor) -> Any:
        outs = torch.func.vmap(
            lambda p, b, x: torch.func.functional_call(base, (p, b), (x,)), in_dims=(0, 0, None), randomness="same"
        )(params, buffers, x)
        return (outs - y).square().mean()

    optimizer = torch.optim.SGD(list(params.values()), lr=0.05)
    losses = []
    for x, y in batches():
        optimizer.zero_grad()
        value = loss(x, y)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return [losses, *[p.detach().clone() for p in params.values()]]


@model
def forward_mode() -> Any:
    net = network()

    def loss(x: Tensor, y: Tensor) -> Any:
        warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated")  # torch's own, of derivatives
        found: Any = torch.func.jvp(net, (x,), (torch.ones_like(x),))
        with forward_ad.dual_level():
            again = forward_ad.unpack_dual(net(forward_ad.make_dual(x, torch.ones_like(x)))).tangent
        assert again is not None
        return F.mse_loss(net(x), y) + found[1].square().mean() + again.square().mean()

    return trained(loss, net)


@model
def checkpoint_around_two_models() -> Any:
    net, head = normed(last=4), nn.Sequential(nn.Dropout(0.3), nn.Linear(4, 1)).double()

    def loss(x: Tensor, y: Tensor) -> Any:
        x = x.clone().requires_grad_()
        one = checkpoint(lambda x: head(net(x)), x, use_reentrant=True)
        two = checkpoint(lambda x: head(net(x)), noised(x), use_reentrant=False)
        return F.mse_loss(one, y) + F.mse_loss(two, y) + F.mse_loss(head(net(x)), y)

    return trained(loss, net, head)


@model
def saved_tensors_are_packed() -> Any:
    net = normed()

    def loss(x: Tensor, y: Tensor) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            return F.mse_loss(net(x) - net(noised(x)), y)

    return trained(loss, net)


@model
def frozen_and_thawed() -> Any:
    net: Any = normed()

    def loss(step: int, x: Tensor, y: Tensor) -> Any:
        net[0].requires_grad_(step % 3 != 0)
        if step == 4:
            net[0].weight.grad = None
        return F.mse_loss(net(x) - net(noised(x)), y)

    return trained_by_step(loss, net)


@model
def layers_that_are_replaced() -> Any:
    net: Any = normed()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    losses = []
    for step, (x, y) in enumerate(batches(3)):
        if step == 4:
            net[3] = nn.Linear(12, 1).double()
            optimizer.add_param_group({"params": list(net[3].parameters())})
        if step == 6:
            net.insert(2, nn.Dropout(0.5))
        if step == 8:
            net[1] = nn.Identity()
        losses.append(take_step(optimizer, F.mse_loss(net(x) - net(noised(x)), y)))
    return [losses, *state_of(net)]


@model
def parts_of_outputs_and_inputs() -> Any:
    def forward(self: Any, x: Tensor, *rest: Any, flag: Any = None) -> Any:
        out = self.body(x)
        return x, out, out, x[:, :0], (x > 0).any(1), self.body[0].weight, out.to(torch.complex128), len(rest)

    net = around(forward)

    def loss(x: Tensor, y: Tensor) -> Any:
        found = net(x, None, 3, [x, "a"], flag={"deep": (x, None)})
        total = F.mse_loss(found[1] + found[2], y) + found[5].square().mean() + found[6].abs().mean()
        return total + found[3].sum() + found[4].double().mean() * found[0].mean() * found[7] * total.detach()

    return trained(loss, net)


@model
def inputs_that_are_expanded_or_transposed() -> Any:
    net = normed()

    def loss(x: Tensor, y: Tensor) -> Any:
        one = net(x.T.contiguous().T)
        two = net(x.mean(1, keepdim=True).expand(-1, WIDTH))
        three = net(x.repeat_interleave(2, 0)[::2])
        return F.mse_loss(one + two + three, y)

    return trained(loss, net)


@model
def input_that_is_trained() -> Any:
    net = normed()
    latent = nn.Parameter(torch.randn(8, WIDTH, dtype=torch.float64))
    optimizer = torch.optim.SGD([latent, *net.parameters()], lr=0.05)
    losses = [take_step(optimizer, (net(latent) - 1).square().sum() + net(latent[:5]).mean()) for _ in range(6)]
    return [losses, latent.detach().clone(), *state_of(net)]
