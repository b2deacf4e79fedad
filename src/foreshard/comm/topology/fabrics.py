"""Fabrics between machines: one switch, leaf-spine, rails.

Every fabric takes machines of any kinds in order (see ``machines.py``), so that a pod of different machines
is a list of them. Switches do not slow what passes them: their links bound it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from foreshard.comm.topology.draft import Draft, Port
from foreshard.comm.topology.graph import Topology
from foreshard.comm.topology.machines import Machine
from foreshard.errors import SpecError


def one_machine(machine: Machine, *, name: str = "one machine") -> Topology:
    """Return a machine on its own; its NICs lead nowhere."""
    draft = Draft()
    machine(draft, 0)
    return draft.topology(name)


def flat(machines: Sequence[Machine], *, can_reduce: bool = False, name: str = "flat") -> Topology:
    """Return machines around one switch that passes all they send.

    Examples
    --------
    >>> from foreshard.comm.topology.machines import MACHINES
    >>> flat([MACHINES["hgx-h100"]] * 2).num_ranks
    16
    """
    draft = Draft()
    ports = _built(draft, machines)
    switch = draft.switch("fabric", can_reduce=can_reduce)
    for port in _all(ports):
        draft.plug(port, switch)
    return draft.topology(name)


def leaf_spine(
    machines: Sequence[Machine],
    *,
    nodes_per_leaf: int,
    num_spines: int,
    oversubscription: float = 1.0,
    hop_s: float = 0.0,
    name: str = "leaf-spine",
) -> Topology:
    """Return two levels: machines on leaves, every leaf joined to every spine.

    Parameters
    ----------
    oversubscription : float, >= 1
        What the machines of a leaf send over what its links to the spines carry.
    hop_s : float, seconds
        Latency between a leaf and a spine.
    """
    _at_least(nodes_per_leaf=nodes_per_leaf, num_spines=num_spines, oversubscription=oversubscription)
    draft = Draft()
    ports = _built(draft, machines)
    groups = [ports[i : i + nodes_per_leaf] for i in range(0, len(ports), nodes_per_leaf)]
    leaves = {f"leaf{i}": _all(group) for i, group in enumerate(groups)}
    _two_levels(draft, leaves, num_spines, oversubscription, hop_s)
    return draft.topology(name)


def rail_optimised(
    machines: Sequence[Machine],
    *,
    num_spines: int,
    oversubscription: float = 1.0,
    hop_s: float = 0.0,
    name: str = "rail-optimised",
) -> Topology:
    """Return rails: the r-th ports of all machines meet at switch r, and rails meet at the spines.

    Without spines, traffic changes rails inside machines only.
    """
    _at_least(oversubscription=oversubscription)
    draft = Draft()
    rails: dict[str, list[Port]] = defaultdict(list)
    for ports in _built(draft, machines):
        for rail, port in enumerate(ports):
            rails[f"rail{rail}"].append(port)
    _two_levels(draft, rails, num_spines, oversubscription, hop_s)
    return draft.topology(name)


def _built(draft: Draft, machines: Sequence[Machine]) -> list[tuple[Port, ...]]:
    """Add all machines and return their ports, machine by machine."""
    if not machines:
        raise SpecError("no machine", key="machines", rule="A fabric joins at least one machine")
    return [machine(draft, node) for node, machine in enumerate(machines)]


def _all(ports: Iterable[Sequence[Port]]) -> list[Port]:
    return [port for some in ports for port in some]


def _two_levels(
    draft: Draft, leaves: dict[str, list[Port]], num_spines: int, oversubscription: float, hop_s: float
) -> None:
    """Add leaves with their ports, and spines that carry an equal part of each leaf's traffic."""
    top = [draft.switch(f"spine{i}") for i in range(num_spines)]
    for name, ports in leaves.items():
        draft.leaf(name, ports, top, oversubscription=oversubscription, latency_s=hop_s)


def _at_least(**values: float) -> None:
    """Refuse a count or ratio below 1."""
    for key, value in values.items():
        if value < 1:
            raise SpecError(f"{key} {value:g}", key=key, value=value, rule="It is at least 1")
