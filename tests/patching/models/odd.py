"""Forwards that are unusual in one way each: what they keep, read, draw and change."""

from __future__ import annotations

import collections
import itertools
import random
import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.patching.models.training import WIDTH, batches, model, network, noised, normed, state_of, trained

CALLS = {"number": 0}
RNG = np.random.default_rng(0)
TORCH_RNG = torch.Generator()
PYTHON_RNG = random.Random(0)
NUM_CALLS = 0


class Around(nn.Module):
    """A network, and what is done around it."""

    def __init__(self, last: int = 1) -> None:
        super().__init__()
        self.body = network(last=last)


def pair_loss(net: nn.Module) -> Any:
    """A loss of two forwards."""
    return lambda x, y: F.mse_loss(net(x) - net(noised(x)), y)


def of(net: nn.Module, *more: Any) -> Any:
    net.double()
    return [*trained(pair_loss(net), net), *more]


@model
def generator_of_torchs_as_an_attribute() -> Any:
    class Noisy(Around):
        def __init__(self) -> None:
            super().__init__()
            self.rng = torch.Generator().manual_seed(5)

        def forward(self, x: Tensor) -> Any:
            return self.body(x + 0.1 * torch.randn(x.shape, generator=self.rng, dtype=x.dtype))

    return of(Noisy())


@model
def generator_of_torchs_among_the_globals() -> Any:
    TORCH_RNG.manual_seed(7)

    class Noisy(Around):
        def forward(self, x: Tensor) -> Any:
            return self.body(x) + 0.1 * torch.rand(1, generator=TORCH_RNG, dtype=x.dtype)

    return of(Noisy())


@model
def generator_of_numpys_as_an_attribute() -> Any:
    class Noisy(Around):
        def __init__(self) -> None:
            super().__init__()
            self.rng = np.random.default_rng(3)

        def forward(self, x: Tensor) -> Any:
            return self.body(x) * float(self.rng.random())

    return of(Noisy())


@model
def generator_of_numpys_among_the_globals() -> Any:
    RNG.bit_generator.state = np.random.default_rng(4).bit_generator.state

    class Noisy(Around):
        def forward(self, x: Tensor) -> Any:
            return self.body(x + torch.from_numpy(RNG.normal(size=tuple(x.shape))) * 0.1)

    return of(Noisy())


@model
def generator_of_pythons_in_a_closure() -> Any:
    rng = random.Random(5)

    class Noisy(Around):
        def forward(self, x: Tensor) -> Any:
            return self.body(x) * rng.uniform(0.5, 1.5)

    return of(Noisy())


@model
def common_generators_of_numpy_and_python() -> Any:
    random.seed(0)
    np.random.seed(0)

    class Noisy(Around):
        def forward(self, x: Tensor) -> Any:
            if random.random() < 0.3:
                x = x * 0.5
            return self.body(x + 0.1 * torch.from_numpy(np.random.randn(*x.shape)))

    return of(Noisy())


@model
def iterator_as_an_attribute() -> Any:
    class Scheduled(Around):
        def __init__(self) -> None:
            super().__init__()
            self.scales = itertools.cycle([0.5, 1.0, 1.5])

        def forward(self, x: Tensor) -> Any:
            return self.body(x) * next(self.scales)

    return of(Scheduled())


@model
def counter_among_the_globals() -> Any:
    global NUM_CALLS
    NUM_CALLS = 0

    class Counting(Around):
        def forward(self, x: Tensor) -> Any:
            global NUM_CALLS
            NUM_CALLS += 1
            return self.body(x)

    return [*of(Counting()), NUM_CALLS]


@model
def counter_in_a_dict_of_the_globals() -> Any:
    CALLS["number"] = 0

    class Counting(Around):
        def forward(self, x: Tensor) -> Any:
            CALLS["number"] += 1
            return self.body(x) / CALLS["number"]

    return [*of(Counting()), CALLS["number"]]


