"""APIs of Horovod, Maggy and petastorm, served by lagom or made to work beside it.

No other room has an import statement for this one: extensions/compat/compatible.py loads its packages by name.
"""
