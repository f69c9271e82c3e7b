"""``mlflow_state``: the active runs, experiment and addresses of MLflow in this process, for a snapshot."""

from __future__ import annotations

import importlib
import sys
import threading
from typing import Any

from lagom.errors import LagomError

_FLUENT = "mlflow.tracking.fluent"
_VARIABLES = {
    _FLUENT: ("_active_experiment_id",),
    "mlflow.tracking._tracking_service.utils": ("_tracking_uri",),
    "mlflow.tracking._model_registry.utils": ("_registry_uri",),
}
"""Variables of MLflow's modules."""
_OF_THREAD = ("_active_run_stack", "_last_active_run_id", "_last_logged_model_id")
"""Thread-local variables of the fluent module."""
_AUTOLOG = "mlflow.utils.autologging_utils"


def mlflow_state() -> dict[str, Any] | None:
    """Return the state of MLflow in the main thread; None if it was not imported. May be called in a fork.

    Raises:
        LagomError: if the program uses MLflow's autolog, which cannot be restored in another process.
    """
    fluent: Any = sys.modules.get(_FLUENT)
    if fluent is None:
        return None
    autolog: Any = sys.modules.get(_AUTOLOG)
    if autolog is not None and any(autolog.AUTOLOGGING_INTEGRATIONS.values()):
        raise LagomError("the program uses MLflow's autolog")
    thread = threading.main_thread().ident
    own = {name: getattr(fluent, name).get_all_thread_values() for name in _OF_THREAD if hasattr(fluent, name)}
    return {
        "modules": {
            module: {name: vars(sys.modules[module])[name] for name in names if name in vars(sys.modules[module])}
            for module, names in _VARIABLES.items()
            if module in sys.modules
        },
        "thread": {name: values[thread] for name, values in own.items() if thread in values},
    }


def set_mlflow_state(state: dict[str, Any] | None) -> None:
    """Restore the state that ``mlflow_state`` has returned in another process; None changes nothing."""
    if state is None:
        return
    for module, values in state["modules"].items():
        vars(importlib.import_module(module)).update(values)
    fluent: Any = importlib.import_module(_FLUENT)
    for name, value in state["thread"].items():
        getattr(fluent, name).set(value)
