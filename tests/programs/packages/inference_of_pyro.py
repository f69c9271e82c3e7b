"""Pyro: stochastic variational inference by batches of a plate, with a guide that Pyro makes and one by hand."""

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI, Predictive, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.nn import PyroModule, PyroSample
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)
pyro.set_rng_seed(1)
x = torch.randn(70, 3)
y = x @ torch.tensor([1.0, -2.0, 0.5]) + 0.1 * torch.randn(70)


class Regression(PyroModule):
    def __init__(self):
        super().__init__()
        self.linear = PyroModule[torch.nn.Linear](3, 1)
        self.linear.weight = PyroSample(dist.Normal(0.0, 1.0).expand([1, 3]).to_event(2))

    def forward(self, x, y=None):
        noise = pyro.sample("noise", dist.LogNormal(-1.0, 1.0))
        mean = self.linear(x).squeeze(-1)
        with pyro.plate("data", 70, subsample_size=len(x)):
            return pyro.sample("y", dist.Normal(mean, noise), obs=y)


model = Regression()
guide = AutoNormal(model)
svi = SVI(model, guide, pyro.optim.ClippedAdam({"lr": 0.03}), Trace_ELBO(num_particles=2))
for epoch in range(4):
    total = sum(svi.step(*batch) for batch in DataLoader(TensorDataset(x, y), 16, shuffle=True))
    print(epoch, total)
print({name: value.tolist() for name, value in guide.median().items()})
print(Predictive(model, guide=guide, num_samples=5)(x[:4])["y"].tolist())


class Encoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden, self.mean, self.scale = torch.nn.Linear(3, 32), torch.nn.Linear(32, 2), torch.nn.Linear(32, 2)

    def forward(self, x):
        hidden = torch.tanh(self.hidden(x))
        return self.mean(hidden), torch.exp(self.scale(hidden))


encoder, decoder = Encoder(), torch.nn.Linear(2, 3)


def generate(x):
    pyro.module("decoder", decoder)
    with pyro.plate("rows", len(x)):
        z = pyro.sample("z", dist.Normal(torch.zeros(len(x), 2), 1.0).to_event(1))
        pyro.sample("x", dist.Normal(decoder(z), 0.5).to_event(1), obs=x)


def guess(x):
    pyro.module("encoder", encoder)
    with pyro.plate("rows", len(x)):
        pyro.sample("z", dist.Normal(*encoder(x)).to_event(1))


svi = SVI(generate, guess, pyro.optim.Adam({"lr": 0.01}), Trace_ELBO())
for epoch in range(3):
    print(epoch, sum(svi.step(batch) for batch in DataLoader(x, 16, shuffle=True)))
torch.save({name: value.detach() for name, value in pyro.get_param_store().items()}, "parameters.pt")
torch.save(encoder.state_dict(), "encoder.pt")
