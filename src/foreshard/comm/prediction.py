"""One collective on the first ranks of a cluster: its time, its bandwidths, and what the library picks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from numpy.typing import ArrayLike

from foreshard.comm.collectives import (
    Times,
    all_gather_s,
    all_reduce_s,
    all_to_all_s,
    broadcast_s,
    reduce_scatter_s,
    send_s,
)
from foreshard.comm.fabric import Fabric, fabric_between
from foreshard.comm.intervals import collective_evidence, collective_intervals
from foreshard.comm.nccl.choice import MESSAGES, NcclChoice, nccl_choice
from foreshard.comm.nccl.communicator import Communicator, communicator_of, has_nccl
from foreshard.comm.nccl.constants import Constants
from foreshard.comm.nccl.estimates import COLLECTIVES
from foreshard.comm.nccl.rccl import has_rccl_model, rccl_choice
from foreshard.cost.tables import COLLECTIVES as TABLED
from foreshard.cost.tables import tabled
from foreshard.errors import SpecError, unknown
from foreshard.units import number_of

if TYPE_CHECKING:
    from foreshard.catalog.kernels import Tables
    from foreshard.spec.cluster import Cluster

NAMES = (*COLLECTIVES, *MESSAGES)
"""The collectives that can be predicted."""
TABLE = "table"
"""Evidence of a time that a measured table gives."""
CLOSED_FORMS = {
    "all-reduce": all_reduce_s,
    "all-gather": all_gather_s,
    "reduce-scatter": reduce_scatter_s,
    "broadcast": broadcast_s,
    "all-to-all": all_to_all_s,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectivePrediction:
    """A collective's time by the fitted closed form, and the choice of NCCL or RCCL by its own model."""

    collective: str
    num_bytes: float
    num_ranks: int
    time_s: float
    communicator: Communicator | None  # None where the devices are not those of NCCL
    choice: NcclChoice | None
    library: str  # whose choice it is: NCCL or RCCL; empty where there is none
    evidence: str  # what the time rests on, of `comm.intervals.EVIDENCE`, or `TABLE`
    time_intervals_s: Mapping[float, tuple[float, float]]  # by level; empty for a time from a table

    @property
    def algbw_bytes_per_s(self) -> float:
        """Return bytes of the caller per second."""
        return self.num_bytes / self.time_s

    @property
    def busbw_bytes_per_s(self) -> float:
        """Return what nccl-tests call bus bandwidth: bytes that cross the links of a ring per second."""
        return self.algbw_bytes_per_s * bus_factor(self.collective, self.num_ranks)


def bus_factor(collective: str, num_ranks: int) -> float:
    """Return bus bandwidth over algorithm bandwidth, as nccl-tests define it.

    Source: NVIDIA/nccl-tests doc/PERFORMANCE.md.

    Examples
    --------
    >>> bus_factor("all-reduce", 8), bus_factor("broadcast", 8)
    (1.75, 1.0)
    """
    others = (num_ranks - 1) / num_ranks
    return {"all-reduce": 2.0 * others, "broadcast": 1.0, "send": 1.0}.get(collective, others)


def predict_collective(
    collective: str,
    num_bytes: float,
    cluster: Cluster,
    num_ranks: int | None = None,
    *,
    era: str = "2.2x",
    release: str = "",
    constants: Constants | None = None,
    tables: Tables | None = None,
) -> CollectivePrediction:
    """Return the prediction of a collective over the first `num_ranks` devices (default: all).

    A send goes from the first of them to the last. `era` is that of `fabric_of`, `release` that of
    `communicator_of`; NCCL chooses with `constants` in place of some of its own. Measured `tables` give the
    time of what they cover: ranks of one scale-up domain.

    Raises
    ------
    SpecError
        No such collective, no bytes, less than two ranks, or more ranks than devices.
    """
    ranks = cluster.num_devices if num_ranks is None else num_ranks
    _check(collective, num_bytes, ranks, cluster)
    senders = 1 if collective == "send" else None
    fabric = fabric_between(cluster, range(ranks), nccl=era, tables=tables, senders=senders)
    communicator = communicator_of(cluster, ranks, release=release) if has_nccl(cluster, ranks) else None
    if communicator is not None and constants:
        communicator = replace(communicator, constants=constants)
    choice, library = None, ""
    if communicator is not None:
        choice, library = nccl_choice(collective, num_bytes, communicator), "NCCL"
    elif has_rccl_model(cluster, ranks):
        choice, library = rccl_choice(collective, num_bytes, ranks), "RCCL"
    time_s = float(collective_s(collective, num_bytes, ranks, fabric))
    measured = _is_tabled(collective, num_bytes, ranks, fabric)
    evidence = TABLE if measured else collective_evidence(cluster, ranks, float(fabric.domain))
    return CollectivePrediction(
        collective=collective,
        num_bytes=num_bytes,
        num_ranks=ranks,
        time_s=time_s,
        evidence=evidence,
        time_intervals_s={} if measured else collective_intervals(time_s, num_bytes, evidence),
        communicator=communicator,
        choice=choice,
        library=library,
    )


def collective_s(collective: str, num_bytes: ArrayLike, ranks: int, fabric: Fabric) -> Times:
    """Return the time of a collective of `NAMES` over so many ranks that follow each other."""
    if collective == "send":
        return send_s(num_bytes, ranks > fabric.domain, fabric)
    return CLOSED_FORMS[collective](num_bytes, ranks, 1, fabric)


def _is_tabled(collective: str, num_bytes: float, ranks: int, fabric: Fabric) -> bool:
    """Return whether a measured table gives the time."""
    name = {"reduce-scatter": "all-gather"}.get(collective, collective).replace("-", "_")
    if name not in TABLED or ranks > fabric.domain:
        return False
    return bool(tabled(getattr(fabric, f"{name}_table"), (ranks, num_bytes)))


def _check(collective: str, num_bytes: float, ranks: int, cluster: Cluster) -> None:
    if collective not in NAMES:
        raise unknown("collective", collective, NAMES, key="COLLECTIVE", rule="Collectives are")
    if not num_bytes > 0:
        raise SpecError(
            "no bytes to move",
            key="SIZE",
            value=num_bytes,
            rule="A collective moves at least one byte",
            fix="Give a size such as 64KiB or 1GiB",
        )
    if ranks < 2:
        raise SpecError(
            f"{ranks} rank exchanges nothing",
            key="--ranks",
            value=ranks,
            rule="A collective has at least two ranks",
            fix="Give --ranks 2 or more, or a cluster of several devices",
        )
    if ranks > cluster.num_devices:
        raise SpecError(
            f"{ranks} ranks on {number_of(cluster.num_devices, 'device')}",
            key="--ranks",
            value=ranks,
            rule="Every rank is a device of the cluster",
            fix=f"Give --ranks {cluster.num_devices} or less",
        )
