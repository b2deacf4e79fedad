"""The files of a checkpoint, keyed by layer: any plan writes and reads them, nothing in them is executed.

A step is a folder. Every rank writes its tensors into a safetensors file of its own, and their SHA-256 beside
it. The folder gets its name when all ranks have written: a named folder is complete, and lists the files with
their sums and that of the list. A parameter that is cut is written slice by slice, with where it was cut, and
read as the whole.

Source
------
The safetensors format, https://huggingface.co/docs/safetensors. It is written here, and not by the library,
so that a file is summed while it is written and no tensor is copied.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import struct
import threading
from collections.abc import Callable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foreshard.errors import SpecError
from foreshard.runtime.checkpoint.folders import META, OLD, PARTIAL, step_name
from foreshard.runtime.state.slices import parse_cut, parse_name

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
_TORCH = {name: dtype for dtype, name in _DTYPES.items()}
FILE, SUM = "{part}.safetensors", "{part}.sha256"
_META_SUM = "sha256"


class CheckpointFault(RuntimeError):
    """A checkpoint of all ranks, of so many bytes, could not be written; training goes on."""

    def __init__(self, what: str, needed_bytes: int):
        super().__init__(what)
        self.needed_bytes = needed_bytes


class Attempt:
    """An attempt of all ranks to write a checkpoint: made, written and finished by all of them.

    All ranks reach `folder`, which holds all checkpoints; `step` is the number of steps trained. Tensors are
    named ``layers.{layer}.{name}``, ``buffers.{layer}.{name}`` or ``optimizer.{layer}.{name}.{state}``, by a
    parameter or a slice of one. `meta` is JSON; its ``cuts`` has the cut of each parameter in slices, by
    ``{layer}.{name}``. Exactly one rank is the `lead`, which writes it and names the folder.
    """

    def __init__(
        self,
        folder: Path,
        *,
        step: int,
        tensors: Mapping[str, Tensor],
        meta: Mapping[str, Any],
        rank: int,
        group: Any,
        lead: bool,
    ):
        self.step, self._tensors = step, tensors
        self._folder, self._group, self._lead = folder, group, lead
        self._part, self._final = folder / f"{step_name(step)}{PARTIAL}", folder / step_name(step)
        self._meta, self._name = {"step": step, **meta}, f"rank-{rank}"
        self._num_bytes = sum(t.numel() * t.element_size() for t in tensors.values())
        self._thread: threading.Thread | None = None
        # files of an attempt that was cut off must not become part of this one
        self._faults = [_fault_of(_clear, self._part) if lead else None]
        _sums(group, 0.0)

    def write(self, before: Callable[[], None] = lambda: None, *, behind: bool = False) -> None:
        """Write this rank's tensors, after `before`, whose OSError fails the checkpoint.

        `behind` copies them to host memory first, and writes the copies while training goes on.
        """
        fault = _fault_of(before)

        def write() -> None:
            self._faults.append(fault or _fault_of(_write_part, self._part, self._name, self._tensors))

        if not behind:
            write()
            return
        self._tensors = {name: t.detach().to("cpu", copy=True) for name, t in self._tensors.items()}
        self._thread = threading.Thread(target=write, daemon=True, name="checkpoint")
        self._thread.start()

    @property
    def is_written(self) -> bool:
        """Whether this rank has written, be it in vain."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Wait until this rank has written."""
        if self._thread is not None:
            self._thread.join()

    def finish(self) -> None:
        """Name the folder when all ranks have written: then the checkpoint is complete.

        When one rank could not write, `CheckpointFault` is raised on every rank, and nothing is left behind.
        """
        self.wait()
        failed, all_bytes = _sums(self._group, float(any(self._faults)), float(self._num_bytes))
        if not failed and self._lead:
            self._faults.append(_fault_of(_name_folder, self._part, self._final, self._meta))
        failed += _sums(self._group, float(any(self._faults[2:])))[0]
        if not failed:
            return
        for place in (self._part / FILE.format(part=self._name), self._part / SUM.format(part=self._name)):
            with contextlib.suppress(OSError):  # no longer writable: cleared by the next attempt
                place.unlink(missing_ok=True)
        _sums(self._group, 0.0)  # free space is only known when all ranks have removed their files
        if self._lead:
            shutil.rmtree(self._part, ignore_errors=True)
        reason = next(filter(None, self._faults), "another rank could not write")
        shortage = _shortage(self._folder, int(all_bytes or self._num_bytes))
        text = f"step {self.step} is not saved: {reason}{shortage}"
        raise CheckpointFault(text, int(all_bytes or self._num_bytes))


def _clear(part: Path) -> None:
    if part.exists():
        shutil.rmtree(part)
    part.mkdir(parents=True)


