"""Exchanges of tensors between ranks.

Start with ``group.py`` (``Group``: all exchanges of a run). ``transports.py`` chooses the transport: shared memory,
hosts or gloo. ``agreement_exchange.py`` compares signatures of the ranks' exchanges before it exchanges numbers.
"""