@model
def counter_in_an_object() -> Any:
    class Clock:
        def __init__(self) -> None:
            self.ticks = 0

        def tick(self) -> int:
            self.ticks += 1
            return self.ticks

    class Counting(Around):
        def __init__(self) -> None:
            super().__init__()
            self.clock = Clock()

        def forward(self, x: Tensor) -> Any:
            return self.body(x) / self.clock.tick()

    net = Counting()
    return [*of(net), net.clock.ticks]


@model
def counter_in_a_closure() -> Any:
    calls = [0]

    class Counting(Around):
        def forward(self, x: Tensor) -> Any:
            calls[0] += 1
            return self.body(x) / calls[0]

    return [*of(Counting()), calls[0]]


@model
def counter_in_an_array() -> Any:
    class Counting(Around):
        def __init__(self) -> None:
            super().__init__()
            self.counts = np.zeros(3)

        def forward(self, x: Tensor) -> Any:
            self.counts[1] += 1
            return self.body(x) / self.counts[1]

    net = Counting()
    return [*of(net), list(net.counts)]


@model
def counter_in_a_tensor_that_is_no_buffer() -> Any:
    class Counting(Around):
        def __init__(self) -> None:
            super().__init__()
            self.count = torch.zeros(())

        def forward(self, x: Tensor) -> Any:
            self.count += 1
            return self.body(x) / self.count.item()

    net = Counting()
    return [*of(net), net.count]


@model
def counter_of_the_class() -> Any:
    class Counting(Around):
        calls = 0

        def forward(self, x: Tensor) -> Any:
            type(self).calls += 1
            return self.body(x) / type(self).calls

    return [*of(Counting()), Counting.calls]


@model
def shapes_kept_in_a_deque() -> Any:
    class Noting(Around):
        def __init__(self) -> None:
            super().__init__()
            self.shapes: Any = collections.deque(maxlen=50)

        def forward(self, x: Tensor) -> Any:
            self.shapes.append(x.shape[0])
            return self.body(x)

    net = Noting()
    return [*of(net), list(net.shapes)]


@model
def shapes_kept_in_a_list_of_the_globals() -> Any:
    shapes: list[int] = []

    def note(x: Tensor) -> Tensor:
        shapes.append(len(x))
        return x

    class Noting(Around):
        def forward(self, x: Tensor) -> Any:
            return self.body(note(x))

    return [*of(Noting()), shapes]


@model
def decision_by_numpy() -> Any:
    class Deciding(Around):
        def forward(self, x: Tensor) -> Any:
            return self.body(x * 2 if x.detach().numpy().max() > 1.9 else x)

    return of(Deciding())


@model
def decision_by_a_list() -> Any:
    class Deciding(Around):
        def forward(self, x: Tensor) -> Any:
            return self.body(x * 2 if max(x[:, 0].tolist()) > 1.5 else x)

    return of(Deciding())


@model
def decision_by_an_array_of_labels() -> Any:
    class Deciding(Around):
        def forward(self, x: Tensor) -> Any:
            signs = np.asarray((x[:, 0] > 0).int())
            return self.body(x) * (1.5 if signs.sum() > 4 else 1.0)

    return of(Deciding())


@model
def squeezed_output() -> Any:
    class Squeezed(Around):
        def forward(self, x: Tensor) -> Any:
            return self.body(x).squeeze()

    net = Squeezed().double()

    def loss(x: Tensor, y: Tensor) -> Any:
        small = 3 + len(x) % 2
        return F.mse_loss(net(x), y.squeeze()) + net(x[:small]).square().sum() + net(x[: small - 1]).sum()

    return trained(loss, net)


@model
def squeezed_output_of_a_tail() -> Any:
    class Squeezed(Around):
        def forward(self, x: Tensor) -> Any:
            return self.body(x).squeeze()

    net = Squeezed().double()
    return trained(lambda x, y: F.mse_loss(net(x), y.squeeze()), net)


