"""A module of a program that has no functions."""

NUMBER = 0
