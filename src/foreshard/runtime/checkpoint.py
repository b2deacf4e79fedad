"""Checkpoints keyed by layer: any partition writes them, any partition reads them, nothing in them is executed.

A step is a folder. Every rank writes its items through torch's distributed checkpoint (DCP) into a folder of its
own; the index is JSON instead of DCP's pickle, tensors are read as weights only. The folder gets its name when all
ranks have written: what has a name is complete.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from foreshard.errors import SpecError

_INDEX = "index.json"
_META = "meta.json"
_TORN = ".part"


class CheckpointFault(RuntimeError):
    """A checkpoint could not be written; training goes on."""


class _JsonWriter(dcp.FileSystemWriter):
    """DCP's files with an index in JSON."""

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write where each tensor lies."""
        entries = {}
        for result in (r for group in results for r in group):
            told, place = metadata.state_dict_metadata[result.index.fqn], result.storage_data
            entries[result.index.fqn] = {
                "dtype": str(told.properties.dtype).removeprefix("torch."), "size": list(told.size),
                "file": place.relative_path, "offset": place.offset, "length": place.length,
            }  # fmt: skip
        _write(Path(self.path) / _INDEX, {"format": "foreshard checkpoint 1", "tensors": entries})


class _JsonReader(dcp.FileSystemReader):
    """Reads DCP's files by an index in JSON."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the index as DCP knows it."""
        entries = _index(Path(self.path))
        described: dict[str, Any] = {}
        places = {}
        for name, entry in entries.items():
            size = torch.Size(entry["size"])
            zero = torch.Size([0] * len(size))
            described[name] = TensorStorageMetadata(
                properties=TensorProperties(dtype=_dtype(entry["dtype"])), size=size,
                chunks=[ChunkStorageMetadata(offsets=zero, sizes=size)],
            )  # fmt: skip
            places[MetadataIndex(name, zero)] = _StorageInfo(entry["file"], entry["offset"], entry["length"])
        return Metadata(state_dict_metadata=described, storage_data=places, storage_meta=StorageMeta())


def save(
    folder: Path, *, step: int, tensors: Mapping[str, Tensor], meta: Mapping[str, Any], rank: int = 0,
    group: Any = None, lead: bool = True,
) -> None:
    """Write a rank's items of a step; returns when the checkpoint is whole.

    Parameters
    ----------
    folder : Path
        Of all checkpoints, reached by all ranks.
    step : int
        Steps that were done.
    tensors : mapping of key to Tensor
        ``layers.{layer}.{name}``, ``buffers.{layer}.{name}`` or ``optimizer.{layer}.{name}.{state}``.
    meta : mapping
        JSON, written by the lead.
    rank : int
    group : ProcessGroup, optional
        All ranks that write.
    lead : bool
        Whether this rank gives the folder its name; one does.

    Raises
    ------
    CheckpointFault
        On every rank, when one could not write; nothing is left behind.
    RuntimeError
        From torch.distributed, when a peer is gone.
    """  # fmt: skip
    part = folder / f"{_name(step)}{_TORN}"
    fault: str | None = None
    try:
        part.mkdir(parents=True, exist_ok=True)
        mine = part / f"rank-{rank}"
        shutil.rmtree(mine, ignore_errors=True)
        dcp.save(
            {key: t.detach().cpu() for key, t in tensors.items()},
            storage_writer=_JsonWriter(mine, single_file_per_rank=True, sync_files=True), no_dist=True,
        )  # fmt: skip
        if lead:
            _write(part / _META, {"step": step, **meta})
    except (OSError, RuntimeError, dcp.api.CheckpointException) as error:
        fault = f"{type(error).__name__}: {error}"
    failed = _agreed(fault is not None, group)
    if failed:
        if lead:
            shutil.rmtree(part, ignore_errors=True)
        wanted = sum(t.numel() * t.element_size() for t in tensors.values())
        free = shutil.disk_usage(folder).free if folder.exists() else 0
        raise CheckpointFault(
            f"step {step} is not saved: {fault or 'another rank could not write'}; rank {rank} wanted {wanted} bytes, "
            f"{free} are free"
        )
    if lead:
        final = folder / _name(step)
        shutil.rmtree(final, ignore_errors=True)
        part.rename(final)
        _sync_folder(folder)
    _agreed(False, group)


def latest(folder: Path) -> int | None:
    """Return the step of the newest whole checkpoint."""
    steps = [int(p.name.removeprefix("step-")) for p in folder.glob("step-*") if (p / _META).exists() and p.suffix == ""]
    return max(steps, default=None)


def load(folder: Path, step: int, chosen: Callable[[str], bool] = lambda key: True) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint whose keys are chosen, from whichever ranks wrote them.

    Raises
    ------
    SpecError
        When the checkpoint is damaged.
    """
    found: dict[str, Tensor] = {}
    for place in sorted((folder / _name(step)).glob("rank-*")):
        wanted = {key: entry for key, entry in _index(place).items() if chosen(key)}
        if not wanted:
            continue
        empty = {key: torch.empty(entry["size"], dtype=_dtype(entry["dtype"])) for key, entry in wanted.items()}
        try:
            dcp.load(empty, storage_reader=_JsonReader(place), no_dist=True)
        except Exception as error:
            raise SpecError(f"checkpoint of step {step} cannot be read: {error}", file=str(place),
                            fix="Remove the folder; the checkpoint before it is used then") from error  # fmt: skip
        found.update(empty)
    return found


def read_meta(folder: Path, step: int) -> dict[str, Any]:
    """Return what was written about a checkpoint."""
    meta = json.loads((folder / _name(step) / _META).read_text())
    return dict(meta)


def prune(folder: Path, keep: int = 2) -> None:
    """Remove all but the newest checkpoints, and torn ones."""
    whole = sorted(p for p in folder.glob("step-*") if p.suffix == "")
    for place in whole[: max(0, len(whole) - keep)]:
        shutil.rmtree(place, ignore_errors=True)


def _name(step: int) -> str:
    return f"step-{step:010d}"


def _index(place: Path) -> dict[str, Any]:
    try:
        tensors = json.loads((place / _INDEX).read_text())["tensors"]
    except (OSError, ValueError, KeyError) as error:
        raise SpecError(f"no index of a checkpoint: {error}", file=str(place / _INDEX),
                        fix="Remove the folder; the checkpoint before it is used then") from None  # fmt: skip
    return dict(tensors)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise SpecError(f"unknown dtype {name!r} in a checkpoint", key="dtype")
    return dtype


def _write(path: Path, content: Mapping[str, Any]) -> None:
    with path.open("w") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _agreed(failed: bool, group: Any) -> bool:
    """Return whether any rank failed."""
    if group is None:
        return failed
    count = torch.tensor([float(failed)], dtype=torch.float64)
    group.allreduce([count]).wait()
    return float(count[0]) > 0
