"""Arguments of Python calls as their users write them: numpy numbers, enums, paths, tables, answers."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Set
from enum import Enum
from typing import Any

import numpy as np

from foreshard.errors import SpecError
from foreshard.spec.cluster import Cluster
from foreshard.spec.model import Model
from foreshard.spec.plan import Plan
from foreshard.spec.plan_file import plan_of_data
from foreshard.spec.prediction import Prediction

NamedModel = Model | str | os.PathLike[str] | Mapping[str, Any]
"""A model, its name or file, or what its config.json holds."""
NamedCluster = Cluster | str | os.PathLike[str] | Mapping[str, Any]
"""A cluster, its name, shorthand or file, or what a cluster file holds."""
NamedPlan = Plan | str | os.PathLike[str] | Mapping[str, Any] | Prediction
"""A plan, its file, what that holds, or an answer that has one, of a search too."""


def plain(value: Any) -> Any:
    """Return a value as numbers, texts, tuples and dicts of Python; what is none of these as it is.

    Examples
    --------
    >>> plain(np.int64(2)), plain({np.int64(3): np.float64(1.5)}), plain(range(1, 3)), plain(np.array([1, 2]))
    (2, {3: 1.5}, (1, 2), (1, 2))
    """
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.ndim == 0):
        return value.item()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {plain(key): plain(one) for key, one in value.items()}
    if isinstance(value, list):
        return [plain(one) for one in value]
    if isinstance(value, range | np.ndarray | tuple):
        return tuple(plain(one) for one in value)
    if isinstance(value, Set):
        return tuple(sorted((plain(one) for one in value), key=str))
    if type(value).__module__ == "torch" and type(value).__name__ == "dtype":
        return str(value)
    return value


def named_model(model: Any) -> Model | str:
    """Return a model, or its name as a text: a path, or what a ``config.json`` holds, is one of them.

    Raises
    ------
    SpecError
        For what is none of these.
    """
    from foreshard.catalog.hf.load import model_from_config

    if isinstance(model, os.PathLike):
        model = os.fspath(model)
    if hasattr(model, "to_dict") and hasattr(model, "model_type"):  # a configuration of transformers
        model = model.to_dict()
    if isinstance(model, Mapping):
        return model_from_config(model, name=str(model.get("_name_or_path") or "config"), file="config")
    if not isinstance(model, Model | str):
        rule = "A model is a name, the path of a config.json, what that holds, or a Model"
        raise _none_of("model", model, rule, "llama3-8b")
    return model


def named_cluster(cluster: Any) -> Cluster:
    """Return a cluster of its name, shorthand, file, or what a cluster file holds.

    Raises
    ------
    SpecError
        For what is none of these.
    """
    from foreshard.catalog.clusters import cluster_of_tables, load_cluster

    if isinstance(cluster, Cluster):
        return cluster
    if isinstance(cluster, Mapping):
        return cluster_of_tables(plain(cluster), "cluster")
    if not isinstance(cluster, str | os.PathLike):
        rule = "A cluster is a name, a shorthand, the path of a TOML file, what that holds, or a Cluster"
        raise _none_of("cluster", cluster, rule, "2x8xh100")
    return load_cluster(os.fspath(cluster))


def named_plan(plan: Any, load: Callable[[str], Plan]) -> tuple[Plan, str | None]:
    """Return a plan of its file, read by `load`, or of what holds it; and the file, if it is of one.

    Raises
    ------
    SpecError
        For what holds none.
    """
    if isinstance(plan, str | os.PathLike):
        return load(os.fspath(plan)), os.fspath(plan)
    held = plan.plans[0] if getattr(plan, "plans", None) else plan
    held = getattr(held, "plan", held)
    if isinstance(held, Mapping):
        return plan_of_data(plain(held)), None
    if not isinstance(held, Plan):
        rule = "A plan is the path of its file, what that holds, a Plan, or an answer that has one"
        raise _none_of("plan", plan, rule, "plan.json")
    return held, None


def _none_of(kind: str, value: Any, rule: str, example: str) -> SpecError:
    return SpecError(f"no {kind}: {repr(value)[:80]}", key=kind, rule=rule, fix=f"Write it like {example!r}")
