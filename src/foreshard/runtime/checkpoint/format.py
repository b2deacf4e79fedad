"""The files of a checkpoint, keyed by layer: any plan writes and reads them, nothing in them is executed.

A step is a folder. Every rank writes its tensors through torch's distributed checkpoint (DCP) into a folder
of its own; the index is JSON instead of DCP's pickle, and tensors are read as weights only. The folder gets
its name when all ranks have written: a named folder is complete, and lists the ranks that wrote it. A
parameter that is cut is written slice by slice, with where it was cut, and read as the whole.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import warnings
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
from foreshard.runtime.checkpoint.folders import META, OLD, PARTIAL, step_name
from foreshard.runtime.state.slices import parse_cut, parse_name

_INDEX = "index.json"
_PART = re.compile(r"rank-\d+")


class CheckpointFault(RuntimeError):
    """A checkpoint could not be written; training goes on."""


class _JsonWriter(dcp.FileSystemWriter):
    """DCP's files with an index in JSON."""

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the place of each tensor."""
        entries = {}
        for result in (r for group in results for r in group):
            tensor, place = metadata.state_dict_metadata[result.index.fqn], result.storage_data
            assert isinstance(tensor, TensorStorageMetadata)
            entries[result.index.fqn] = {
                "dtype": str(tensor.properties.dtype).removeprefix("torch."),
                "size": list(tensor.size),
                "file": place.relative_path,
                "offset": place.offset,
                "length": place.length,
            }
        _write(Path(self.path) / _INDEX, {"format": "foreshard checkpoint 1", "tensors": entries})


class _JsonReader(dcp.FileSystemReader):
    """Reads DCP's files by an index in JSON."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the index in DCP's form."""
        entries = _index(Path(self.path))
        described: dict[str, Any] = {}
        places = {}
        for name, entry in entries.items():
            size = torch.Size(entry["size"])
            zero = torch.Size([0] * len(size))
            described[name] = TensorStorageMetadata(
                properties=TensorProperties(dtype=_dtype(entry["dtype"])),
                size=size,
                chunks=[ChunkStorageMetadata(offsets=zero, sizes=size)],
            )
            places[MetadataIndex(name, zero)] = _StorageInfo(entry["file"], entry["offset"], entry["length"])
        return Metadata(state_dict_metadata=described, storage_data=places, storage_meta=StorageMeta())


def save(
    folder: Path,
    *,
    step: int,
    tensors: Mapping[str, Tensor],
    meta: Mapping[str, Any],
    rank: int = 0,
    group: Any = None,
    lead: bool = True,
    before: Callable[[], None] = lambda: None,
) -> None:
    """Write a rank's tensors of a step; returns when the checkpoint is complete.

    Parameters
    ----------
    folder : Path
        Of all checkpoints, reached by all ranks.
    step : int
        Number of steps trained.
    tensors : mapping of name to Tensor
        ``layers.{layer}.{name}``, ``buffers.{layer}.{name}`` or ``optimizer.{layer}.{name}.{state}``; the
        name of a parameter, or of a slice of one.
    meta : mapping
        JSON, written by the lead; ``cuts`` has the cut of each parameter in slices, by ``{layer}.{name}``.
    rank : int
    group : ProcessGroup, optional
        All ranks that write.
    lead : bool
        Whether this rank names the folder; exactly one does.
    before : callable
        Called before anything is written; its OSError fails the checkpoint.

    Raises
    ------
    CheckpointFault
        On every rank, when one rank could not write; nothing is left behind.
    RuntimeError
        From torch.distributed, when a peer is gone.
    """
    part, final = folder / f"{step_name(step)}{PARTIAL}", folder / step_name(step)
    mine, num_bytes = part / f"rank-{rank}", sum(t.numel() * t.element_size() for t in tensors.values())
    # files of an attempt that was cut off must not become part of this one
    faults = [_fault_of(_clear, part) if lead else None]
    _sums(group, 0.0)
    faults.append(_fault_of(before) or _fault_of(_write_tensors, mine, tensors))
    failed, all_bytes = _sums(group, float(any(faults)), float(num_bytes))
    if not failed and lead:
        faults.append(_fault_of(_name_folder, part, final, {"step": step, **meta}))
    failed += _sums(group, float(any(faults[2:])))[0]
    if not failed:
        return
    shutil.rmtree(mine, ignore_errors=True)
    _sums(group, 0.0)  # free space is only known when all ranks have removed their files
    if lead:
        shutil.rmtree(part, ignore_errors=True)
    reason = next(filter(None, faults), "another rank could not write")
    shortage = _shortage(folder, int(all_bytes or num_bytes))
    raise CheckpointFault(f"step {step} is not saved: {reason}{shortage}")


def _expect_no_group() -> None:
    """Keep DCP from warning that there is no default group: ranks agree through their own groups."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


def _clear(part: Path) -> None:
    if part.exists():
        shutil.rmtree(part)
    part.mkdir(parents=True)


def _write_tensors(mine: Path, tensors: Mapping[str, Tensor]) -> None:
    mine.mkdir()
    _expect_no_group()
    dcp.save(
        {key: t.detach().cpu() for key, t in tensors.items()},
        storage_writer=_JsonWriter(mine, single_file_per_rank=True, sync_files=True),
        no_dist=True,
    )
    _sync_folder(mine)


