"""The means by which rooms patch torch and other libraries: set attributes, and restore them.

Start with ``replace.py``: no other file sets an attribute of torch.
"""
