"""Ablation studies on Spark: layers, and columns of a DataFrame."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lagom import experiment
from lagom.config import AblationConfig, AblationStudy


@pytest.mark.parametrize("spark", ["local[2]", "local-cluster", "connect"], indirect=True, scope="session")
@pytest.mark.soak  # tests/extensions/search/test_ablate.py shows it by default
def test_layers_and_columns_of_a_frame_are_left_out(spark: Any, tmp_path: Path) -> None:
    rows = [(float(age), 2.0 * age % 7, age % 3, 3.0 * age) for age in range(30)]
    frame = spark.createDataFrame(rows, "age double, fare double, pclass long, price double")

    class Net(nn.Module):
        """Two layers on three columns."""

        def __init__(self) -> None:
            super().__init__()
            self.middle = nn.Linear(3, 3)
            self.last = nn.Linear(3, 1)

        def forward(self, x: Any) -> Any:
            """Return numbers of shape (B, 1)."""
            return self.last(self.middle(x))

    def train(module: Any, train_set: Any) -> Any:
        from lagom.data import ParquetLoader

        model = module()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        for batch in ParquetLoader(train_set, 10):
            x = torch.stack([batch[name].float() for name in ("age", "fare", "pclass")], 1)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x).squeeze(1), batch["price"].float())
            loss.backward()
            optimizer.step()
        seen = {name: batch[name].unique().tolist() for name in ("age", "fare", "pclass")}
        return {"loss": loss.item(), "seen": seen, "layers": len(model.state_dict())}

    study = AblationStudy(label_name="price")
    study.features.include("age", "pclass")
    study.model.layers.include("middle")
    given: dict[str, Any] = {"module": Net, "train_set": frame, "optimization_key": "loss", "direction": "min"}
    given |= {"launcher": "spark", "run_dir": tmp_path / "runs", "seeds": 2, "ablation_study": study}
    result = experiment.lagom(train, AblationConfig(**given))
    assert [trial["error"] for trial in result.trials] == [""] * 8
    returned = {trial["params"]["without"]: trial["returned"] for trial in result.trials}
    assert len(returned[""]["seen"]["age"]) == 10
    assert returned["feature age"]["seen"] == {**returned[""]["seen"], "age": [0.0]}
    assert returned["feature pclass"]["seen"] == {**returned[""]["seen"], "pclass": [0]}
    assert (returned[""]["layers"], returned["layer middle"]["layers"]) == (4, 2)
    assert [effect["component"] for effect in result.effects] == ["feature age", "feature pclass", "layer middle"]
    assert all(effect["low"] <= effect["difference"] <= effect["high"] for effect in result.effects)
    study.features.include("pclas")
    with pytest.raises(ValueError, match=r"DataFrame has no feature 'pclas'; did you mean 'pclass'\?"):
        experiment.lagom(train, AblationConfig(**given))
