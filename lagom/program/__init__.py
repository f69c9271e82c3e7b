"""The user's program as source: script or notebook, arguments of the function, modules that are sent with a run.

Start with ``signature.py`` (which arguments the function gets) and ``detect_distributed.py`` (whether the code of the
program makes a process group of its own). ``unreadable_data.py`` refuses data that no ``DataLoader`` reads.
"""
