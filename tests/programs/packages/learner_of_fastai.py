"""fastai: a Learner with one cycle, a best model that is kept, early stopping, predictions, saved and loaded."""

import torch
from fastai.basics import DataLoaders, Learner, accuracy, set_seed
from fastai.callback.all import EarlyStoppingCallback, GradientClip, SaveModelCallback
from fastai.data.core import DataLoader
from torch.nn import functional as F

set_seed(0, reproducible=True)
x = torch.randn(90, 6)
y = (x[:, 0] * x[:, 1] > 0).long()
rows = list(zip(x, y, strict=True))
data = DataLoaders(DataLoader(rows[:61], bs=8, shuffle=True), DataLoader(rows[61:], bs=8), device=torch.device("cpu"))


def network():
    layers = [torch.nn.Linear(6, 32, bias=False), torch.nn.BatchNorm1d(32), torch.nn.ReLU(), torch.nn.Dropout(0.1)]
    return torch.nn.Sequential(*layers, torch.nn.Linear(32, 2))


def show(learner):
    print([[float(value) for value in row] for row in learner.recorder.values])


callbacks = [SaveModelCallback(fname="best"), EarlyStoppingCallback(patience=3), GradientClip(1.0)]
learner = Learner(data, network(), loss_func=torch.nn.CrossEntropyLoss(), metrics=accuracy, cbs=callbacks)
with learner.no_bar(), learner.no_logging():
    learner.fit_one_cycle(3, 0.02)
    show(learner)
    learner.freeze()
    learner.unfreeze()
    learner.fit(1, 0.005)
    show(learner)
    print([float(value) for value in learner.validate()])
    print([int(learner.model.eval()(inputs).argmax(1).sum()) for inputs, _ in data.valid])
    print(float(F.cross_entropy(learner.model.eval()(x), y)))
torch.save(learner.model.state_dict(), "model.pt")
learner.save("last", with_opt=False)
print(learner.load("last", with_opt=False).model.eval()(x[:3]).sum().item())
