"""What is trained: the user's layers, samples, loss and optimizer, read from a file of plain PyTorch.

A job file defines `model()`, `dataset()`, `loss(output, batch)` and `optimizer(params)`. It is the user's own
program and runs with this process's rights; nothing of it comes over the network.
"""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from foreshard.errors import SpecError

REQUIRED = ("model", "dataset", "loss", "optimizer")
OPTIONAL = ("inputs", "collate", "lr", "fixed_shapes")
_INPUT_KEYS = ("input_ids", "pixel_values", "x", "inputs")
_RULE = "A job defines model(), dataset(), loss(output, batch) and optimizer(params)"
_SEEDING = threading.Lock()
"""Torch draws first values from one generator for all threads."""
Key = tuple[int, str]


@dataclass(slots=True, kw_only=True)
class Job:
    """A training job.

    Attributes
    ----------
    builders : list of callables
        One per layer; each gives the layer's module, the same every time.
    dataset : map or iterable dataset
    loss : callable of (output, batch)
        Returns the sum over what is counted, and the count (tokens, samples).
    optimizer : callable of a list of parameters
    collate : callable of a list of samples
    inputs : callable of a batch
        What the first layer is given.
    lr : callable of the step, optional
        Factor on the optimizer's learning rate.
    fixed_shapes : bool
        Whether every sample has the same shape in every step.
    tied : tuple of groups of (layer, parameter name)
        Parameters that are one.
    path : str or None
    """

    builders: list[Callable[[], nn.Module]]
    dataset: Any
    loss: Callable[[Any, Any], tuple[Tensor, Any]]
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    collate: Callable[[list[Any]], Any] = default_collate
    inputs: Callable[[Any], Any] = field(default=lambda batch: first_input(batch))
    lr: Callable[[int], float] | None = None
    fixed_shapes: bool = True
    tied: tuple[tuple[Key, ...], ...] = ()
    path: str | None = None

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return len(self.builders)

    def layer(self, index: int) -> nn.Module:
        """Return a fresh module of a layer, with the values it starts from."""
        return self.builders[index]()

    @classmethod
    def of(cls, layers: Any, dataset: Any, loss: Any, optimizer: Any, *, seed: int = 0, **more: Any) -> Job:
        """Return the job of a model given as layers, as `nn.Sequential`, or as a model of transformers.

        Parameters
        ----------
        layers : sequence of modules or of callables giving modules, nn.Sequential, PreTrainedModel
            Of callables only the layers that a rank holds are built, each from a seed of its own.
        dataset, loss, optimizer
            As the attributes.
        seed : int
            Of the values that callables start from.

        Raises
        ------
        SpecError
        """
        builders, tied = _builders(layers, seed, more.get("path"))
        return cls(builders=builders, dataset=dataset, loss=loss, optimizer=optimizer, tied=tied, **more)


def load_job(path: str, *, seed: int = 0) -> Job:
    """Return the job that a Python file defines.

    Raises
    ------
    SpecError
        When the file is missing, does not run, or does not define what a job needs.
    """
    module = _imported(path)
    lacking = [name for name in REQUIRED if not callable(getattr(module, name, None))]
    if lacking:
        raise SpecError(f"no {', '.join(f'{name}()' for name in lacking)}", file=path, key=lacking[0], rule=_RULE,
                        fix="See examples/jobs/gpt_job.py")  # fmt: skip
    torch.manual_seed(seed)
    more = {name: getattr(module, name) for name in OPTIONAL if hasattr(module, name)}
    return Job.of(
        _called(module.model, path, "model"), _called(module.dataset, path, "dataset"), module.loss, module.optimizer,
        seed=seed, path=path, **more,
    )  # fmt: skip


def first_input(batch: Any) -> Any:
    """Return what the first layer takes of a batch: the first of a pair, or what models call their input."""
    if isinstance(batch, dict):
        for key in _INPUT_KEYS:
            if key in batch:
                return batch[key]
        raise SpecError(f"a batch with {', '.join(map(str, batch))}", key="inputs",
                        rule=f"The first layer takes {', '.join(_INPUT_KEYS)} of a batch",
                        fix="Define inputs(batch) in the job")  # fmt: skip
    return batch[0] if isinstance(batch, tuple | list) else batch


def tied_parameters(layers: Sequence[nn.Module]) -> tuple[tuple[Key, ...], ...]:
    """Return the groups of names under which layers share a parameter."""
    names: dict[int, list[Key]] = {}
    for index, layer in enumerate(layers):
        for name, parameter in layer.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append((index, name))
    return tuple(tuple(group) for group in names.values() if len({layer for layer, _ in group}) > 1)


def _builders(model: Any, seed: int, path: str | None) -> tuple[list[Callable[[], nn.Module]], tuple[Any, ...]]:
    layers = _layers(model, path)
    if not layers:
        raise SpecError("model() gave no layers", file=path, key="model", rule="A model has at least one layer")
    if all(isinstance(layer, nn.Module) for layer in layers):
        return [_copier(layer) for layer in layers], tied_parameters(layers)
    if all(callable(layer) and not isinstance(layer, nn.Module) for layer in layers):
        return [_seeded(layer, seed, index) for index, layer in enumerate(layers)], ()
    raise SpecError("model() gave modules and callables mixed", file=path, key="model",
                    rule="The list holds modules only or callables that give modules only")  # fmt: skip


def _layers(model: Any, path: str | None) -> list[Any]:
    if isinstance(model, nn.Sequential | nn.ModuleList | list | tuple):
        return list(model)
    if isinstance(model, nn.Module):
        from foreshard.runtime.hf_split import split

        return split(model)
    if isinstance(model, Iterable):
        return list(model)
    raise SpecError(
        f"model() gave {type(model).__name__}", file=path, key="model",
        rule="It returns a list of layers, an nn.Sequential, or a model of transformers",
    )  # fmt: skip


def _copier(layer: nn.Module) -> Callable[[], nn.Module]:
    return lambda: copy.deepcopy(layer)


def _seeded(build: Callable[[], nn.Module], seed: int, index: int) -> Callable[[], nn.Module]:
    def built() -> nn.Module:
        with _SEEDING, torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed * 1_000_003 + index)
            return build()

    return built


def _imported(path: str) -> Any:
    file = Path(path)
    if not file.is_file():
        raise SpecError("no such file", file=path, key="JOB", rule=_RULE)
    spec = spec_from_file_location(f"foreshard_job_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise SpecError("not a Python file", file=path, key="JOB", rule=_RULE)
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(file.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise _own_error(error, path, "JOB") from error
    finally:
        sys.path.remove(str(file.resolve().parent))
    return module


def _called(function: Callable[[], Any], path: str, name: str) -> Any:
    try:
        return function()
    except SpecError:
        raise
    except Exception as error:
        raise _own_error(error, path, name) from error


def _own_error(error: Exception, path: str, key: str) -> SpecError:
    """Return the error of the user's own code, with the line it came from."""
    frame, line = error.__traceback__, getattr(error, "lineno", None)
    while frame is not None:
        if frame.tb_frame.f_code.co_filename == str(Path(path)):
            line = frame.tb_lineno
        frame = frame.tb_next
    where = f" in line {line}" if line else ""
    return SpecError(f"{type(error).__name__}{where}: {error}", file=path, key=key,
                     rule="The job's own code must run")  # fmt: skip
