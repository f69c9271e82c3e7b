"""Messages between the driver, host processes and ranks, as frames of JSON over sockets, and the facts of a run.

``server.py`` is the driver's end, ``client.py`` the end of a host process or a rank; ``framing.py`` has the format,
``tls.py`` the encryption. ``spec.py`` describes a run to a host process; ``rendezvous.py`` lets the tasks of a run find
each other; ``fetch.py`` copies large files from the driver.
"""
