"""The file of refitted constants of NCCL's model: written by ``comm import``, taken by ``comm predict``."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foreshard.comm.nccl.constants import Constants, shipped_constants, tuning
from foreshard.errors import SpecError, did_you_mean
from foreshard.spec.codec import parse_toml, read_text

_KEYS = ("based_on", "measured_with", "measured_on", "constants")
_MOST = 1e9  # microseconds or GB/s


@dataclass(frozen=True, slots=True, kw_only=True)
class RefittedConstants:
    """Constants of a machine in place of some of NCCL's, and where they are from.

    based_on : release of NCCL whose tables the others are
    measured_with : release that was measured, empty where the log does not say
    measured_on : the cluster
    """

    based_on: str
    measured_with: str
    measured_on: str
    constants: Constants
    path: str = ""


def constants_text(
    constants: Mapping[str, float], *, measured_with: str, measured_on: str, shared: Sequence[Sequence[str]]
) -> str:
    """Return the file's text."""
    alike = [f"#   {', '.join(group)}\n" for group in shared]
    lines = [
        "# Constants of NCCL's own model, refitted by foreshard to measured times: us, and GB/s on 1, 2, or",
        "# more (3) nodes. NCCL ships these in no release; all others are those that it ships.",
    ]
    if alike:
        lines.append("# Of these the times told a common factor only:")
    lines = [*lines, *(line.rstrip() for line in alike)]
    lines += [
        f'based_on = "{tuning()["release"]}"',
        f'measured_with = "{measured_with}"',
        f"measured_on = {json.dumps(measured_on)}",
        "",
        "[constants]",
        *(f'"{name}" = {value:.6g}' for name, value in constants.items()),
    ]
    return "\n".join(lines) + "\n"


def read_constants(path: str) -> RefittedConstants:
    """Return what a file states.

    Raises
    ------
    SpecError
        It cannot be read, is no TOML, or has another key or a value that is no number above 0.
    """
    data = parse_toml(read_text(path, max_bytes=2**20), file=path)
    _check_keys(data, path)
    shipped = shipped_constants()
    found: dict[str, float] = {}
    for name, value in data["constants"].items():
        key = f"constants.{name}"
        if name not in shipped:
            fix = did_you_mean(name, shipped, otherwise="Leave it out") or ""
            raise SpecError(f"unknown constant {name[:60]!r}", file=path, key=key, rule=_NAMED, fix=fix)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0.0 < value < _MOST:
            rule = f"Must be a number above 0 and below {_MOST:g}, in us or GB/s"
            fix = f"Leave it out for NCCL's own, {shipped[name]:g}"
            raise SpecError(f"{name} {value!r}", file=path, key=key, value=value, rule=rule, fix=fix)
        found[name] = float(value)
    texts = {name: str(data.get(name, "")) for name in _KEYS[:3]}
    return RefittedConstants(constants=found, path=path, **texts)


_NAMED = "Constants are named as in NCCL's tables, such as base_latency_us.ring.LL or ll_max.hopper.1"


def _check_keys(data: Mapping[str, Any], path: str) -> None:
    made = "It is written by foreshard comm import LOG CLUSTER --fit-nccl FILE"
    for key in data:
        if key not in _KEYS:
            rule = f"Keys are {', '.join(_KEYS)}"
            raise SpecError(f"unknown key {key[:40]!r}", file=path, key=key, rule=rule, fix=made)
    if not isinstance(data.get("constants"), dict):
        what, rule = "no table of constants", "Refitted constants stand under [constants]"
        raise SpecError(what, file=path, key="constants", rule=rule, fix=made)
    if str(data.get("based_on", "")) != str(tuning()["release"]):
        raise SpecError(
            f"constants based on NCCL {data.get('based_on')!s:.40}",
            file=path,
            key="based_on",
            value=str(data.get("based_on"))[:40],
            rule=f"The tables that they stand in are those of NCCL {tuning()['release']}",
            fix="Refit them again: foreshard comm import LOG CLUSTER --fit-nccl FILE",
        )
    with_ = str(data.get("measured_with", ""))
    if with_ and not re.fullmatch(r"\d{1,3}\.\d{1,3}(\..*)?", with_):
        raise SpecError(
            f"measured with NCCL {with_:.40}",
            file=path,
            key="measured_with",
            value=with_[:40],
            rule="It is a release of NCCL, such as 2.27.7, or empty",
            fix='Write measured_with = ""',
        )
