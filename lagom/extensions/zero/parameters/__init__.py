"""ZeRO level 3: each rank holds a shard of every large parameter, and the whole parameter only while it is used.

Start with ``shards.py``; ``dispatch.py`` and ``memory_access.py`` notice when the program uses a parameter.
"""
