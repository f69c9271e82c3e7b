"""Forwards of modules: on the rank's device, in its precision, with statistics of the whole batch.

Start with ``module.py`` (patches ``Module.__call__``). ``batchnorm.py`` (its arithmetic is in
``batchnorm_arithmetic.py``) and ``precision.py`` have their own patches.
"""
