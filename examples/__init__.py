"""Short programs, each run as a script.

This is a package because petastorm installs a package ``examples``, which Python would otherwise import.
"""
