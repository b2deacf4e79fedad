"""The shorthand of a cluster: terms of nodes joined by '+', and the NIC rates after '@'."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from difflib import get_close_matches

from foreshard import units
from foreshard.catalog.devices import near_devices, resolve_device, why_unresolvable
from foreshard.catalog.instances import (
    Instance,
    instances,
    instances_named,
    interconnects,
    largest_node,
    usual_node_size,
)
from foreshard.errors import SpecError
from foreshard.spec.cluster import MAX_DEVICES
from foreshard.spec.device import Device

_BY = r"\s*[xX×*]\s*"  # between the numbers of a term
_COUNT = r"([0-9]{1,7})"
_MAX_CHARS = 4096  # about 200 terms; more nodes than that differ in a file
_SYSTEM = re.compile(r"(?:nvidia[- ])?[dh]gx[- _]?([a-z].*)", re.IGNORECASE)
_SYSTEM_DEVICES = 8  # accelerators of a DGX or HGX board since the V100's
_EACH = re.compile(r"\s*(?:/|\bper\b)\s*(gpu|device|chip|accelerator|node|host|machine)s?\s*$", re.IGNORECASE)
# A number and a prefix that leave open whether bits or bytes are meant: 400G, 400gb/s, 50GBps, 400 gigabit.
_OPEN_RATE = re.compile(
    r"\s*([0-9.]+)\s*([kmgt])(?:ig|eg|er)?a?(?:b|bits?|bytes?)?\s*(?:/s(?:ec)?|ps|per second)?\s*",
    re.IGNORECASE,
)
_OF_DEVICE = ("gpu", "device", "chip", "accelerator")
_PORT = re.compile(
    r"(?:infiniband|ib)?[- ]*(?:(?:[0-9]{1,4}\s*(?:g|gb|gb/s|gbps|gbit)?)[- ]+)?"
    r"(edr|hdr|ndr|xdr)[- ]*(?:100|200|400|800)?\s*(?:g|gb|gb/s|gbps)?(?:[- ]*(?:infiniband|ib))?",
    re.IGNORECASE,
)  # one port of InfiniBand by its generation: NDR, IB NDR, InfiniBand NDR400, 400Gb NDR
_NODES_OF = re.compile(
    rf"^{_COUNT}\s*(?:nodes?|servers?|machines?|hosts?)\s*(?:of|x|with|[*×])?\s*", re.IGNORECASE
)
_SLICE = re.compile(r"(?:cloud[- ]*)?(?:tpu[- ]*)?v(2|3|4|5p|5e|5litepod|6e)-([0-9]{1,6})", re.IGNORECASE)
_BY_CORES = ("2", "3", "4", "5p")  # generations whose slices are named by cores, two of a chip
_SOLD_AS = dict.fromkeys(("dgx-2", "dgx2"), (16, "v100-sxm3-32gb"))
_SOLD_AS["dgx-1v"] = (8, "v100-sxm-16gb")
"""Systems whose names say nothing of their devices: devices of one, and which."""
_SOLD_BY_NUMBER = re.compile(
    r"(?:lambda[-_ ])?gpu[-_ ](?P<lambda>[0-9]{1,2})x[-_ ](?P<card>.+)"
    r"|(?:nvidia[- ])?hgx[-_ ](?P<board>.+?)[-_ ](?P<hgx>[0-9]{1,2})[- ]?gpus?"
    r"|(?:oci-)?[bv]m\.gpu\.(?P<shape>[a-z0-9]+)\.(?P<oci>[0-9]{1,2})"
    r"|(?:coreweave[- ])?gd-(?P<coreweave>[0-9]{1,2})x(?P<gd>[a-z0-9]+?)(?:ib)?(?:-[a-z][0-9]+)?"
    r"|(?P<type>[a-z0-9]+)-(?P<cw>[0-9]{1,2})x"
    r"|(?P<tpu>ct[0-9]l?p?|ct6e|tpu7x)-(?:hightpu|standard)-(?P<chips>[0-9]{1,2})t"
    r"|(?P<slice>[a-z][a-z0-9-]+?)(?:-ib)?\.(?P<crusoe>[0-9]{1,2})x",
    re.IGNORECASE,
)
"""Nodes whose names say how many of which device.

