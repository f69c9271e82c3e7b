"""The backend "lagom" of ``torch.distributed``, for programs that make process groups themselves.

Start with ``registration.py``.
"""
