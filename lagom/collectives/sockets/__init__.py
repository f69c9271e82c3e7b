"""Messages between ranks over sockets of lagom's own: start with ``mesh.py`` (``Mesh``), and see who gets in, and how.

``connect.py`` connects ranks, ``handshake.py`` has the proofs with which they do, and ``encryption.py`` what encrypts
between hosts. ``value_server.py`` keeps values by name for all ranks.
"""
