"""A training job: the user's layers, samples, loss and optimizer, from a file of plain PyTorch.

A job file defines `model()`, `dataset()`, `loss(output, batch)` and `optimizer(params)`. It is the user's own
program and runs with this process's rights; nothing of it comes over the network.
"""

from __future__ import annotations

import functools
import json
import math
import random
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from importlib.util import module_from_spec, spec_from_file_location
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import DataLoader, default_collate

from foreshard.errors import SpecError
from foreshard.profile.batches import as_tuple
from foreshard.runtime.job.layer_builders import SEEDING, Builder, Key, Tied, builders_of, layers_of
from foreshard.runtime.job.user_code import in_file, user_code

REQUIRED = ("model", "dataset", "loss", "optimizer")
OPTIONAL = ("inputs", "collate", "lr", "fixed_shapes", "tied", "tensor_plan", "on_step", "evaluate", "lora")
_MEANT = {
    "collate_fn": "collate",
    "lr_schedule": "lr",
    "lr_lambda": "lr",
    "scheduler": "lr",
    "eval": "evaluate",
    "validate": "evaluate",
}
"""Usual names of what a job may define."""
_INPUT_KEYS = ("input_ids", "pixel_values", "x", "inputs")
_RULE = "A job defines model(), dataset(), loss(output, batch) and optimizer(params)"
_LR_RULE = "It returns the factor on the learning rate, a number"
_TIED_RULE = "tied has groups of (layer, parameter name)"
_LOSS_RULE = "It returns the sum over what is counted, and the count"
_OPTIMIZER_RULE = "It returns a torch.optim.Optimizer over the parameters it is given"
_BATCH_STATISTICS = (
    "BatchNorm in training takes its statistics from the samples of one micro-batch on one rank: the result "
    "depends on the plan. See docs/runtime_jobs.md for norms that do not."
)


@dataclass(slots=True, kw_only=True)
class Job:
    """A training job.

    Attributes
    ----------
    builders : list of callables
        One per layer; each returns a new module of the layer, with the same values every time.
    dataset : map or iterable dataset
    loss : callable of (output, batch)
        Returns the sum over what is counted, and the count (tokens, samples).
    optimizer : callable of a list of parameters, or of (name, parameter)
    collate : callable of a list of samples
    inputs : callable of a batch
        Returns the inputs of the first layer.
    lr : callable of the step, optional
        Factor on the optimizer's learning rate.
    fixed_shapes : bool
        Whether every sample has the same shape in every step.
    tied : tuple of groups of (layer, parameter name)
        Names of one parameter.
    tensor_plan : mapping of module name to role
        Which weights tensor-parallel ranks hold in parts, in layers without a plan of their own.
    path : str or None
    on_step : callable of (step, metrics), optional
        Called on the leader after every step, with its line of metrics.jsonl.
    evaluate : callable of (model, step), optional
        Returns named numbers; `model` is the whole model, see `WholeModel`.
    names : mapping of (layer, name) to name
        Names of parameters and buffers in the whole model, where it is one of transformers.
    config : mapping, optional
        Its configuration.
    lora : str, optional
        The low-rank adapters of its model, in the words of a plan: RANK[:TARGET(+TARGET)*].
    """

    builders: list[Builder]
    dataset: Any
    loss: Callable[[Any, Any], tuple[Tensor, Any]]
    optimizer: Callable[[list[Any]], torch.optim.Optimizer]
    collate: Callable[[list[Any]], Any] = default_collate
    inputs: Callable[[Any], Any] = field(default=lambda batch: first_input(batch))
    lr: Callable[[int], float] | None = None
    fixed_shapes: bool = True
    tied: Tied = ()
    tensor_plan: Mapping[str, str] = field(default_factory=dict)
    path: str | None = None
    on_step: Callable[[int, Mapping[str, Any]], Any] | None = None
    evaluate: Callable[[Any, int], Mapping[str, float]] | None = None
    names: Mapping[Key, str] = field(default_factory=dict)
    config: Mapping[str, Any] | None = None
    lora: str | None = None

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return len(self.builders)

    def layer(self, index: int) -> nn.Module:
        """Return a new module of a layer, with its initial values.

        Raises
        ------
        SpecError
            When the job's own code fails.
        """
        with user_code(f"layer {index}", self.path, rule="Every layer can be built at any time"):
            layer = self.builders[index]()
        if any(isinstance(part, _BatchNorm) and part.training for part in layer.modules()):
            warnings.warn(_BATCH_STATISTICS, stacklevel=2)
        return layer

    def in_double(self) -> Job:
        """Return the job in double precision: its layers, and the inputs of the first one."""
        return replace(
            self,
            builders=[_doubled(builder) for builder in self.builders],
            inputs=lambda batch: _to_double(self.inputs(batch)),
        )

    @classmethod
    def of(
        cls,
        layers: Any,
        dataset: Any,
        loss: Any,
        optimizer: Any,
        *,
        seed: int = 0,
        tied: Iterable[Iterable[Key]] = (),
        **more: Any,
    ) -> Job:
        """Return the job of a model given as layers, as `nn.Sequential`, or as a model of transformers.

        Parameters
        ----------
        layers : sequence of modules or of callables giving modules, nn.Sequential, PreTrainedModel
            Callables are called only for layers that a rank holds, each with a seed of its own.
        dataset, loss, optimizer
            As the attributes.
        seed : int
            Of initial values, for callables.
        tied : groups of (layer, parameter name), optional
            For callables; modules are tied by holding the same parameter.
        """
        path, model = more.get("path"), layers
        with in_file(path):
            _check_parts(more)
            layers = layers_of(model, path)
            builders, found = builders_of(layers, seed, _keys(tied))
            _check_readable(dataset)
        if hasattr(model, "config"):
            more["names"] = _whole_names(model, layers)
            more["config"] = json.loads(model.config.to_json_string(use_diff=False))
            more["config"]["architectures"] = [type(model).__name__]
        checks = {"collate": None, "inputs": None, "on_step": None, "lr": _checked_factor}
        for name, check in {**checks, "evaluate": _checked_values}.items():
            if more.get(name) is not None:
                more[name] = _guarded(more[name], name, path, check)
        loss = _guarded(loss, "loss", path, _checked_loss)
        optimizer = _guarded_optimizer(optimizer, path)
        return cls(builders=builders, dataset=dataset, loss=loss, optimizer=optimizer, tied=found, **more)


