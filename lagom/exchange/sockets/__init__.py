"""Messages between ranks over lagom's own sockets: start with ``mesh.py`` (``Mesh``).

``connect.py`` connects ranks, ``handshake.py`` has the proofs by which ranks recognise each other, and
``encryption.py`` encrypts connections between hosts. ``value_server.py`` keeps values by name for all ranks.
"""
