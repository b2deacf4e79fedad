"""The algorithm and protocol that NCCL picks, the runner-up and the margin between them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from foreshard.comm.nccl.communicator import Communicator
from foreshard.comm.nccl.constants import limit
from foreshard.comm.nccl.estimates import COLLECTIVES, Estimate, estimates
from foreshard.errors import unknown

MESSAGES = ("all-to-all", "send")
"""What NCCL does by messages between pairs, without a choice of algorithm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclChoice:
    """What NCCL picks among its own estimates."""

    algorithm: str  # as NCCL spells it
    protocol: str
    estimates: tuple[Estimate, ...]  # that run, fastest first, then those that cannot; empty for messages

    @classmethod
    def among(cls, estimates: Iterable[Estimate]) -> NcclChoice:
        """Return the choice of the fastest estimate, of equal ones the first."""
        ranked = tuple(sorted(estimates, key=lambda found: found.time_s))
        algorithm, _, protocol = ranked[0].name.partition("/")
        return cls(algorithm=algorithm, protocol=protocol, estimates=ranked)

    @property
    def best(self) -> Estimate | None:
        """Return the estimate of the pick, None for messages."""
        return self.estimates[0] if self.estimates else None

    @property
    def runner_up(self) -> Estimate | None:
        """Return the second fastest that runs."""
        second = self.estimates[1] if len(self.estimates) > 1 else None
        return second if second is not None and second.runs else None

    @property
    def margin(self) -> float | None:
        """Return by how much of the pick's time the runner-up is slower."""
        best, second = self.best, self.runner_up
        return None if best is None or second is None else second.time_s / best.time_s - 1.0


def check_collective(collective: str) -> None:
    """Raise SpecError for a collective that is none of NCCL's."""
    if collective not in COLLECTIVES:
        raise unknown("collective", collective, (*COLLECTIVES, *MESSAGES), key="COLLECTIVE")


def nccl_choice(collective: str, num_bytes: float, comm: Communicator) -> NcclChoice:
    """Return what NCCL picks for a collective of ``num_bytes`` (as nccl-tests counts them).

    Equal estimates go to the one that NCCL compares first.

    Raises
    ------
    SpecError
        The collective is none of NCCL's.
    """
    if collective in MESSAGES:
        return NcclChoice(
            algorithm="P2P", protocol=_message_protocol(collective, num_bytes, comm), estimates=()
        )
    check_collective(collective)
    return NcclChoice.among(estimates(collective, num_bytes, comm))


def _message_protocol(collective: str, num_bytes: float, comm: Communicator) -> str:
    """Return the protocol of a message: LL for small ones inside a node, over the network always Simple."""
    message = num_bytes / (comm.num_ranks if collective == "all-to-all" else 1)
    return "LL" if comm.num_nodes == 1 and message <= limit("send_ll_bytes") else "Simple"
