"""Builds the layers of a job one at a time: with the same values on every rank and at any time."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from foreshard.errors import SpecError
from foreshard.runtime.job.user_code import user_code

Builder = Callable[[], nn.Module]
Key = tuple[int, str]
Tied = tuple[tuple[Key, ...], ...]
SEEDING = threading.RLock()
"""Held while the process's random generators are seeded: all threads share them."""


def builders_of(layers: Sequence[Any], seed: int, tied: Tied) -> tuple[list[Builder], Tied]:
    """Return a builder for each layer of a model, and the groups of tied names."""
    if not layers:
        raise _refused("model() gave no layers", "A model has a layer or more", "Return a list of layers")
    if all(isinstance(layer, nn.Module) for layer in layers):
        if tied:
            rule, fix = "Modules are tied by holding one parameter", "Leave tied out, or give callables"
            raise SpecError("tied names parameters of modules", key="tied", rule=rule, fix=fix)
        return [functools.partial(copy.deepcopy, layer) for layer in layers], tied_parameters(layers)
    if all(callable(layer) and not isinstance(layer, nn.Module) for layer in layers):
        builders = [_seeded(layer, seed, index) for index, layer in enumerate(layers)]
        return _with_tied(builders, tied), tied
    odd = next((each for each in layers if not callable(each)), None)
    if odd is not None:
        rule = "A layer is a module, or a callable that gives one"
        raise _refused(f"model() gave a {type(odd).__name__} among its layers", rule)
    raise _refused(
        "model() gave modules and callables mixed",
        "The list holds modules only or callables that give modules only",
        "Write lambda: before each module, or before none; a function is wrapped in a module",
    )


def layers_of(model: Any, path: str | None = None) -> list[Any]:
    """Return the layers that a job gives as a model."""
    if isinstance(model, nn.Sequential | nn.ModuleList | list | tuple):
        return list(model)
    if isinstance(model, nn.Module):
        from foreshard.runtime.job.hf_split import split

        return split(model)
    if isinstance(model, Iterable):
        with user_code("model", path):
            return list(model)
    rule = "It returns a list of layers, an nn.Sequential, or a model of transformers"
    raise _refused(f"model() gave {type(model).__name__}", rule)


def _refused(what: str, rule: str, fix: str = "See examples/jobs/gpt_job.py") -> SpecError:
    return SpecError(what, key="model", rule=rule, fix=fix)


def _seeded(build: Builder, seed: int, index: int) -> Builder:
    def built() -> nn.Module:
        with SEEDING, torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed * 1_000_003 + index)
            layer = build()
        if not isinstance(layer, nn.Module):
            what, rule = f"layer {index} gave {type(layer).__name__}", "A callable of the list gives a module"
            raise _refused(what, rule, "Return the module it builds")
        return layer

    return built


def _with_tied(builders: list[Builder], tied: Tied) -> list[Builder]:
    """Return builders whose tied parameters start with the values of the first of their group."""
    _check_tied(builders, tied)
    first = {key: group[0] for group in tied for key in group[1:]}

    def built(index: int, names: list[str]) -> nn.Module:
        layer = builders[index]()
        for name in names:
            source, own = first[index, name]
            with torch.no_grad():
                layer.get_parameter(name).copy_(builders[source]().get_parameter(own))
        return layer

    names = [[name for layer, name in first if layer == index] for index in range(len(builders))]
    return [
        functools.partial(built, index, names[index]) if names[index] else build
        for index, build in enumerate(builders)
    ]


def _check_tied(builders: Sequence[Builder], tied: Tied) -> None:
    """Check that tied names are parameters of one shape, each in one group."""
    shapes: dict[Key, torch.Size] = {}
    keys = [key for group in tied for key in group]
    for layer, name in keys:
        if not 0 <= layer < len(builders):
            raise SpecError(
                f"no layer {layer}",
                key="tied",
                value=layer,
                rule=f"The model has layers 0..{len(builders) - 1}",
                fix="Name a layer of them",
            )
        with torch.device("meta"):
            parameters = dict(builders[layer]().named_parameters())
        if name not in parameters:
            raise SpecError(
                f"layer {layer} has no parameter {name}",
                key="tied",
                value=name,
                rule=f"It has {', '.join(parameters) or 'none'}",
                fix="Name one of these",
            )
        shapes[layer, name] = parameters[name].shape
    for group in tied:
        if len({shapes[key] for key in group}) > 1 or len(group) < 2 or len(keys) != len(set(keys)):
            names = ", ".join(f"({layer}, {name!r}): {list(shapes[layer, name])}" for layer, name in group)
            raise SpecError(
                f"{names} cannot be one parameter",
                key="tied",
                rule="A group has two or more names of one shape, a name one group",
                fix="Tie parameters of one shape",
            )


def tied_parameters(layers: Sequence[nn.Module]) -> Tied:
    """Return the groups of names under which layers share a parameter."""
    names: dict[int, list[Key]] = {}
    for index, layer in enumerate(layers):
        for name, parameter in layer.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append((index, name))
    return tuple(tuple(group) for group in names.values() if len({layer for layer, _ in group}) > 1)
