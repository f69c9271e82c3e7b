"""MLflow, TensorBoard and Weights & Biases: values that all ranks log are logged once, by rank 0.

Start with ``mlflow.py``.
"""
