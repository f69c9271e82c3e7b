"""Bytes that training takes of a device's memory, told from shapes before anything runs."""
