"""What driver, host processes and ranks say to each other: frames of JSON over sockets, and the facts of a run.

``server.py`` is the driver's end, ``client.py`` a rank's; ``framing.py`` has the format, ``tls.py`` the encryption.
``spec.py`` says all that a host process must know, ``rendezvous.py`` how the tasks of a run find each other.
"""
