"""Programs that call ``torch.distributed`` themselves: their group is the run's ranks, and lagom's patches are off.

Start with ``init_process_group.py``.
"""
