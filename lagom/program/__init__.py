"""The user's program as source: a script or notebook, what its function asks for, what travels with it.

Start with ``signature.py`` (which arguments the function is given) and ``detect_distributed.py`` (whether the program
already calls ``torch.distributed``, told from its code).
"""
