"""GPyTorch: an exact Gaussian process on all data, and a variational one with inducing points over a loader."""

import gpytorch
import torch
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
x = torch.linspace(0, 1, 60)
y = torch.sin(6 * x) + 0.1 * torch.randn(60)


class Exact(gpytorch.models.ExactGP):
    def __init__(self, x, y, likelihood):
        super().__init__(x, y, likelihood)
        self.mean = gpytorch.means.ConstantMean()
        self.kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))


class Variational(gpytorch.models.ApproximateGP):
    def __init__(self, points):
        distribution = gpytorch.variational.CholeskyVariationalDistribution(len(points))
        super().__init__(gpytorch.variational.VariationalStrategy(self, points, distribution))
        self.mean = gpytorch.means.ConstantMean()
        self.kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel())

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))


likelihood = gpytorch.likelihoods.GaussianLikelihood()
model = Exact(x, y, likelihood)
bound = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
optimizer = torch.optim.Adam(model.parameters(), 0.1)
for _ in range(15):
    optimizer.zero_grad()
    loss = -bound(model(x), y)
    loss.backward()
    optimizer.step()
print(loss.item(), model.kernel.base_kernel.lengthscale.item(), likelihood.noise.item())

likelihood = gpytorch.likelihoods.GaussianLikelihood()
sparse = Variational(x[::6].clone())
parameters = [*sparse.parameters(), *likelihood.parameters()]
optimizer = torch.optim.Adam(parameters, 0.05)
bound = gpytorch.mlls.VariationalELBO(likelihood, sparse, num_data=60)
for epoch in range(4):
    for inputs, targets in DataLoader(TensorDataset(x, y), 16, shuffle=True):
        optimizer.zero_grad()
        loss = -bound(sparse(inputs), targets)
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
for fitted in (model, sparse):
    fitted.eval()
    with torch.no_grad(), gpytorch.settings.fast_pred_var():
        found = likelihood.eval()(fitted(torch.linspace(0, 1, 7)))
    print(found.mean.tolist(), found.variance.tolist())
torch.save({"exact": model.state_dict(), "sparse": sparse.state_dict()}, "weights.pt")
