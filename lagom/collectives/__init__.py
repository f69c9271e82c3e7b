"""Exchanges of tensors between ranks.

Start with ``group.py`` (``Group``: all exchanges of a run). ``transport.py`` says what a transport is, and
``transports.py`` chooses one: shared memory, hosts, sockets, gloo, NCCL, or copies on the CPU.
``agreement_exchange.py`` compares signatures of the ranks' exchanges before it exchanges numbers. Ranks wait for each
other in ``csrc/waiting.cpp`` (shared memory), ``sockets/mesh.py`` and ``host_messages.py``.
"""
