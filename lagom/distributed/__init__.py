"""Programs that call ``torch.distributed`` themselves: they find the run's ranks, and patches are off.

Start with ``init_process_group.py``.
"""
