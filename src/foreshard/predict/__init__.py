"""Engines and cost sources behind one question: how long does a step take, and does it fit."""

from __future__ import annotations

from typing import Any

__all__ = ["predict", "predict_timeline"]


def __getattr__(name: str) -> Any:
    """Import the engines only when a prediction is asked for."""
    if name in __all__:
        from foreshard.predict import step

        return getattr(step, name)
    raise AttributeError(name)
