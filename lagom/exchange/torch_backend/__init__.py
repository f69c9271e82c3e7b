"""The backend "lagom" of ``torch.distributed``, for programs that call ``init_process_group`` or ``new_group``.

Start with ``registration.py``.
"""
