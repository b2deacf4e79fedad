"""Whether the file of a profile holds what costs are fitted to: seconds and bytes of every layer, links."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from foreshard.errors import SpecError

_PHASES = ("forward", "backward", "backward_input")
_FINGERPRINT = {"job": str, "layers": int, "device": str, "processor": str, "accelerator": str}


class Rules:
    """Checks one file; errors name it and the key."""

    def __init__(self, path: str):
        self.path = path

    def check(self, data: Mapping[str, Any]) -> None:
        """Raise SpecError for what is missing, or is not what a profile has there."""
        fingerprint = self.table(data, "fingerprint", tuple(_FINGERPRINT))
        for key, kind in _FINGERPRINT.items():
            if not isinstance(fingerprint[key], kind) or isinstance(fingerprint[key], bool):
                raise self.error(f"fingerprint.{key}", fingerprint[key], f"It is of type {kind.__name__}")
        if fingerprint["layers"] < 1:
            raise self.error("fingerprint.layers", fingerprint["layers"], "A job has a layer or more")
        if not isinstance(data.get("date"), str):
            raise self.error("date", data.get("date"), "It is the day of the profile")
        self.numbers(data, "tokens_per_sample", "", shape=(), least=1e-9)
        self.layers(data, "", fingerprint["layers"])
        parts = self.table({"tensor": {}, **data}, "tensor")
        for degree in parts:
            where, part = f"tensor.{degree}.", self.table(parts, degree, ("sums",), where="tensor.")
            sums = self.table(part, "sums", ("forward", "backward"), where=where)
            if not all(isinstance(row, list) and len(row) == fingerprint["layers"] for row in sums.values()):
                raise self.error(
                    f"{where}sums", "", f"It has lists for {fingerprint['layers']} layers each way"
                )
            self.layers(part, where, fingerprint["layers"])
        if data.get("links"):
            self.links(self.table(data, "links", ("launch_s", "messages", "sums")))

    def layers(self, data: Mapping[str, Any], where: str, count: int) -> None:
        """Check passes, bytes and the optimizer of so many layers."""
        passes = self.table(data, "passes", where=where)
        if not passes or not all(size.isascii() and size.isdecimal() and int(size) for size in passes):
            raise self.error(f"{where}passes", list(passes), "Passes are by numbers of samples, one at least")
        for size, rows in passes.items():
            key = f"{where}passes.{size}."
            self.table(passes, size, ("saved_bytes", "boundary_bytes", *_PHASES), where=f"{where}passes.")
            for name in ("saved_bytes", "boundary_bytes"):
                self.numbers(rows, name, key, shape=(count,))
            for name in _PHASES:
                self.numbers(rows, name, key, shape=(-1, count, 2))
        for name, number in (("bytes", "parameter_bytes"), ("optimizer", "state_bytes")):
            rows = data.get(name)
            if not isinstance(rows, list) or len(rows) != count:
                raise self.error(f"{where}{name}", "", f"It is a list for {count} layers")
            for i, row in enumerate(rows):
                key = f"{where}{name}[{i}]"
                if not isinstance(row, dict):
                    raise self.error(key, row, "It is an object")
                self.numbers(row, number, f"{key}.", shape=())
                if name == "optimizer":
                    self.numbers(row, "seconds", f"{key}.", shape=(-1, 2))
                else:
                    self.numbers(row, "frozen_bytes", f"{key}.", shape=())

    def links(self, links: Mapping[str, Any]) -> None:
        """Check messages and sums that were timed."""
        self.numbers(links, "launch_s", "links.", shape=())
        for name in ("messages", "sums"):
            if not isinstance(links[name], list):
                raise self.error(f"links.{name}", links[name], "It is a list")
            for i, row in enumerate(links[name]):
                key = f"links.{name}[{i}]"
                if not isinstance(row, dict) or not isinstance(row.get("apart"), bool):
                    raise self.error(key, row, "It says ranks, apart, bytes and seconds")
                self.numbers(row, "ranks", f"{key}.", shape=(-1,))
                self.numbers(row, "bytes", f"{key}.", shape=(), least=1.0)
                self.numbers(row, "seconds", f"{key}.", shape=(-1,))
                if len(row["ranks"]) < 2:
                    raise self.error(f"{key}.ranks", row["ranks"], "A link joins two ranks or more")

    def table(
        self, data: Mapping[str, Any], key: str, names: tuple[str, ...] = (), *, where: str = ""
    ) -> Mapping[str, Any]:
        """Return the object under a key, with all `names` in it."""
        found = data.get(key)
        if not isinstance(found, dict):
            raise self.error(f"{where}{key}", found, "It is an object")
        for name in names:
            if name not in found:
                raise self.error(f"{where}{key}.{name}", None, "A profile has this key")
        return found

    def numbers(
        self, data: Mapping[str, Any], name: str, where: str, *, shape: tuple[int, ...], least: float = 0.0
    ) -> None:
        """Check that numbers are there, finite and not below `least`; -1 in the shape is any, from one on."""
        stated = data.get(name)
        try:
            found = np.array(stated)
        except ValueError:  # ragged
            found = np.array(None)
        fits = found.ndim == len(shape) and all(
            have == want or (want == -1 and have > 0) for have, want in zip(found.shape, shape, strict=True)
        )
        if not fits or found.dtype.kind not in "iuf" or not (np.isfinite(found) & (found >= least)).all():
            size = " x ".join("n" if length == -1 else str(length) for length in shape)
            what = f"{size} numbers" if shape else "a number"
            raise self.error(f"{where}{name}", stated, f"It is {what}, finite and not negative")

    def error(self, key: str, value: object, rule: str) -> SpecError:
        """Return the error of a broken rule."""
        shown = repr(value)[:60]
        what = f"{shown} is not what a profile has there" if value is not None else "is missing"
        fix = "Run foreshard profile again"
        return SpecError(what, file=self.path, key=key, value=shown, rule=rule, fix=fix)
