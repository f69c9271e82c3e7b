"""A library that has torch's function by its name since before any run."""

from torch.distributed import init_process_group


def init() -> None:
    """Make the group."""
    init_process_group("gloo")
