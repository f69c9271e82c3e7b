"""BoTorch: a loop of Bayesian optimization with a model that is fitted anew, and a Monte Carlo acquisition function."""

import torch
from botorch.acquisition import qLogExpectedImprovement
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.models.transforms import Normalize, Standardize
from botorch.optim import optimize_acqf
from botorch.sampling import SobolQMCNormalSampler
from gpytorch.mlls import ExactMarginalLogLikelihood

torch.manual_seed(0)
bounds = torch.tensor([[-2.0, -2.0], [2.0, 2.0]], dtype=torch.float64)


def value(x):
    return -(x.pow(2).sum(-1, keepdim=True) - x[..., :1].sin())


x = bounds[0] + (bounds[1] - bounds[0]) * torch.rand(6, 2, dtype=torch.float64)
y = value(x)
for step in range(3):
    model = SingleTaskGP(x, y, input_transform=Normalize(2), outcome_transform=Standardize(1))
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
    sampler = SobolQMCNormalSampler(torch.Size([32]), seed=step)
    acquisition = qLogExpectedImprovement(model, y.max(), sampler=sampler)
    candidates, gain = optimize_acqf(acquisition, bounds, q=2, num_restarts=3, raw_samples=16)
    x, y = torch.cat([x, candidates]), torch.cat([y, value(candidates)])
    print(step, candidates.tolist(), gain.item(), y.max().item())
torch.save({"x": x, "y": y, "model": model.state_dict()}, "found.pt")