They are Lambda's, HGX boards, OCI's, CoreWeave's (two ways), TPU machine types and Crusoe's.
"""
_OF_SYSTEM = re.compile(r"(.+?)[- ]([0-9]{3,4})\s*GB", re.IGNORECASE)  # DGX A100 640GB: memory of all
_TRAILING_RATE = re.compile(
    r"\s*(?:,|\bwith\b|\bat\b|\bover\b)?\s+([0-9][0-9.]*\s*[kmgt]b(?:it|its)?(?:/s|ps)(?:\s*/\s*gpu)?)$",
    re.IGNORECASE,
)  # a NIC rate without its '@'
_JOINED = re.compile(r"\s*(?:,|;|&|\band\b|\bplus\b)\s*", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """Equal nodes as a shorthand states them; `nic_bytes_per_s` is of a whole node. None: not stated."""

    count: int
    per_node: int
    device: Device
    named: str  # the device as it was written
    instance: Instance | None = None
    nic_bytes_per_s: float | None = None
    nics: int | None = None


def read_shorthand(text: str) -> tuple[Term, ...]:
    """Return the terms of a shorthand.

    A rate after the last term alone is that of every node; where several terms have one, or another than
    the last, each rate is of its own term.

    Parameters
    ----------
    text : str
        ``8xh100`` (one node), ``2x8xh100-sxm@400Gb/s/gpu``, ``4xaws-p5.48xlarge``, ``2xdgx-h100``, or
        several joined by ``+``.

    Raises
    ------
    SpecError
        With rule and fix, for anything else.

    Examples
    --------
    >>> [(term.count, term.per_node, term.device.name) for term in read_shorthand("8xh100+2x4xrtx-3090")]
    [(1, 8, 'h100-sxm'), (2, 4, 'rtx-3090')]
    """
    if len(text) > _MAX_CHARS:
        raise _unreadable(text, "the cluster description is too long")
    written = [part.partition("@") for part in text.strip().split("+")]
    terms = [_term(text, nodes.strip()) for nodes, _, _ in written]
    rated = [index for index, (_, at, _) in enumerate(written) if at]
    for index in rated:
        rate = written[index][2]
        of_all = rated == [len(terms) - 1]
        for place in range(len(terms)) if of_all else (index,):
            nic, nics = nic_rate(text, rate, terms[place].per_node)
            terms[place] = replace(terms[place], nic_bytes_per_s=nic, nics=nics)
    return tuple(terms)


def nic_rate(text: str, rate: str, per_node: int) -> tuple[float, int | None]:
    """Return the NIC rate of a node, as written or so many times a port's or a device's, and how many."""
    each = _EACH.search(rate)
    plain = rate[: each.start()] if each else rate
    ports = re.fullmatch(rf"\s*([0-9]{{1,3}}){_BY}(.+)", plain)
    times = int(ports[1]) if ports else 1
    of_devices = each is not None and each[1].lower() in _OF_DEVICE
    if of_devices:
        times *= per_node
    port = _port(ports[2] if ports else plain) if ports or each else None
    try:
        nic = times * (port or units.parse(ports[2] if ports else plain, "bytes_per_s"))
    except SpecError as error:
        error.key, error.fix = "cluster", _rate_fix(ports[2] if ports else plain) or error.fix
        raise
    if not 1.0 <= nic <= 1e15:
        raise _unreadable(text, f"the NIC rate '{rate.strip()}' is out of range")
    return nic, times if ports or of_devices else None


def _rate_fix(rate: str) -> str | None:
    """Return what to write for a rate that names a kind of link, or that leaves bits or bytes open."""
    short = _OPEN_RATE.fullmatch(rate)
    if short:
        amount = f"{short[1]}{short[2].upper()}"
        return f"Write '{amount}b/s' for bits, '{amount}B/s' for bytes"
    if re.search(r"nvlink|nvswitch|pcie|infinity fabric|xgmi", rate, re.IGNORECASE):
        return "Leave it out: it joins devices of a node and is known; after @ is the rate of NICs"
    port = _port(rate)
    if port is not None:
        return (
            f"One such port is '{port * 8 / 1e9:g}Gb/s'; write '8x{port * 8 / 1e9:g}Gb/s' for eight of a node"
        )
    if re.search(
        r"\b(efa|roce|tcpx|tcpxo|ethernet|infiniband|ib|slingshot|elastic fabric)\b", rate, re.IGNORECASE
    ):
        return "State its rate: '3200Gb/s' of a node, '400Gb/s/gpu' of each device, or '8x400Gb/s' of ports"
    if rate.strip().replace(".", "", 1).isdigit():
        return f"Write '{rate.strip()}Gb/s' for bits, '{rate.strip()}GB/s' for bytes"
    return None


def _port(rate: str) -> float | None:
    """Return the rate of a port that is named by its generation of InfiniBand."""
    named = _PORT.fullmatch(rate.strip())
    return interconnects().get(f"InfiniBand {named[1].upper()} 4x") if named else None


def _term(text: str, term: str) -> Term:
    """Build the nodes of one term: [NODESx]PER_NODExDEVICE, or [NODESx] an instance, a DGX or a TPU slice."""
    term = _NODES_OF.sub(lambda match: f"{match[1]}x", term)
    if _TRAILING_RATE.search(term):
        raise _unreadable(text, f"cannot read '{term[:80]}'")
    sized = re.fullmatch(rf"{_COUNT}{_BY}{_COUNT}{_BY}(.+)", term)
    if sized:
        if int(sized[1]) < 1 or int(sized[2]) < 1:
            raise _unreadable(text, f"'{term}' has no devices")
        return Term(
            count=int(sized[1]), per_node=int(sized[2]), device=resolve_device(sized[3]), named=sized[3]
        )
    for form in (
        rf"(?:(?P<count>[0-9]{{1,7}})(?:{_BY}|\s+))?(?P<name>.+)",
        rf"(?P<name>.+?)(?:{_BY}|\s*:\s*)(?P<count>[0-9]{{1,7}})",
    ):
        counted = re.fullmatch(form, term)
        whole = _whole_nodes(int(counted["count"] or 1), counted["name"].strip()) if counted else None
        if whole is not None:
            return whole
    if re.fullmatch(rf"[0-9]+{_BY}[0-9]+{_BY}.+", term):
        raise _unreadable(text, f"'{term[:80]}' has more than {MAX_DEVICES} devices")
    if re.fullmatch(rf"0+(?:{_BY}|\s).*", term):
        raise _unreadable(text, f"'{term[:80]}' has no devices")
    for count, per_node, name in _readings(term):
        device = _device(name)
        if device is not None:
            return (
                _one_node(text, term, int(per_node), device, name)
                if count is None
                else Term(count=int(count), per_node=int(per_node), device=device, named=name)
            )
    alone = _device(term)
    if alone is not None and _is_card(alone):
        return Term(count=1, per_node=1, device=alone, named=term)
    for name in (term, *(name for _, _, name in _readings(term))):
        if why_unresolvable(name):
            resolve_device(name)  # raises: what it is
    raise _unreadable(text, f"cannot read '{term[:80]}'")


def _whole_nodes(count: int, name: str) -> Term | None:
    """Return nodes of an instance type, which may leave out a vendor that no other has, or DGX systems."""
    if count < 1:
        return None
    ours = instances_named(name)
    if len(ours) == 1:
        found = instances()[ours[0]]
        sold = resolve_device(found.device)
        return Term(count=count, per_node=found.per_node, device=sold, named=found.device, instance=found)
    if name.lower().replace(" ", "-") in _SOLD_AS:
        per_node, sold_as = _SOLD_AS[name.lower().replace(" ", "-")]
        return Term(count=count, per_node=per_node, device=resolve_device(sold_as), named=sold_as)
    part = _SLICE.fullmatch(name)
    if part and count == 1:
        return _slice(part[1].lower(), int(part[2]))
    numbered = _SOLD_BY_NUMBER.fullmatch(name)
    if numbered:
        per_node, kind = sorted(filter(None, numbered.groups()), key=lambda part: not part.isdigit())
        device = _device(kind)
        if device is not None and 0 < int(per_node) <= largest_node(device):
            return Term(count=count, per_node=int(per_node), device=device, named=kind)
    system = _SYSTEM.fullmatch(name)
    device = _device(_of_one(system[1])) if system else None
    if device is None:
        return None
    if usual_node_size(device) != _SYSTEM_DEVICES:
        raise SpecError(
            f"'{name[:80]}' is no node of {_SYSTEM_DEVICES} {device.name}",
            key="cluster",
            value=name[:80],
            rule=f"A DGX or HGX is read as a node of {_SYSTEM_DEVICES}; this one joins nodes of "
            f"{usual_node_size(device)} by NVLink",
            fix=_fix(device.name),
        )
    return Term(count=count, per_node=_SYSTEM_DEVICES, device=device, named=name)


def _of_one(name: str) -> str:
    """Return the device of a system, of which the memory of all its devices is stated or not."""
    whole = _OF_SYSTEM.fullmatch(name)
    each, rest = divmod(int(whole[2]), _SYSTEM_DEVICES) if whole else (0, 1)
    return name if whole is None or rest else f"{whole[1]}-{each}gb"


def _slice(generation: str, number: int) -> Term | None:
    """Return a slice of TPUs as Google names it: by cores, or by chips; its hosts have four chips."""
    chips, rest = divmod(number, 2 if generation in _BY_CORES else 1)
    name = f"tpu-v{generation.replace('litepod', 'e')}"
    device = _device(name)
    if device is None or rest or chips < 1:
        return None
    per_node = usual_node_size(device) if chips % usual_node_size(device) == 0 else chips
    return Term(count=chips // per_node, per_node=per_node, device=device, named=name)


def _readings(term: str) -> list[tuple[str | None, str, str]]:
    """Return how a term may be meant, likeliest first: nodes (None for one), devices of each, their name."""
    patterns = (
        rf"(?P<per_node>[0-9]{{1,7}}){_BY}(?P<name>.+)",
        rf"(?P<name>.+?)(?:{_BY}|\s*:\s*)(?P<per_node>[0-9]{{1,7}})",
        rf"(?P<count>[0-9]{{1,7}}){_BY}(?P<per_node>[0-9]{{1,7}})\s*(?P<name>[a-zA-Z].*)",
        r"(?P<per_node>[0-9]{1,7})\s*(?P<name>[a-zA-Z].*)",
        r"(?P<per_node>[0-9]{1,7})\s+(?P<name>.+)",
    )
    found = (re.fullmatch(pattern, term) for pattern in patterns)
    return [
        (match.groupdict().get("count"), match["per_node"], match["name"].strip())
        for match in found
        if match is not None and int(match["per_node"]) > 0 and int(match.groupdict().get("count") or 1) > 0
    ]


def _device(name: str) -> Device | None:
    try:
        return resolve_device(name)
    except SpecError:
        return None


def _is_card(device: Device) -> bool:
    """Return whether a device is sold as a card: its name alone is one of them, not a node."""
    return device.form not in ("sxm", "oam") and usual_node_size(device) == 8


def _one_node(text: str, term: str, per_node: int, device: Device, named: str) -> Term:
    """Return one node of so many devices, or raise where no node of this device has as many."""
    most = largest_node(device)
    if per_node <= most:
        return Term(count=1, per_node=per_node, device=device, named=named)
    nodes, rest = divmod(per_node, most)
    meant = (
        f"{nodes}x{most}x{device.name}" if not rest else f"{nodes}x{most}x{device.name}+{rest}x{device.name}"
    )
    raise SpecError(
        f"'{term[:80]}' is one node of {per_node} {device.name}",
        key="cluster",
        value=text[:80],
        rule=f"PER_NODExDEVICE is one node, and a node has at most {most} of these devices",
        fix=f"Write '{meant}' for {nodes + bool(rest)} nodes, or '1x{per_node}x{device.name}' if it is one",
    )


def _unreadable(text: str, what: str) -> SpecError:
    """Return the error of a shorthand that cannot be read, with the nearest that can."""
    rule = (
        "A cluster is [NODESx]PER_NODExDEVICE terms joined by '+' with an optional '@RATE', "
        "an instance name, or the path of a TOML file"
    )
    fix = _fix(text.strip())
    return SpecError(
        what, key="cluster", value=text if len(text) <= 80 else text[:77] + "...", rule=rule, fix=fix
    )


def _fix(text: str) -> str:
    """Return what to write for a shorthand that cannot be read: its readings, the nearest, or an example."""
    alone = _device(_VENDOR.sub("", text)) if len(text) <= _MAX_CHARS // 16 else None
    if alone is not None and alone.name.endswith("-nvl72"):
        return f"Write '18x4x{alone.name}' for a rack of 72, '1x{alone.name}' for one device"
    if alone is not None and not _is_card(alone):
        return f"Write '1x{alone.name}' for one, '{usual_node_size(alone)}x{alone.name}' for a node of them"
    if alone is not None:
        return f"Did you mean '1x{alone.name}'?"
    families = instances_named(re.sub(rf"^[0-9]{{1,7}}{_BY}", "", text)) if len(text) <= 80 else ()
    if len(families) > 1:
        listed = ", ".join(f"'{name}'" for name in families[:3])
        return f"Write one of {listed}"
    if re.fullmatch(r"(?:nvidia[- ])?nvl[- ]?72", text.lower()):
        return "Write '18x4xgb200-nvl72' or '18x4xgb300-nvl72' for a rack of 72"
    turned = re.fullmatch(rf"([a-zA-Z][^×*]{{0,40}}?){_BY}([0-9]{{1,4}}){_BY}([0-9]{{1,4}})", text)
    if turned and _device(turned[1]):
        name, a, b = turned.groups()
        return f"Write '{b}x{a}x{name}' for {b} nodes of {a}, or '{a}x{b}x{name}' for {a} nodes of {b}"
    near = _nearest(text)
    return f"Did you mean '{near}'?" if near else _EXAMPLE


_EXAMPLE = "Write it like '8x8xh100-sxm@3200Gb/s'. See 'foreshard clusters'"
_VENDOR = re.compile(
    r"^(?:aws|azure|gcp|lambda|coreweave|runpod|vast|nebius|crusoe|oci|together)\b[-: /]*", re.IGNORECASE
)
"""A cloud before a device or a number of them."""


def _nearest(text: str) -> str | None:
    """Return the readable shorthand that comes nearest, None where none does."""
    if len(text) > 200:
        return None
    without = _VENDOR.sub("", text)
    if without != text and _readable(without):
        return without
    words = re.sub(
        r"\b(?:nodes?|of|with|each|gpus?|devices?|servers?|machines?)\b|[()]", " ", text, flags=re.IGNORECASE
    )
    words = re.sub(r"(?<=\d)\s+(?=\d)", "x", " ".join(words.split()))
    rated = _TRAILING_RATE.sub(r"@\1", text)
    for spelled in (rated, _JOINED.sub("+", text), re.sub(r"\s*x\s*|(?<=\d) (?=[a-z])", "x", words), words):
        if spelled != text and _readable(spelled):
            return spelled
    tail = re.sub(r"^[0-9]{1,9}x", "", text[:100].lower())
    near = get_close_matches(tail, instances(), n=1, cutoff=0.7)
    if near:
        return near[0]
    none = re.match(rf"^0+{_BY}(.+)", text)
    if none and _readable(f"1x{none[1]}"):
        return f"1x{none[1]}"
    sized = re.fullmatch(rf"((?:0*[1-9][0-9]{{0,6}}{_BY}){{1,2}})(.+)", text)
    known = near_devices(sized[2]) if sized else []
    return f"{re.sub(_BY, 'x', sized[1])}{known[0]}" if sized and known else None


def _readable(text: str) -> bool:
    try:
        read_shorthand(text)
    except (SpecError, RecursionError):
        return False
    return True
