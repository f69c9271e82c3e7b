"""A library that imported torch's function by name before any run."""

from torch.distributed import init_process_group


def init() -> None:
    """Make the group."""
    init_process_group("gloo")
