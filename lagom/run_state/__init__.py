"""State that a rank keeps about the running program: its batch, leaves, modules and random numbers.

State without patches: ``loader_pass.py`` (current batch and this rank's share), ``batch_origin.py`` (the batch that a
tensor comes from), ``leaves.py`` (tensors that a backward reaches), ``loss_terms.py`` (the share of each
term of a loss, and losses that are not averaged exactly). Patches: ``random_streams.py`` (generators that draw the
same numbers on all ranks, or different ones, and fresh seeds that are equal), ``device_moves.py`` and
``mixed_devices.py``, for programs that name no GPU.
"""
