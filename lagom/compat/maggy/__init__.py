"""Programs written for Maggy run as they are, with no Maggy installed, once this has been imported.

Within a lagom run, and under ``lagom run``, that happens when the program imports maggy. See Note [Maggy].
"""

from __future__ import annotations

from lagom.compat.maggy.maggy_modules import served

__all__ = ["install", "installed", "remove"]

install, installed, remove = served.install, served.installed, served.remove
install()


# Note [Maggy]
#
# Maggy's names resolve to lagom: a finder in front of sys.meta_path answers for "maggy" and what is below it. There
# were two public spellings, `maggy.experiment_config` with train_set and test_set, and later `maggy.config` with
# dataset=[...]; both are the same class here. A Maggy program is a driver program: it starts the ranks itself, by
# `experiment.lagom`, so `lagom run` runs it once, in its own process, and not on every rank.
#
# What differs from a program of lagom's own: a batch size is each rank's own (batches="per_rank"), as it was there; a
# data set that the config lacks reaches the function as None; the stage in deepspeed_config counts where zero_lvl is 0;
# and where there are no GPUs, forwards that were to be in fp16 by DeepSpeed, which has that for GPUs only, are in bf16.
#
# What does not differ, though Maggy did otherwise: test sets are evaluated exactly, not padded; a loader shuffles when
# it says so, and anew in each epoch; loader workers work; what a function returns may be anything.
