"""Settings of runs, searches and ablation studies, one file for each config class."""

from lagom.config.ablation import AblationConfig
from lagom.config.ablation_study import AblationStudy
from lagom.config.hyperparameter_opt import HyperparameterOptConfig
from lagom.config.searchspace import Searchspace
from lagom.config.torch_distributed import TorchDistributedConfig

__all__ = ["AblationConfig", "AblationStudy", "HyperparameterOptConfig", "Searchspace", "TorchDistributedConfig"]
