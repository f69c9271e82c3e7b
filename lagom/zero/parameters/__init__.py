"""ZeRO level 3: each rank holds a part of every large parameter, and all of it only while it is used.

Start with ``shards.py``; ``dispatch.py`` and ``memory_access.py`` see the uses.
"""
