"""Layers timed here: forward, backward, optimizer, bytes, at several numbers of samples.

A pass runs the whole chain as training does, forwards, then backwards, then the update, so that caches are as
cold as they will be. Processor time of the thread is kept beside wall time: it is the steadier one on a busy
machine.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from foreshard.errors import SpecError
from foreshard.profile.batches import as_tuple, moved

KIND = "profile"
_WARM_UP = 2
_TELLING = ("OMP_", "MKL_", "TORCH_", "CUDA_", "NCCL_")
"""Environment that changes how fast torch is."""


class Trainable(Protocol):
    """What is profiled: a chain of layers with samples, a loss and an optimizer."""

    dataset: Any
    path: str | None
    tied: tuple[tuple[tuple[int, str], ...], ...]

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        ...

    def layer(self, index: int) -> nn.Module:
        """Return a fresh module of a layer."""
        ...

    def collate(self, samples: list[Any]) -> Any:
        """Return samples as a batch."""
        ...

    def inputs(self, batch: Any) -> Any:
        """Return what the first layer takes of a batch."""
        ...

    def loss(self, output: Any, batch: Any) -> tuple[Tensor, Any]:
        """Return the sum of the loss and what it is divided by."""
        ...

    def optimizer(self, params: list[nn.Parameter]) -> torch.optim.Optimizer:
        """Return an optimizer."""
        ...


Through = Callable[[nn.Module, int, tuple[Any, ...], range], tuple[Any, ...]]
"""(module, layer, values, positions) -> values: how the runtime runs a layer."""


class TimedPart(Protocol):
    """The layers as one of several ranks holds that compute them together, without the others."""

    modules: list[nn.Module]

    def through(
        self, module: nn.Module, layer: int, values: tuple[Any, ...], positions: range
    ) -> tuple[Any, ...]:
        """Return what the part of a layer makes of the values."""
        ...

    def summed(self) -> list[tuple[int, float]]:
        """Return the sums asked for since the last time: bytes, and which part of a ring."""
        ...

    def close(self) -> None:
        """Let go of what it took."""
        ...


@dataclass(slots=True)
class _Pass:
    """Seconds of one pass, by layer: columns are processor time and wall time."""

    forward: list[tuple[float, float]]
    backward: list[tuple[float, float]]
    update: tuple[float, float]


def profile_layers(
    job: Trainable,
    *,
    samples: Sequence[int],
    repeats: int,
    out: Path | None,
    device: torch.device,
    through: Through,
    beside: int = 1,
    busy: AbstractContextManager[None] | None = None,
    tell: Callable[[str], None] = lambda text: None,
    parts: Mapping[int, Callable[[], TimedPart]] | None = None,
) -> dict[str, Any]:
    """Time a job's layers and return the profile: written after every size, continued where unfinished.

    Parameters
    ----------
    job : Trainable
    samples : sequence of int
        Numbers of samples of a micro-batch to time.
    repeats : int
        Passes of each number, after two to warm up.
    out : Path or None
        None writes nothing.
    device : torch.device
    through : callable
    beside : int
        Ranks that share the machine; noted.
    busy : context manager, optional
        Entered while something is timed.
    tell : callable
        Progress.
    parts : mapping of degree to callable, optional
        Degrees of tensor parallelism to time as well, and what makes a rank's part of the layers.
    """
    began = _begun(out, fingerprint(job, device) | {"ranks": beside})
    known = began.setdefault("tensor", {})
    degrees = [n for n in parts or {} if _missing(known.setdefault(str(n), {"passes": {}}), samples)]
    if not degrees and not _missing(began, samples) and "bytes" in began:
        return began
    done: Callable[[], None] = (lambda: None) if out is None else (lambda: write_profile(out, began))
    with busy or nullcontext():
        modules = [job.layer(i).to(device) for i in range(job.num_layers)]
        if "bytes" not in began:
            began["tied"] = [_tied_bytes(modules, group) for group in job.tied]
        _profile(job, modules, began, samples, repeats, device, through, began, tell, done)
        for degree in degrees:
            part = (parts or {})[degree]()
            one = known[str(degree)]
            try:
                _profile(
                    job,
                    part.modules,
                    one,
                    samples,
                    repeats,
                    device,
                    part.through,
                    began,
                    _of_degree(tell, degree),
                    done,
                )
                one["sums"] = _sums(job, part, samples[0], device)
            finally:
                part.close()
    return began


def _missing(told: dict[str, Any], samples: Sequence[int]) -> list[int]:
    return [number for number in samples if "update" not in told["passes"].get(str(number), {})]


def _profile(
    job: Trainable,
    modules: list[nn.Module],
    told: dict[str, Any],
    samples: Sequence[int],
    repeats: int,
    device: torch.device,
    through: Through,
    profile: dict[str, Any],
    tell: Callable[[str], None],
    done: Callable[[], None],
) -> None:
    """Time the sizes that are missing, of whole layers or of parts."""
    update, missing = _Update(job, modules), _missing(told, samples)
    told["bytes"] = [_layer_bytes(module) for module in modules]
    for place, number in enumerate(missing):
        size = "1 sample" if number == 1 else f"{number} samples"
        tell(f"timing {size} ({place + 1} of {len(missing)} sizes, {repeats} passes)")
        told["passes"][str(number)] = _timed(job, modules, number, repeats, device, through, profile, update)
        told["optimizer"] = _optimizer_times(modules, update, told["passes"].values())
        done()


def fingerprint(job: Trainable, device: torch.device) -> dict[str, Any]:
    """Return what the seconds depend on besides the layers."""
    return {
        "job": Path(job.path).name if job.path else "",
        "layers": job.num_layers,
        "device": device.type,
        "processor": _processor(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "host": platform.node(),
        "accelerator": torch.cuda.get_device_name(device) if device.type == "cuda" else "",
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith(_TELLING)},
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _begun(out: Path | None, told: dict[str, Any]) -> dict[str, Any]:
    if out is not None and out.exists():
        try:
            old = json.loads(out.read_text())
        except ValueError as error:
            raise SpecError(f"not JSON: {error}", file=str(out), key="-o", fix="Remove it") from None
        if not isinstance(old, dict) or old.get("kind") != KIND:
            raise SpecError(
                "is not a profile",
                file=str(out),
                key="-o",
                rule="profile writes its own file",
                fix="Name another file",
            )
        if not old.get("complete") and old.get("fingerprint") == told:
            return dict(old)
    return {
        "schema_version": 1,
        "kind": KIND,
        "date": date.today().isoformat(),
        "fingerprint": told,
        "passes": {},
    }


def write_profile(out: Path, profile: dict[str, Any]) -> None:
    """Write a profile as a whole: who reads it sees the old one or the new one."""
    new = out.with_suffix(out.suffix + ".new")
    new.write_text(json.dumps(profile))
    new.replace(out)


def _timed(
    job: Trainable,
    modules: list[nn.Module],
    number: int,
    repeats: int,
    device: torch.device,
    through: Through,
    profile: dict[str, Any],
    update: _Update,
) -> dict[str, Any]:
    batch = _batch(job, number, device)
    kept = _saved_bytes(job, modules, batch, number, through)
    _, count = job.loss(kept.pop("output"), batch)
    profile["tokens_per_sample"] = float(count) / number
    passes = [_one_pass(job, modules, batch, number, through, update) for _ in range(repeats + _WARM_UP)]
    fewer = max(1, repeats // 3) + 1
    return {
        **kept,
        **{name: [getattr(p, name) for p in passes[_WARM_UP:]] for name in ("forward", "backward")},
        "backward_input": [_input_pass(job, modules, batch, number, through) for _ in range(fewer)][1:],
        "update": [p.update for p in passes[_WARM_UP:]],
    }


def _batch(job: Trainable, number: int, device: torch.device) -> Any:
    size = len(job.dataset) if hasattr(job.dataset, "__len__") else None
    items = [job.dataset[i % size] for i in range(number)] if size else _first(job.dataset, number)
    return moved(job.collate(items), device)


def _one_pass(
    job: Trainable, modules: list[nn.Module], batch: Any, number: int, through: Through, update: _Update
) -> _Pass:
    """Run all forwards, all backwards and the update."""
    update.clear()
    forward, kept = _forwards(job, modules, batch, number, through)
    backward: list[tuple[float, float]] = []
    grads: list[Tensor] | None = None
    for given, made in _popped(kept):
        grads, seconds = _backward(given, made, grads)
        backward.append(seconds)
    return _Pass(forward, backward[::-1], update.step(number))


def _backward(
    given: tuple[Any, ...], made: tuple[Any, ...], grads: list[Tensor] | None
) -> tuple[list[Tensor], tuple[float, float]]:
    """Return the gradients of what a layer was given, and the seconds of its backward."""
    inputs, pairs = _inputs(given), _pairs(made, grads)
    clock = _Stopwatch()
    if pairs:
        torch.autograd.backward([t for t, _ in pairs], _given(pairs))
    told = clock.read()
    return [t.grad if t.grad is not None else torch.zeros_like(t) for t in inputs], told


def _of_degree(tell: Callable[[str], None], degree: int) -> Callable[[str], None]:
    return lambda text: tell(f"tp {degree}: {text}")


def _sums(job: Trainable, part: TimedPart, number: int, device: torch.device) -> dict[str, Any]:
    """Return, by layer, what ranks sum in a forward and in a backward: bytes a sample, part of a ring."""
    forward: list[Any] = []
    backward: list[Any] = []

    def noting(module: nn.Module, layer: int, values: tuple[Any, ...], positions: range) -> tuple[Any, ...]:
        made = part.through(module, layer, values, positions)
        forward.append([[size / number, ring] for size, ring in part.summed()])
        return made

    part.summed()
    _, kept = _forwards(job, part.modules, _batch(job, number, device), number, noting)
    grads: list[Tensor] | None = None
    for given, made in _popped(kept):
        grads, _ = _backward(given, made, grads)
        backward.append([[size / number, ring] for size, ring in part.summed()])
    return {"forward": forward, "backward": backward[::-1]}


def _input_pass(
    job: Trainable, modules: list[nn.Module], batch: Any, number: int, through: Through
) -> list[tuple[float, float]]:
    """Run all forwards, then the part of each backward that the layer before waits for; return seconds."""
    _, kept = _forwards(job, modules, batch, number, through)
    told: list[tuple[float, float]] = []
    grads: list[Tensor] | None = None
    for given, made in _popped(kept):
        inputs, pairs = _inputs(given), _pairs(made, grads)
        found: Sequence[Tensor | None] = [None] * len(inputs)
        clock = _Stopwatch()
        if pairs and inputs:
            found = torch.autograd.grad([t for t, _ in pairs], inputs, _given(pairs), allow_unused=True)
        told.append(clock.read() if inputs else (0.0, 0.0))
        grads = [torch.zeros_like(t) if g is None else g for t, g in zip(inputs, found, strict=True)]
    return told[::-1]


def _forwards(
    job: Trainable, modules: list[nn.Module], batch: Any, number: int, through: Through
) -> tuple[list[tuple[float, float]], list[tuple[tuple[Any, ...], tuple[Any, ...]]]]:
    """Return, by layer, the seconds of the forward, and what it was given and has made."""
    told, kept, values = [], [], as_tuple(job.inputs(batch))
    for layer, module in enumerate(modules):
        given = tuple(_leaf(v) for v in values) if layer else values
        clock = _Stopwatch()
        made = through(module, layer, given, range(number))
        if layer == len(modules) - 1:
            made = (job.loss(made[0] if len(made) == 1 else made, batch)[0],)
        told.append(clock.read())
        kept.append((given, made))
        values = tuple(v.detach() if isinstance(v, Tensor) else v for v in made)
    return told, kept


def _popped(kept: list[Any]) -> Iterator[Any]:
    """Yield the last first, and keep nothing of it: its graph goes as in training."""
    while kept:
        yield kept.pop()


def _inputs(given: tuple[Any, ...]) -> list[Tensor]:
    return [t for t in given if isinstance(t, Tensor) and t.is_floating_point() and t.requires_grad]


def _pairs(made: tuple[Any, ...], grads: list[Tensor] | None) -> list[tuple[Tensor, Tensor | None]]:
    """Return what is differentiated, with the gradient that it gets."""
    outputs = [t for t in made if isinstance(t, Tensor) and t.is_floating_point()]
    return [(t, None if grads is None else grads[i]) for i, t in enumerate(outputs) if t.requires_grad]


def _given(pairs: list[tuple[Tensor, Tensor | None]]) -> list[Tensor] | None:
    return None if pairs[0][1] is None else [g for _, g in pairs if g is not None]


def _saved_bytes(
    job: Trainable, modules: list[nn.Module], batch: Any, number: int, through: Through
) -> dict[str, Any]:
    """Return, by layer, the bytes kept for the backward and the bytes handed on, and the output."""
    values, saved, boundary = as_tuple(job.inputs(batch)), [], []
    for layer, module in enumerate(modules):
        own = {p.untyped_storage().data_ptr() for p in module.parameters()}
        seen: dict[int, int] = {}

        def keep(t: Tensor, own: set[int] = own, seen: dict[int, int] = seen) -> Tensor:
            storage = (
                t.to_local() if hasattr(t, "to_local") else t
            ).untyped_storage()  # of a DTensor its part
            if storage.data_ptr() not in own:
                seen[storage.data_ptr()] = storage.nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            given = tuple(_leaf(v) for v in values) if layer else values
            values = through(module, layer, given, range(number))
        saved.append(float(sum(seen.values())))
        boundary.append(float(sum(t.numel() * t.element_size() for t in values if isinstance(t, Tensor))))
    output = values[0] if len(values) == 1 else values
    return {"saved_bytes": saved, "boundary_bytes": boundary, "output": output}


def _tied_bytes(modules: list[nn.Module], group: Sequence[tuple[int, str]]) -> dict[str, Any]:
    """Return the layers that share a parameter, and its bytes; 0 where it is frozen."""
    layer, name = group[0]
    shared = modules[layer].get_parameter(name)
    size = shared.numel() * shared.element_size() if shared.requires_grad else 0
    return {"layers": sorted({place for place, _ in group}), "bytes": float(size)}


def _layer_bytes(module: nn.Module) -> dict[str, float]:
    def total(trained: bool) -> float:
        return float(
            sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad == trained)
        )

    return {"parameter_bytes": total(True), "frozen_bytes": total(False)}


class _Update:
    """The optimizer over all parameters, with their gradients in one piece as the runtime has them."""

    def __init__(self, job: Trainable, modules: list[nn.Module]):
        parameters = [p for module in modules for p in module.parameters() if p.requires_grad]
        self.optimizer = job.optimizer(parameters) if parameters else None
        self.flats: list[Tensor] = []
        kinds: dict[Any, list[nn.Parameter]] = {}
        for parameter in parameters:
            kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter)
        for same in kinds.values():
            flat = torch.zeros(sum(p.numel() for p in same), dtype=same[0].dtype, device=same[0].device)
            for parameter, part in zip(same, flat.split([p.numel() for p in same]), strict=True):
                parameter.grad = part.view_as(parameter)
            self.flats.append(flat)
        self._values = [(parameter, parameter.detach().clone()) for parameter in parameters]

    def clear(self) -> None:
        """Set the gradients to zero."""
        for flat in self.flats:
            flat.zero_()

    def step(self, samples: int) -> tuple[float, float]:
        """Update by the mean gradient and return the seconds; values are then as before: passes are alike."""
        clock = _Stopwatch()
        for flat in self.flats:
            flat.mul_(1.0 / samples)
        if self.optimizer is not None:
            self.optimizer.step()
        told = clock.read()
        with torch.no_grad():
            for parameter, value in self._values:
                parameter.copy_(value)
        return told


def _optimizer_times(
    modules: list[nn.Module], update: _Update, passes: Iterable[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return, by layer, its part of the seconds of the updates, by parameters, and its state's bytes."""
    own = [[p for p in module.parameters() if p.requires_grad] for module in modules]
    whole = float(sum(p.numel() for ps in own for p in ps)) or 1.0
    times = [row for told in passes for row in told["update"]]
    found = []
    for parameters in own:
        part = sum(p.numel() for p in parameters) / whole
        state = sum(
            t.numel() * t.element_size()
            for p in parameters
            for t in (update.optimizer.state.get(p, {}) if update.optimizer else {}).values()
            if isinstance(t, Tensor)
        )
        found.append({"seconds": [[c * part, w * part] for c, w in times], "state_bytes": float(state)})
    return found


class _Stopwatch:
    """Processor and wall time since it was made."""

    def __init__(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._cpu_s, self._wall_s = time.thread_time(), time.perf_counter()

    def read(self) -> tuple[float, float]:
        """Return seconds of both."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.thread_time() - self._cpu_s, time.perf_counter() - self._wall_s


def _leaf(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    value = value.detach()
    return value.requires_grad_() if value.is_floating_point() else value


def _first(dataset: Any, number: int) -> list[Any]:
    found = []
    for item in dataset:
        found.append(item)
        if len(found) == number:
            break
    return found
