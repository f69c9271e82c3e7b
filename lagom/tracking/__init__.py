"""MLflow and TensorBoard: what all ranks log is logged once, by rank 0.

Start with ``mlflow.py``.
"""
