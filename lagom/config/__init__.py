"""Settings of a run, one file for each config class."""

from lagom.config.torch_distributed import TorchDistributedConfig

__all__ = ["TorchDistributedConfig"]
