"""skorch: a classifier with a validation split, a checkpoint of the best epoch, and predictions."""

import numpy
import torch
from skorch import NeuralNetClassifier
from skorch.callbacks import Checkpoint

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
x = numpy.random.default_rng(0).normal(size=(100, 4))
y = (x[:, 0] > 0).astype("int64")


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def forward(self, inputs):
        return torch.softmax(self.layer(inputs), -1)


keep = Checkpoint(dirname="kept", monitor="valid_loss_best")
net = NeuralNetClassifier(
    Net, max_epochs=3, lr=0.5, batch_size=16, iterator_train__shuffle=True, callbacks=[keep], verbose=0
)
net.fit(x, y)
for row in net.history:
    print({name: round(float(row[name]), 6) for name in ("train_loss", "valid_loss", "valid_acc")})
probabilities = net.predict_proba(x)
print(probabilities.shape, round(float(probabilities.sum()), 6), net.score(x, y))
net.load_params(checkpoint=keep)
print(round(float(net.predict_proba(x)[:, 0].std()), 6))
