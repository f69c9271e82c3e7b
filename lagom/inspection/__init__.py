"""Looks at a program's objects that run none of the program's code.

Start with ``reads.py``: attributes, slots and classes. ``state_parts.py`` copies and restores what can change in an
object.
"""
