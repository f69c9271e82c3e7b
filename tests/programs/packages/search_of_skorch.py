"""skorch in scikit-learn's GridSearchCV, behind a scaler in a pipeline, with early stopping and a refit."""

import pickle

import numpy
import torch
from sklearn.model_selection import GridSearchCV, cross_val_predict
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import StandardScaler
from skorch import NeuralNetClassifier
from skorch.callbacks import EarlyStopping, EpochScoring

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
x = numpy.random.default_rng(0).normal(size=(90, 5))
y = (x[:, 0] * x[:, 1] > 0).astype("int64")


class Net(torch.nn.Module):
    def __init__(self, width=4, dropout=0.0):
        super().__init__()
        self.first, self.drop, self.last = (
            torch.nn.Linear(5, width),
            torch.nn.Dropout(dropout),
            torch.nn.Linear(width, 2),
        )

    def forward(self, inputs):
        return torch.softmax(self.last(self.drop(torch.relu(self.first(inputs)))), -1)


net = NeuralNetClassifier(
    Net,
    max_epochs=4,
    lr=0.1,
    batch_size=16,
    optimizer=torch.optim.Adam,
    iterator_train__shuffle=True,
    callbacks=[EpochScoring("roc_auc", lower_is_better=False), EarlyStopping(patience=2)],
    verbose=0,
)
pipeline = Pipeline([("scale", StandardScaler()), ("net", net)])
grid = {"net__lr": [0.01, 0.1], "net__module__width": [8, 32], "net__module__dropout": [0.0, 0.3]}
search = GridSearchCV(pipeline, grid, cv=3, scoring="neg_log_loss")
search.fit(x, y)
print(search.best_params_, search.best_score_)
print(search.cv_results_["mean_test_score"].tolist(), search.cv_results_["std_test_score"].tolist())
print(search.predict_proba(x[:7]).tolist())
print(cross_val_predict(search.best_estimator_, x, y, cv=3).tolist())
with open("model.pkl", "wb") as file:
    pickle.dump(search.best_estimator_, file)
with open("model.pkl", "rb") as file:
    print(pickle.load(file).predict_proba(x).sum(0).tolist())
