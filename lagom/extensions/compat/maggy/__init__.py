"""Runs unmodified programs written for Maggy, without Maggy, once this package is imported.

Within a lagom run, and under ``lagom run``, the program's own import of maggy imports this package. See Note [Maggy].
"""

from __future__ import annotations

from lagom.extensions.compat.maggy.maggy_modules import served

__all__ = ["install", "installed", "remove"]

install, installed, remove = served.install, served.installed, served.remove
install()


# Note [Maggy]
#
# A finder at the start of sys.meta_path answers for "maggy" and its submodules (maggy_modules.py). Maggy had two public
# config classes: `maggy.experiment_config` with train_set and test_set, and later `maggy.config` with dataset=[...].
# Both are one class here. A Maggy program is a driver program: it starts the ranks itself, by `experiment.lagom`, so
# `lagom run` runs it once, in its own process, and not on every rank.
#
# Differences from a program for lagom, as in Maggy: a batch size is each rank's own (batches="per_rank"), except in
# trials; a data set that the config lacks reaches the function as None; the stage in deepspeed_config is used if
# zero_lvl is 0. Without GPUs, forwards run in bf16 if DeepSpeed's config asks for fp16, which DeepSpeed has for GPUs
# only.
#
# Differences from Maggy: test sets are evaluated exactly, not padded; a loader with shuffle=True has a new order in
# each epoch; loader workers work; a function may return anything.
