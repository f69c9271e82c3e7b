"""Functions with which lagom's packages patch torch and other libraries, and undo the patches.

Start with ``replace.py``: no other file replaces a function of torch.
"""
