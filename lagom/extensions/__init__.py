"""Optional parts of lagom: each folder is one, and the trunk (all other folders) imports none of them by name.

search: many trials of a function; data: Parquet, Delta and petastorm tables; scoring: the trained model applied to
tables; resume: snapshots; zero: sharded optimizers, gradients and parameters; verify: rehearsals that are compared;
observe: report, timeline, doctor, debugger, trackers; compat: programs written for Horovod, Maggy and petastorm.
"""
