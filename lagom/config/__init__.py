"""What a run is asked to be: one file per config class."""

from lagom.config.torch_distributed import TorchDistributedConfig

__all__ = ["TorchDistributedConfig"]
