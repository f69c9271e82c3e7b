"""Runs an unmodified program's forwards, backwards and steps through DeepSpeed's engine (``backend="deepspeed"``).

Start reading at ``engine_patches.py``. No other room imports DeepSpeed.
"""
