"""Functions with which rooms patch torch and other libraries, and undo the patches.

Start with ``replace.py``: no other file sets an attribute of torch.
"""
