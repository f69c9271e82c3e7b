"""Exchanges of tensors and messages between ranks.

Start with ``group.py`` (``Group``: lagom's own exchanges in a run). ``transport.py`` says what a transport is, and
``transports.py`` chooses one: shared memory, ``HostTransport`` (several hosts), sockets, gloo, NCCL, or copies on the
CPU. ``agreement_exchange.py`` compares signatures of the ranks' exchanges before it uses their numbers, and packs small
gradients into the same message; ``requests.py`` lets a rank request an exchange; ``run_store.py`` keeps texts by name;
``torch_backend/`` is the backend "lagom" of torch.distributed. Ranks wait for each other in ``csrc/waiting.cpp``
(shared memory), ``sockets/mesh.py`` (messages), and ``csrc/ring.cpp`` or ``sockets/ring_stream.py`` (tensors between
hosts).
"""
