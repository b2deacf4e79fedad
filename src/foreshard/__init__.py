"""Predicts, plans, runs and steers the distributed training of neural networks.

`api` has the public names, `cli` one file per verb. A prediction is made in `predict`, a plan in
`planner`, a training run in `runtime`, the next plan of a running job in `control`; docs/design.md has a
paragraph on each package.

>>> import foreshard
>>> model = foreshard.load_model("llama3-8b")
>>> cluster = foreshard.load_cluster("1x8xh100-sxm")
>>> prediction = foreshard.predict(model, cluster, tp=2, zero=1)
>>> prediction.memory.fits
True
"""

import sys
from types import ModuleType
from typing import Any

__version__ = "0.1.0"

_API = (
    "advise",
    "calibrate",
    "compare",
    "export",
    "import_plan",
    "load_cluster",
    "load_model",
    "load_plan",
    "make_plan",
    "plan",
    "predict",
    "predict_timeline",
    "profile",
    "report",
    "simulate",
    "validate",
    "whatif",
    "write_trace",
)
__all__ = ["__version__", *_API]


def __getattr__(name: str) -> Any:
    """Import the API when one of its names is first used."""
    if name in _API:
        from importlib import import_module

        if name in ("predict", "profile", "report"):
            return import_module(f"foreshard.{name}")
        return getattr(import_module("foreshard.api"), name)
    raise AttributeError(f"module 'foreshard' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


class _Verb(ModuleType):
    """A layer whose name is also a verb of the API: called, or asked for what it takes, it is the verb."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    @property
    def _function(self) -> Any:
        from foreshard import api

        return getattr(api, self.__name__.rpartition(".")[2])

    @property
    def __signature__(self) -> Any:
        from inspect import signature

        return signature(self._function)


class _Package(ModuleType):
    """The package; importing a layer named like a verb must not hide the verb."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _API and isinstance(value, ModuleType):
            value.__class__ = _Verb
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
