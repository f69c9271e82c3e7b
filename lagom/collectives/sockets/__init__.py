"""Messages between ranks over sockets of lagom's own: start with ``mesh.py`` (``Mesh``), and see who gets in, and how.

``connect.py`` connects ranks, and ``handshake.py`` has the proofs with which they do.
"""