def _name_folder(part: Path, final: Path, meta: Mapping[str, Any]) -> None:
    """Rename a folder that all ranks have written; it replaces a checkpoint of the same step."""
    _write(part / META, {**meta, "parts": sorted(place.name for place in part.glob("rank-*"))})
    _sync_folder(part)
    old = final.with_name(final.name + OLD)
    if final.exists():
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
    part.rename(final)
    _sync_folder(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def _fault_of(body: Callable[..., None], *given: Any) -> str | None:
    """Run the body and return its error, if any: the other ranks must learn of it before this rank leaves."""
    try:
        body(*given)
    except (OSError, RuntimeError, dcp.api.CheckpointException) as error:
        return _first_line(error)
    return None


def _first_line(error: BaseException) -> str:
    """Return the first line of an error; DCP's own error, not an Exception, holds that of its rank."""
    if isinstance(error, dcp.api.CheckpointException):
        error = next(iter(error.failures.values()))[0]
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _shortage(folder: Path, needed: int) -> str:
    free = shutil.disk_usage(folder).free if folder.exists() else 0
    short = f", {needed - free} bytes short" if needed > free else ""
    return f"; the ranks need {needed} bytes, {free} are free{short}"


def load(folder: Path, step: int, chosen: Callable[[str], bool] = lambda name: True) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint whose names are chosen, whole, whichever ranks wrote them.

    Raises
    ------
    SpecError
        When the checkpoint is damaged.
    """
    found: dict[str, Tensor] = {}
    for part in _parts(folder, step):
        place = folder / step_name(step) / part
        entries = {key: entry for key, entry in _index(place).items() if chosen(_slice_of(key)[0])}
        if not entries:
            continue
        empty = {key: torch.empty(e["size"], dtype=_dtype(e["dtype"])) for key, e in entries.items()}
        _expect_no_group()
        try:
            dcp.load(empty, storage_reader=_JsonReader(place), no_dist=True)
        except (Exception, dcp.api.CheckpointException) as error:
            raise _damaged(place, f"cannot be read: {_first_line(error)}") from error
        found.update(empty)
    return _whole_tensors(found, folder, step)


def _slice_of(key: str) -> tuple[str, str, int, int]:
    """Return the name of the whole tensor, its parameter as in ``cuts``, which slice, and of how many."""
    folder, _, name = key.partition(".")
    name, state = name.rpartition(".")[::2] if folder == "optimizer" else (name, "")
    whole, index, num = parse_name(name)
    return f"{folder}.{whole}" + (f".{state}" if state else ""), whole, index, num


def _whole_tensors(found: dict[str, Tensor], folder: Path, step: int) -> dict[str, Tensor]:
    """Return tensors with the slices of each put together."""
    made: dict[str, Tensor] = {}
    slices: dict[str, dict[int, Tensor]] = {}
    owners = {}
    for key, tensor in found.items():
        whole, owner, index, num = _slice_of(key)
        if num == 1 or tensor.dim() == 0:  # counts of an optimizer are the same in every slice
            made[whole] = tensor
        else:
            slices.setdefault(whole, {})[index] = tensor
            owners[whole] = owner, num
    cuts = read_meta(folder, step).get("cuts", {}) if slices else {}
    for whole, parts in slices.items():
        owner, num = owners[whole]
        try:
            made[whole] = parse_cut(cuts[owner]).joined([parts[index] for index in range(num)])
        except (KeyError, TypeError, ValueError, RuntimeError, IndexError) as error:
            what = f"lacks slices of {whole}: {_first_line(error)}"
            raise _damaged(folder / step_name(step), what) from error
    return made


def _parts(folder: Path, step: int) -> list[str]:
    parts = read_meta(folder, step).get("parts")
    if isinstance(parts, list) and all(isinstance(p, str) and _PART.fullmatch(p) for p in parts):
        return parts
    raise _damaged(folder / step_name(step) / META, "does not list the ranks that wrote it")


def read_meta(folder: Path, step: int) -> dict[str, Any]:
    """Return the meta data of a checkpoint.

    Raises
    ------
    SpecError
        When there is none, or it is damaged.
    """
    path = folder / step_name(step) / META
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise _damaged(path, f"cannot be read: {error}") from None


def _index(place: Path) -> dict[str, Any]:
    """Return the places of a rank's tensors, checked against the files that are there."""
    try:
        tensors = json.loads((place / _INDEX).read_text())["tensors"]
        for key, entry in tensors.items():
            _check_entry(place, key, entry)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(place / _INDEX, f"has no index: {type(error).__name__} {error}") from None
    return dict(tensors)


def _check_entry(place: Path, key: str, entry: Mapping[str, Any]) -> None:
    size, file, offset, length = (entry[name] for name in ("size", "file", "offset", "length"))
    numbers = [*size, offset, length]
    valid = all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in numbers)
    if not valid or Path(file).name != file:
        raise ValueError(f"{key} has no valid place")
    there = (place / file).stat().st_size
    if offset + length > there or math.prod(size) * _dtype(entry["dtype"]).itemsize > length:
        raise ValueError(f"{key} is truncated")


def _damaged(path: Path, what: str) -> SpecError:
    return SpecError(
        f"the checkpoint {what}",
        file=str(path),
        key="checkpoint",
        fix="Remove the folder of its step; then the checkpoint before it is used",
    )


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"unknown dtype {name!r}")
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


def _sums(group: Any, *values: float) -> list[float]:
    """Return sums over all ranks; no rank continues before all have called it."""
    if group is None:
        return list(values)
    total = torch.tensor(values, dtype=torch.float64)
    group.allreduce([total]).wait()
    return [float(value) for value in total]