def load_job(path: str, *, seed: int = 0) -> Job:
    """Return the job that a Python file defines.

    Torch, numpy and random are seeded before model() and dataset() run, so all ranks get the same values.

    Raises
    ------
    SpecError
        When the file is missing, does not run, or does not define what a job needs.
    """
    module = _imported(path)
    lacking = [name for name in REQUIRED if not callable(getattr(module, name, None))]
    if lacking:
        names, fix = ", ".join(f"{name}()" for name in lacking), "See examples/jobs/gpt_job.py"
        raise SpecError(f"no {names}", file=path, key=lacking[0], rule=_RULE, fix=fix)
    more = {name: found for name in OPTIONAL if (found := getattr(module, name, None)) is not None}
    _warn_of_unread(module, path)
    if callable(more.get("tensor_plan")):
        with user_code("tensor_plan", path):
            more["tensor_plan"] = more["tensor_plan"]()
    made = {}
    for name in ("model", "dataset"):
        with SEEDING, user_code(name, path):
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed % 2**32)  # the job may use numpy's global generator
            made[name] = getattr(module, name)()
    return Job.of(made["model"], made["dataset"], module.loss, module.optimizer, seed=seed, path=path, **more)


def _doubled(builder: Builder) -> Builder:
    return lambda: builder().double()


def _to_double(value: Any) -> Any:
    """Return tensors of floating point in double precision, others as they are."""
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    return type(value)(map(_to_double, value)) if isinstance(value, tuple | list) else value


def first_input(batch: Any) -> Any:
    """Return the inputs of the first layer in a batch: the first of a pair, or a usual name of inputs."""
    if isinstance(batch, dict):
        for key in _INPUT_KEYS:
            if key in batch:
                return batch[key]
        raise SpecError(
            f"a batch with {', '.join(map(str, batch))}",
            key="inputs",
            rule=f"The first layer takes {', '.join(_INPUT_KEYS)} of a batch",
            fix="Define inputs(batch) in the job",
        )
    return batch[0] if isinstance(batch, tuple | list) else batch


