"""How long a training step takes, whether it fits in memory, what it costs, and why.

Decides times and bytes of whole steps. A model, a cluster and a plan go in, with a choice of engine and cost
source; a `Prediction` comes out, whose parts sum to the whole and whose step time has an interval. The time
of a task comes from a cost source: ``tasks/`` (formulas) or ``measured/`` (a profile). A new cost source is a
package beside them and a `StepSource` in ``step_source.py``; ``analytical/`` and ``graph/`` are the engines
that put tasks together. Peak memory is computed in ``memory.py``, of tables of plans in
``analytical/table.py``, of a measured job in ``measured/memory.py``. Read ``step.py`` first, then an
``engine.py``.
"""

from __future__ import annotations

from typing import Any

__all__ = ["predict", "predict_timeline"]


def __getattr__(name: str) -> Any:
    """Import the engines only when a prediction is asked for."""
    if name in __all__:
        from foreshard.predict import step

        return getattr(step, name)
    raise AttributeError(name)
