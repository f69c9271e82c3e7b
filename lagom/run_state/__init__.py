"""State that a rank keeps about the running program: its batch, leaves, modules and random numbers.

State without patches: ``loader_pass.py`` (current batch and this rank's share), ``batch_origin.py`` (the batch that a
tensor comes from), ``leaves.py`` (parameters that a backward reaches), ``parameter_store.py`` (where the values of
parameters are), ``random_streams.py`` (generators that draw the same numbers on all ranks, and generators that draw
different ones). Patches: ``cuda_device.py`` and
``mixed_devices.py``, for programs that name no GPU; ``fresh_seeds.py``, for programs that ask for a fresh seed.
"""
