"""Programs that call ``torch.distributed`` themselves: their group consists of the run's ranks, and patches are off.

Start with ``init_process_group.py``.
"""