@model
def rows_as_many_as_a_mask_has() -> Any:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.attend = nn.Linear(1, 8), nn.MultiheadAttention(8, 2, batch_first=True)
            self.out = nn.Linear(8, 1)

        def forward(self, x: Tensor, mask: Tensor) -> Any:
            x = self.into(x.unsqueeze(-1))
            return self.out(self.attend(x, x, x, attn_mask=mask)[0].mean(1))

    net = Masked().double()
    mask = torch.triu(torch.ones(WIDTH, WIDTH, dtype=torch.bool), 1)
    return trained(lambda x, y: F.mse_loss(net(x, mask), y) + net(x[:WIDTH], mask).square().mean(), net)


@model
def energy_and_its_slope() -> Any:
    class Energy(Around):
        def forward(self, x: Tensor) -> Any:
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                energy = self.body(x)
                (force,) = torch.autograd.grad(energy.sum(), x, create_graph=self.training)
            return energy, -force

    net = Energy().double()

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
    class Slopes(Around):
        def forward(self, x: Tensor) -> Any:
            slopes = torch.func.vmap(torch.func.jacrev(lambda row: self.body(row[None])[0, 0]))(x)
            return self.body(x) + slopes.square().sum(1, keepdim=True)

    return of(Slopes())


@model
def gradients_per_sample() -> Any:
    net = network(nn.LayerNorm(12))

    def loss(x: Tensor, y: Tensor) -> Any:
        weights: dict[str, Tensor] = {name: p.detach() for name, p in net.named_parameters()}

        def of_one(given: dict[str, Tensor], row: Tensor, target: Tensor) -> Tensor:
            return F.mse_loss(torch.func.functional_call(net, given, (row[None],)), target[None])

        slopes = torch.func.vmap(torch.func.grad(of_one), (None, 0, 0))(weights, x, y)
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in slopes.values()]).norm(dim=0)
        return ((net(x) - y).square() / (1 + norms[:, None])).mean()

    return trained(loss, net)


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
def hessian_vector_product() -> Any:
    net = network()

    def loss(x: Tensor, y: Tensor) -> Any:
        value = F.mse_loss(net(x), y)
        slopes = torch.autograd.grad(value, list(net.parameters()), create_graph=True)
        product = sum((g * torch.ones_like(g)).sum() for g in slopes)
        return value + 0.01 * product

    return trained(loss, net)


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
    steps = [0]

    def loss(x: Tensor, y: Tensor) -> Any:
        steps[0] += 1
        net[0].requires_grad_(steps[0] % 3 != 0)
        if steps[0] == 4:
            net[0].weight.grad = None
        return F.mse_loss(net(x) - net(noised(x)), y)

    return trained(loss, net, epochs=3)


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
        optimizer.zero_grad()
        loss = F.mse_loss(net(x) - net(noised(x)), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return [losses, *state_of(net)]


@model
def mode_of_one_layer_changes() -> Any:
    class Mixing(Around):
        """Mixes rows from its fifth call on, by a flag that the loop sets."""

        def __init__(self) -> None:
            super().__init__()
            self.config = {"mix": False}

        def forward(self, x: Tensor) -> Any:
            out = self.body(x)
            return out - out.mean(0) if self.config["mix"] else out

    net = Mixing().double()
    steps = [0]

    def loss(x: Tensor, y: Tensor) -> Any:
        steps[0] += 1
        net.config["mix"] = steps[0] > 3
        return F.mse_loss(net(x), y)

    return trained(loss, net, epochs=3)


@model
def flag_among_the_globals() -> Any:
    CALLS["mix"] = 0

    class Mixing(Around):
        def forward(self, x: Tensor) -> Any:
            out = self.body(x)
            return out - out.mean(0) if CALLS["mix"] else out

    net = Mixing().double()
    steps = [0]

    def loss(x: Tensor, y: Tensor) -> Any:
        steps[0] += 1
        CALLS["mix"] = int(steps[0] > 3)
        return F.mse_loss(net(x), y)

    return trained(loss, net, epochs=3)


@model
def flag_of_an_object() -> Any:
    class Options:
        mix = False

    class Mixing(Around):
        def __init__(self) -> None:
            super().__init__()
            self.options = Options()

        def forward(self, x: Tensor) -> Any:
            out = self.body(x)
            return out - out.mean(0) if self.options.mix else out

    net = Mixing().double()
    steps = [0]

    def loss(x: Tensor, y: Tensor) -> Any:
        steps[0] += 1
        net.options.mix = steps[0] > 3
        return F.mse_loss(net(x), y)

    return trained(loss, net, epochs=3)


@model
def number_handed_in() -> Any:
    class Scaled(Around):
        def forward(self, x: Tensor, temperature: float, step: int) -> Any:
            out = self.body(x) * temperature
            return out - out.mean(0) if step > 3 else out

    net = Scaled().double()
    steps = [0]

    def loss(x: Tensor, y: Tensor) -> Any:
        steps[0] += 1
        return F.mse_loss(net(x, 1 / steps[0], steps[0]), y)

    return trained(loss, net, epochs=3)


@model
def float_handed_in_that_decides() -> Any:
    class Scaled(Around):
        def forward(self, x: Tensor, alpha: float) -> Any:
            out = self.body(x)
            return out - alpha * out.mean(0) if alpha > 0 else out

    net = Scaled().double()
    steps = [0]

    def loss(x: Tensor, y: Tensor) -> Any:
        steps[0] += 1
        return F.mse_loss(net(x, max(0.0, (steps[0] - 3) / 10)), y)

    return trained(loss, net, epochs=3)


@model
def tensor_handed_in_that_couples() -> Any:
    """As a gradient-reversal network's strength, it is zero at first."""

    class Coupled(Around):
        def forward(self, x: Tensor, alpha: Tensor) -> Any:
            out = self.body(x)
            return out - alpha * out.mean(0)

    net = Coupled().double()
    steps = [0]

    def loss(x: Tensor, y: Tensor) -> Any:
        steps[0] += 1
        return F.mse_loss(net(x, torch.tensor(max(0.0, (steps[0] - 3) / 10), dtype=x.dtype)), y)

    return trained(loss, net, epochs=3)


@model
def buffer_that_couples() -> Any:
    class Coupled(Around):
        strength: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("strength", torch.zeros(()))

        def forward(self, x: Tensor) -> Any:
            out = self.body(x)
            return out - self.strength * out.mean(0)

    net = Coupled().double()
    steps = [0]

    def loss(x: Tensor, y: Tensor) -> Any:
        steps[0] += 1
        net.strength.fill_(max(0.0, (steps[0] - 3) / 10))
        return F.mse_loss(net(x), y)

    return trained(loss, net, epochs=3)


@model
def parts_of_outputs_and_inputs() -> Any:
    class Many(Around):
        def forward(self, x: Tensor, *rest: Any, flag: Any = None) -> Any:
            out = self.body(x)
            return x, out, out, x[:, :0], (x > 0).any(1), self.body[0].weight, out.to(torch.complex128), len(rest)

    net = Many().double()

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
    losses = []
    for _ in range(6):
        optimizer.zero_grad()
        loss = (net(latent) - 1).square().sum() + net(latent[:5]).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return [losses, latent.detach().clone(), *state_of(net)]


@model
def gradients_of_hidden_values_are_kept() -> Any:
    net, head = normed(last=4), nn.Linear(4, 1).double()
    kept: list[Any] = []

    def loss(x: Tensor, y: Tensor) -> Any:
        hidden = net(x)
        hidden.retain_grad()
        hidden.register_hook(lambda g: kept.append(g.norm().item()))
        kept.append(hidden.detach().abs().max().item())
        return F.mse_loss(head(hidden), y)

    return [*trained(loss, net, head), kept]
