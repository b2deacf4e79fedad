"""A lab as the runtime takes it: how its ranks are started, what they stand for, who is there at first."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from foreshard.errors import SpecError
from foreshard.lab.lab import load_lab
from foreshard.lab.network import LabNetwork
from foreshard.runtime.emulation import Emulation


def emulation_of(file: str, *, ranks: int, network: LabNetwork | None = None) -> Emulation:
    """Return how so many ranks of a lab are started; `network` enforces the wall clock."""
    lab = load_lab(file)
    if len(lab.slow) < ranks:
        what = f"the lab has {len(lab.slow)} ranks, {ranks} start"
        rule = "A lab says what every rank is"
        raise SpecError(what, file=file, key="ranks", value=len(lab.slow), rule=rule)
    if lab.clock == "wall" and network is None:
        what = "the wall clock has to be enforced"
        rule = "Only `foreshard lab` makes slow ranks and links, as root"
        fix = 'Use foreshard lab, or clock = "cpu"'
        raise SpecError(what, file=file, key="clock", value="wall", rule=rule, fix=fix)
    emulation = Emulation(
        worker="foreshard.lab.lab_rank",
        file=str(Path(file).resolve()),
        cluster=lab.cluster(),
        expected=[rank for rank in range(ranks) if lab.there_at(0, rank)],
    )
    if network is None:
        return emulation
    return replace(emulation, address=network.address, command=network.command, watch=network.follow)