def _write_part(folder: Path, part: str, tensors: Mapping[str, Tensor]) -> None:
    digest = write_tensors(folder / FILE.format(part=part), tensors)
    _write(folder / SUM.format(part=part), digest)
    _sync_folder(folder)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, str] | None = None) -> str:
    """Write a safetensors file to the disk, and return its SHA-256.

    A type of number that the format does not know is a ValueError.
    """
    header: dict[str, Any] = {"__metadata__": dict(facts)} if facts else {}
    end = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPES:
            raise ValueError(f"{name} is of {tensor.dtype}, which safetensors does not know")
        begin, end = end, end + tensor.numel() * tensor.element_size()
        fields = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        header[name] = fields
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # numbers lie at multiples of their size
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for data in chain([struct.pack("<Q", len(text)), text], map(_bytes_of, tensors.values())):
            digest.update(data)
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def _bytes_of(tensor: Tensor) -> Any:
    flat: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)


def _name_folder(part: Path, final: Path, meta: Mapping[str, Any]) -> None:
    """Rename a folder that all ranks have written; it replaces a checkpoint of the same step."""
    sums = {place.stem: place.read_text() for place in sorted(part.glob(SUM.format(part="rank-*")))}
    meta = {**meta, "parts": sums}
    _write(part / META, json.dumps({**meta, _META_SUM: _sum_of(meta)}))
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
    except (OSError, ValueError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return None


def _shortage(folder: Path, needed: int) -> str:
    free = shutil.disk_usage(folder).free if folder.exists() else 0
    short = f", {needed - free} bytes short" if needed > free else ""
    return f"; the tensors alone need {needed} bytes, {free} are free{short}"


def damage_of(folder: Path, step: int, *, place: int = 0, size: int = 1) -> str | None:
    """Return what is wrong with the files of a checkpoint, or None; several ranks share the reading."""
    try:
        for part, wanted in sorted(_parts(folder, step).items())[place::size]:
            path = folder / step_name(step) / FILE.format(part=part)
            with path.open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != wanted:
                    return f"{path}: the SHA-256 differs from that of {META}"
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    except SpecError as error:
        return str(error)
    return None


def load(folder: Path, step: int, chosen: Callable[[str], bool] = lambda name: True) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint whose names are chosen, whole, whichever ranks wrote them."""
    found: dict[str, Tensor] = {}
    for part in _parts(folder, step):
        path = folder / step_name(step) / FILE.format(part=part)
        try:
            found.update(read_tensors(path, lambda key: chosen(_slice_of(key)[0])))
        except (OSError, ValueError, KeyError, TypeError, struct.error, RuntimeError) as error:
            raise _damaged(path, f"cannot be read: {type(error).__name__} {error}") from error
    return _whole_tensors(found, folder, step)


def read_tensors(path: Path, chosen: Callable[[str], bool]) -> dict[str, Tensor]:
    """Return the chosen tensors of a safetensors file."""
    found, there = {}, path.stat().st_size
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        if size > there:
            raise ValueError(f"a header of {size} bytes")
        header = json.loads(file.read(size))
        for name, fields in header.items():
            if name != "__metadata__" and chosen(name):
                begin, end = fields["data_offsets"]
                if not 0 <= begin <= end <= there:
                    raise ValueError(f"{name} lies at {begin} to {end}")
                file.seek(8 + size + begin)
                data = torch.frombuffer(bytearray(file.read(end - begin) or b"\0"), dtype=torch.uint8)
                dtype = _TORCH[fields["dtype"]]
                found[name] = data[: end - begin].view(dtype).reshape(fields["shape"])
    return found


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
            what = f"lacks slices of {whole}: {type(error).__name__} {error}"
            raise _damaged(folder / step_name(step), what) from error
    return made


def _parts(folder: Path, step: int) -> dict[str, str]:
    parts = read_meta(folder, step).get("parts")
    if isinstance(parts, dict) and all(name == Path(name).name for name in parts):
        return parts
    raise _damaged(folder / step_name(step) / META, "does not list the files of its ranks")


def read_meta(folder: Path, step: int) -> dict[str, Any]:
    """Return the meta data of a checkpoint, if it is as it was written."""
    path = folder / step_name(step) / META
    try:
        meta = dict(json.loads(path.read_text()))
        if meta.pop(_META_SUM, None) != _sum_of(meta):
            raise ValueError("its SHA-256 differs")
    except (OSError, ValueError, TypeError) as error:
        raise _damaged(path, f"cannot be read: {error}") from None
    return meta


def _sum_of(meta: Mapping[str, Any]) -> str:
    """Return the SHA-256 of meta data: damaged JSON may still parse, with another seed or another cut."""
    return hashlib.sha256(json.dumps(meta).encode()).hexdigest()


def _damaged(path: Path, what: str) -> SpecError:
    return SpecError(
        f"the checkpoint {what}",
        file=str(path),
        key="checkpoint",
        fix="Remove the folder of its step; then the checkpoint before it is used",
    )


def _write(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
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