def _whole_names(model: nn.Module, layers: Iterable[nn.Module]) -> dict[Key, str]:
    """Return the name in the model of every parameter and buffer of its layers: they are the same objects."""
    names = {id(tensor): name for name, tensor in reversed(list(_tensors_of(model)))}
    return {
        (layer, name): names[id(tensor)]
        for layer, module in enumerate(layers)
        for name, tensor in _tensors_of(module)
        if id(tensor) in names
    }


def _tensors_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _keys(tied: Iterable[Iterable[Key]]) -> Tied:
    try:
        groups = tuple(tuple((layer, name) for layer, name in group) for group in tied)
    except (TypeError, ValueError):
        groups = (((-1, str(tied)),),)
    for layer, name in (key for group in groups for key in group):
        if not isinstance(layer, int) or layer < 0 or not isinstance(name, str):
            fix = 'Write it like [((0, "words.weight"), (7, "scores.weight"))]'
            raise SpecError(f"{name!r} is no name", key="tied", rule=_TIED_RULE, fix=fix)
    return groups


def _check_parts(parts: Mapping[str, Any]) -> None:
    """Raise for an optional part of a job that is not what it should be: it would be left out in silence."""
    functions = ("collate", "inputs", "lr", "on_step", "evaluate")
    kinds: dict[str, tuple[Callable[[Any], bool], str]]
    kinds = {name: (callable, "a function") for name in functions}
    kinds["fixed_shapes"] = (lambda value: isinstance(value, bool), "True or False")
    kinds["tensor_plan"] = (_is_roles, "roles by name of a module")
    kinds["lora"] = (lambda value: isinstance(value, str), "a text as 16 or 16:q+v")
    for name, (is_right, what) in kinds.items():
        value = parts.get(name)
        if value is not None and not is_right(value):
            raise SpecError(
                f"{name} is of type {type(value).__name__}",
                key=name,
                rule=f"{name} is {what}",
                fix="Leave it out, or see docs/runtime_jobs.md",
            )


def _is_roles(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(each, str) for pair in value.items() for each in pair
    )


def _warn_of_unread(module: Any, path: str) -> None:
    """Warn of functions whose names are nearly those that a job may define: nothing calls them."""
    missing = [name for name in OPTIONAL if not hasattr(module, name)]
    for name, value in vars(module).items():
        own = callable(value) and getattr(value, "__module__", "") == module.__name__
        near = _MEANT.get(name) or next(iter(get_close_matches(name, OPTIONAL, n=1, cutoff=0.8)), None)
        if own and near in missing:
            warnings.warn(f"{path} defines {name}, which is not read. Did you mean {near!r}?", stacklevel=2)


def _guarded(function: Any, name: str, path: str | None, check: Callable[..., Any] | None = None) -> Any:
    """Return a function of the job whose errors name the job.

    `check` takes what it returns and what it was given, and returns what the runtime takes.
    """

    def guarded(*given: Any) -> Any:
        with user_code(name, path):
            found = function(*given)
        if check is None:
            return found
        with in_file(path):
            return check(found, *given)

    return functools.update_wrapper(guarded, function) if hasattr(function, "__name__") else guarded


def _checked_factor(found: Any, step: int) -> float:
    """Return the factor on the learning rate, which is a finite number."""
    try:
        factor = float(found)
    except (TypeError, ValueError):
        factor = math.nan
    if not math.isfinite(factor):
        what, fix = f"lr gave {found} for step {step}", "Return 1.0 for no change"
        raise SpecError(what, key="lr", value=step, rule=_LR_RULE, fix=fix)
    return factor


def _guarded_optimizer(function: Any, path: str | None) -> Any:
    """Return the optimizer with a check; one of `named_parameters` gets names with the parameters."""
    make = _guarded(function, "optimizer", path, _checked_optimizer)
    code = getattr(function, "__code__", None)
    takes_names = code is not None and code.co_varnames[:1] == ("named_parameters",)

    def guarded(params: list[Any]) -> torch.optim.Optimizer:
        named = [p if isinstance(p, tuple) else (str(number), p) for number, p in enumerate(params)]
        found: torch.optim.Optimizer = make(named if takes_names else [parameter for _, parameter in named])
        return found

    return guarded


