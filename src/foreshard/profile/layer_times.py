"""The profile of a job's layers: every size timed, written after each, continued where it was interrupted."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import nn

from foreshard.errors import SpecError
from foreshard.file_replacement import replace_file
from foreshard.profile.timed_chain import Through, TimedChain, TimedPart, Trainable

KIND = "profile"
ROUNDS = 5
"""Times that every size comes up: its passes then see what changes slowly on the machine, and how much."""
_PASSES = ("forward", "backward", "backward_input", "update", "rounds")
"""What a size has of every round."""
_ENVIRONMENT = ("OMP_", "MKL_", "TORCH_", "CUDA_", "NCCL_")
"""Beginnings of the environment variables that change how fast torch is."""


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
    precision: str = "fp32",
) -> dict[str, Any]:
    """Time a job's layers and return the profile: written after every size, continued where unfinished.

    Parameters as of :func:`foreshard.profile.record.record`, whose `dtype` is `precision` here; `beside` is
    the ranks that share the machine, to be noted, `busy` a context that is entered while something is timed.
    Without `out` nothing is written.
    """
    profile = _begun(out, fingerprint(job, device) | {"ranks": beside, "precision": precision})
    tensor = profile.setdefault("tensor", {})
    degrees = [
        n for n in parts or {} if _missing(tensor.setdefault(str(n), {"passes": {}}), samples, repeats)
    ]
    if not degrees and not _missing(profile, samples, repeats) and "bytes" in profile:
        return profile

    def time_missing(chain: TimedChain, rows: dict[str, Any], prefix: str = "") -> None:
        """Time the sizes that `rows` lacks, of whole layers or of parts."""
        rows["bytes"] = chain.bytes_by_layer()
        while missing := _missing(rows, samples, repeats):
            for place, number in enumerate(missing):
                before = rows["passes"].get(str(number), {})
                done = len(before.get("update", ()))
                some = min(-(-repeats // ROUNDS), repeats - done)
                size = "1 sample" if number == 1 else f"{number} samples"
                tell(
                    f"{prefix}timing {size} ({place + 1} of {len(missing)} sizes, "
                    f"passes {done + 1} to {done + some} of {repeats})"
                )
                row, profile["tokens_per_sample"] = chain.timed(number, some, again=bool(before))
                rows["passes"][str(number)] = _joined(before, row)
                updates = [seconds for row in rows["passes"].values() for seconds in row["update"]]
                rows["optimizer"] = chain.update.by_layer(updates)
                if out is not None:
                    write_profile(out, profile)

    with busy or nullcontext():
        modules = [job.layer(i).to(device) for i in range(job.num_layers)]
        if "bytes" not in profile:
            profile["tied"] = [_tied_bytes(modules, group) for group in job.tied]
        time_missing(TimedChain(job, modules, through, device, precision), profile)
        for degree in degrees:
            part = (parts or {})[degree]()
            try:
                chain = TimedChain(job, part.modules, part.through, device, precision)
                time_missing(chain, tensor[str(degree)], prefix=f"tp {degree}: ")
                tensor[str(degree)]["sums"] = chain.sums(part, samples[0])
            finally:
                part.close()
    return profile


def _missing(rows: dict[str, Any], samples: Sequence[int], repeats: int) -> list[int]:
    """Return the sizes that have fewer passes than asked for."""
    timed = rows["passes"]
    return [number for number in samples if len(timed.get(str(number), {}).get("update", ())) < repeats]


def _joined(before: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the passes of a size with those of a further round."""
    return dict(row) | {key: [*before[key], *row[key]] for key in _PASSES if key in before}


def fingerprint(job: Trainable, device: torch.device) -> dict[str, Any]:
    """Return what the seconds depend on besides the layers."""
    return {
        "job": Path(job.path).name if job.path else "",
        "layers": job.num_layers,
        "device": device.type,
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "host": platform.node(),
        "accelerator": torch.cuda.get_device_name(device) if device.type == "cuda" else "",
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith(_ENVIRONMENT)},
    }


def require_device(device: str) -> None:
    """Refuse the GPU where there is none."""
    if device == "cuda" and not torch.cuda.is_available():
        rule, fix = "The device is on this machine", "Use --device cpu, or profile where the GPU is"
        raise SpecError("no CUDA device here", key="--device", value=device, rule=rule, fix=fix)


def processor_name() -> str:
    """Return what the processor calls itself."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _begun(out: Path | None, made_here: dict[str, Any]) -> dict[str, Any]:
    """Return the unfinished profile that `out` holds, a new one where there is none or it is finished.

    Raises
    ------
    SpecError
        For another file, one cut short, or an unfinished profile of another machine, software or job.
    """
    if out is not None and out.exists():
        try:
            old = json.loads(out.read_text())
        except ValueError as error:
            raise SpecError(f"not JSON: {error}", file=str(out), key="-o", fix="Remove it") from None
        if not isinstance(old, dict) or old.get("kind") != KIND:
            rule = "profile writes its own file"
            raise SpecError("is not a profile", file=str(out), key="-o", rule=rule, fix="Name another file")
        if not old.get("complete"):
            _same_machine(old.get("fingerprint"), made_here, out)
            return dict(old)
    return {
        "schema_version": 1,
        "kind": KIND,
        "date": date.today().isoformat(),
        "fingerprint": made_here,
        "passes": {},
    }


def _same_machine(begun: Any, here: Mapping[str, Any], out: Path) -> None:
    """Raise where an unfinished profile was begun on another machine, with other software or another job."""
    begun = begun if isinstance(begun, dict) else {}
    for key, value in here.items():
        if begun.get(key) != value:
            raise SpecError(
                f"an unfinished profile with {key} {begun.get(key)!r}, here it is {value!r}",
                file=str(out),
                key=f"fingerprint.{key}",
                value=str(begun.get(key)),
                rule="A profile goes on where it was begun, with the same software and job",
                fix="Finish it there, remove it, or name another file with -o",
            )


def write_profile(out: Path, profile: dict[str, Any]) -> None:
    """Write a profile as a whole: who reads it sees the old one or the new one."""
    replace_file(out, json.dumps(profile))


def _tied_bytes(modules: list[nn.Module], group: Sequence[tuple[int, str]]) -> dict[str, Any]:
    """Return the layers that share a parameter, and its bytes; 0 where it is frozen."""
    layer, name = group[0]
    shared = modules[layer].get_parameter(name)
    size = shared.numel() * shared.element_size() if shared.requires_grad else 0
    return {"layers": sorted({place for place, _ in group}), "bytes": float(size)}
