"""What a rank knows of the program while it runs: its batch, its leaves, its modules, its random numbers.

Plain state without patches: ``loader_pass.py`` (which batch, whose share), ``batch_origin.py`` (which tensor comes from
which batch), ``leaves.py`` (what a backward reaches), ``random_streams.py`` (which generators ranks have in common).
"""
