"""docs/appendix/trials.md: its table of settings is that of the config."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from lagom.config import HyperparameterOptConfig, Searchspace, TorchDistributedConfig
from lagom.settings import field_texts

PAGE = Path(__file__).parents[3] / "docs" / "appendix" / "trials.md"


def test_every_setting_stands_in_the_page_with_its_default_and_meaning() -> None:
    rows = [line.split(" | ") for line in PAGE.read_text().splitlines() if re.match(r"\| `\w+` \| ", line)]
    found = {row[0].strip("|` "): (row[1].strip("`"), " | ".join(row[2:]).removesuffix(" |")) for row in rows}
    plain = HyperparameterOptConfig(searchspace=Searchspace(x=("DOUBLE", [0, 1])), num_trials=1)
    shared = {
        each.name: field_texts(TorchDistributedConfig)[each.name] for each in dataclasses.fields(TorchDistributedConfig)
    }
    wanted, unset = {}, ("searchspace", "num_trials", "direction")
    for each in dataclasses.fields(HyperparameterOptConfig):
        text = field_texts(HyperparameterOptConfig)[each.name]
        if text != shared.get(each.name):
            default = getattr(plain, each.name) if each.name not in unset else None
            wanted[each.name] = repr(default).replace("'", '"'), " ".join(text.split()).replace("``", "`")
    assert found == wanted
