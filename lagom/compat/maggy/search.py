"""Stand-ins for Maggy's search and ablation, which lagom does not serve; using one is an error."""

from __future__ import annotations

from typing import Any, NoReturn

__all__ = ["Searchspace"]


def unserved(name: str, instead: str) -> type:
    """Return a class that stands for Maggy's ``name`` and raises when it is instantiated."""

    def __init__(self: Any, *args: Any, **named: Any) -> NoReturn:
        raise NotImplementedError(f"Maggy's {name} is not served by lagom; {instead}")

    return type(name, (), {"__init__": __init__, "__module__": __name__, "__doc__": f"Not served; {instead}."})


SEARCH = (
    "call experiment.lagom(train, TorchDistributedConfig(hparams=...)) for each trial, in a loop of your own or as the "
    "objective of a search such as Optuna's"
)

AblationConfig = unserved("AblationConfig", "call experiment.lagom for each variant of the module, in a loop")
HyperparameterOptConfig = unserved("HyperparameterOptConfig", SEARCH)
OptimizationConfig = unserved("OptimizationConfig", SEARCH)
Searchspace = unserved("Searchspace", SEARCH)
