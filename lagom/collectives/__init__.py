"""Exchanges of tensors between ranks.

Start with ``group.py`` (``Group``: all exchanges of a run); ``transports.py`` chooses the way: shared memory, hosts,
gloo. ``agreement_exchange.py`` compares what the ranks mean before it exchanges.
"""
