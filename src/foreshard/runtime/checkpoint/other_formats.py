"""A checkpoint as files of other programs: safetensors, or torch's distributed checkpoint (DCP)."""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from foreshard.errors import SpecError
from foreshard.runtime.checkpoint.folders import steps_in
from foreshard.runtime.checkpoint.format import damage_of, load, read_meta, write_tensors
from foreshard.runtime.checkpoint.saving import tensor_key


def export_run(run: Path, target: str, out: Path, step: int | None = None) -> int:
    """Write the newest checkpoint of a run, or that of a step, for other programs; return its step.

    Target `safetensors` is `model.safetensors`, with `config.json` where transformers knows the model; `dcp`
    is parameters (``model``) and optimizer (``optimizer``) with torch's `.metadata`. Names are those of the
    model of transformers that the job trains, else ``{layer}.{name}`` as in an `nn.Sequential` of the job's
    layers. A checkpoint has to be as it was written.
    """
    folder = run / "ckpt"
    steps = [each for each in steps_in(folder) if step in (None, each)]
    found = next((each for each in steps if damage_of(folder, each) is None), None)
    if found is None:
        which = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        raise SpecError(
            f"{which} that is whole",
            file=str(folder),
            key="RUN",
            rule="A run that has ended or was stopped has one",
            fix=f"Its checkpoints: {', '.join(map(str, steps_in(folder))) or 'none'}",
        )
    meta, tensors = read_meta(folder, found), load(folder, found)
    names = _Names(meta)
    model = {name: t for key, t in tensors.items() if tensor_key(key)[0] != "state" for name in names.of(key)}
    if target == "safetensors":
        with _whole_files(out) as part:
            write_tensors(part / "model.safetensors", model, {"format": "pt"})
            if meta.get("config") is not None:
                (part / "config.json").write_text(json.dumps(meta["config"], indent=2) + "\n")
        return found
    optimizer: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        kind, _, rest = tensor_key(key)
        if kind == "state":
            optimizer.setdefault(names.of(key)[0], {})[rest.rpartition("/")[2]] = tensor
    with _whole_files(out) as part, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # a single process is meant
        try:
            dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=part, no_dist=True)
        except CheckpointException as error:  # no Exception of Python: it holds what each rank met
            raise next(fault for fault, _ in error.failures.values()) from None
    return found


@contextmanager
def _whole_files(out: Path) -> Iterator[Path]:
    """Give a folder whose files are put into `out` at the end: what was there stays if the disk is full."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out, prefix=".part-") as part:
        yield Path(part)
        for file in sorted(Path(part).iterdir()):
            os.replace(file, out / file.name)


class _Names:
    """Names outside of foreshard of the tensors of a checkpoint."""

    def __init__(self, meta: Mapping[str, Any]):
        self._whole = {(layer, name): whole for layer, name, whole in meta.get("names") or []}
        self._tied = [[(layer, name) for layer, name in group] for group in meta.get("tied") or []]

    def of(self, key: str) -> list[str]:
        """Return the names of a tensor; the owner's of an entry of optimizer state."""
        kind, layer, rest = tensor_key(key)
        own = (layer, rest.rpartition("/")[0] if kind == "state" else rest)
        group = next((group for group in self._tied if own in group), [own])
        return [self._whole.get(each, f"{each[0]}.{each[1]}") for each in group]
