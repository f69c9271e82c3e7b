"""A module that a program imports in a function."""

NUMBER = 0


def count() -> None:
    global NUMBER
    NUMBER += 1
