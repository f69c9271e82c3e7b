"""``save``: a scorer as a model of MLflow's flavour pyfunc, which needs no lagom where it is loaded."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from lagom.errors import LagomError
from lagom.extensions.scoring.by_value import pickling_by_value
from lagom.extensions.scoring.local_scoring import score_pandas

if TYPE_CHECKING:
    from lagom.extensions.scoring.row_scorer import RowScorer

_EXAMPLE_ROWS = 5
_NEEDED = ("torch", "numpy", "pandas", "pyarrow", "cloudpickle")


def save(
    make: Callable[..., RowScorer],
    path: str | os.PathLike[str] | None,
    name: str | None,
    example: Any,
    options: Mapping[str, Any],
) -> Any:
    """Save the scorer that ``make`` makes for ``example``; see ``Predictor.save_mlflow``."""
    if (path is None) == (name is None):
        raise ValueError("give path=, the folder to write, or name=, to log the model to MLflow's active run")
    try:
        import cloudpickle
        from mlflow import pyfunc
        from mlflow.models import infer_signature
    except ImportError as error:
        raise LagomError("a model is saved with MLflow: pip install mlflow-skinny pandas") from error
    rows = _rows(example)
    scorers: list[RowScorer] = []

    def kept(*table: Any) -> RowScorer:
        scorers.append(make(*table))
        return scorers[0]

    scored = score_pandas(kept, rows)
    scorer = scorers[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # integers may not be null, and are not: see nulls=
        signature = infer_signature(_plain(rows[list(scorer.columns)]), _plain(scored[scorer.schema.names]))
    given = {
        "signature": signature,
        "pip_requirements": [f"{package}=={version(package).partition('+')[0]}" for package in _NEEDED],
        **options,
    }
    with pickling_by_value(cloudpickle), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # hints about input_example, which the signature replaces
        if path is not None:
            return pyfunc.save_model(path=os.fspath(path), python_model=_python_model(scorer), **given)
        return pyfunc.log_model(name=name, python_model=_python_model(scorer), **given)


def _rows(example: Any) -> Any:
    """Return the first rows of an example as a DataFrame of pandas."""
    kind = type(example)
    home = kind.__module__.partition(".")[0]
    if home == "pandas":
        return example.head(_EXAMPLE_ROWS)
    if home == "pyarrow":
        return example.slice(0, _EXAMPLE_ROWS).to_pandas()
    if home == "pyspark":
        return example.limit(_EXAMPLE_ROWS).toPandas()
    raise ValueError(f"example is a {home}.{kind.__name__}; want a DataFrame of pandas or Spark, or an Arrow table")


def _plain(frame: Any) -> Any:
    """Return ``frame`` with lists in the place of numpy arrays, of which MLflow knows the types."""
    is_array = [name for name in frame if frame[name].dtype == object and hasattr(frame[name].iloc[0], "tolist")]
    return frame.assign(**{name: [_listed(cell) for cell in frame[name]] for name in is_array})


def _listed(cell: Any) -> Any:
    return [_listed(item) for item in cell] if hasattr(cell, "__len__") else cell


def _python_model(scorer: RowScorer) -> Any:
    from mlflow.pyfunc.model import PythonModel

    class RowScores(PythonModel):
        """Gives the outputs of a model for a DataFrame of pandas; defined here, so that it is pickled by value."""

        # Without annotations: MLflow would look for the types of columns there.
        def predict(self, context, model_input, params=None):  # type: ignore[no-untyped-def]
            return scorer.score_pandas(scorer.read_pandas(model_input), model_input.index)

    return RowScores()