def _checked_optimizer(found: Any, params: list[Any]) -> torch.optim.Optimizer:
    """Return an optimizer, which is one of the parameters that it was given."""
    given = {id(each[1] if isinstance(each, tuple) else each) for each in params}
    if not isinstance(found, torch.optim.Optimizer):
        what, fix = f"gave {type(found).__name__}", "Return torch.optim.AdamW(params, lr=1e-3), or another"
    elif {id(parameter) for group in found.param_groups for parameter in group["params"]} - given:
        what = "gave an optimizer of other parameters"
        fix = "Give it params: they are those that a rank updates"
    else:
        return found
    raise SpecError(f"optimizer(params) {what}", key="optimizer", rule=_OPTIMIZER_RULE, fix=fix)


def _checked_loss(found: Any, output: Any, batch: Any) -> tuple[Tensor, Any]:
    """Return a loss, which is a sum and a count: gradients are added up over ranks."""
    if not isinstance(found, tuple | list) or len(found) != 2:
        fix = "Use reduction='sum' and return (sum, number of targets)"
        raise _refused_loss(type(found).__name__, fix)
    total, count = found
    if not isinstance(total, Tensor) or total.numel() != 1:
        kind = f"of shape {list(total.shape)}" if isinstance(total, Tensor) else type(total).__name__
        raise _refused_loss(f"a sum {kind}", "Use reduction='sum'")
    if not isinstance(count, Real | Tensor) or (isinstance(count, Tensor) and count.numel() != 1):
        what = f"a count that is a {type(count).__name__}, not a number"
        raise _refused_loss(what, "Return (sum, number of targets)")
    trains = torch.is_grad_enabled() and any(
        isinstance(each, Tensor) and each.requires_grad for each in as_tuple(output)
    )
    if trains and not total.requires_grad:
        rule = "It returns a sum that depends on the output: nothing would be trained"
        raise _refused_loss("a sum without a gradient", "Leave out detach() and no_grad()", rule)
    if not 0 <= float(count) < math.inf:
        fix = "Return (sum, number of targets); 0 where a micro-batch has none"
        raise _refused_loss(f"a count of {float(count):g}", fix)
    return total, count


def _refused_loss(given: str, fix: str, rule: str = _LOSS_RULE) -> SpecError:
    return SpecError(f"loss gave {given}", key="loss", rule=rule, fix=fix)


def _checked_values(found: Any, model: Any, step: int) -> dict[str, float]:
    """Return what an evaluation gives, which are numbers by name."""
    if isinstance(found, Mapping) and all(_is_number(value) for value in found.values()):
        return {str(name): float(value) for name, value in found.items()}
    what, rule = f"evaluate gave {type(found).__name__}", "It returns numbers by name"
    raise SpecError(what, key="evaluate", rule=rule, fix='Return {"loss": total / count}')


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, Real) or (isinstance(value, np.ndarray) and value.size == 1)


def _check_readable(dataset: Any) -> None:
    is_map = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    has_no_samples = isinstance(dataset, str | bytes | Mapping | DataLoader)  # texts, splits by name, batches
    if has_no_samples or (not is_map and not hasattr(dataset, "__iter__")):
        raise SpecError(
            f"dataset() gave {type(dataset).__name__}",
            key="dataset",
            rule="A dataset has __len__ and __getitem__, or __iter__, and gives single samples",
            fix="Return one of torch.utils.data, a list or a tensor; of a loader its dataset",
        )


def _imported(path: str) -> Any:
    file = Path(path)
    if not file.is_file():
        raise SpecError("no such file", file=path, key="JOB", rule=_RULE, fix="See examples/jobs/gpt_job.py")
    spec = spec_from_file_location(f"foreshard_job_{file.stem}", file.resolve())
    if spec is None or spec.loader is None:
        raise SpecError(
            "not a Python file", file=path, key="JOB", rule=_RULE, fix="Name a file that ends in .py"
        )
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(file.resolve().parent))
    try:
        with user_code("import", path):
            spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(file.resolve().parent))
    return module
