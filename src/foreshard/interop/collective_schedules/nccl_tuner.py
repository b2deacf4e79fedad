"""Choices of algorithms as the CSV that NCCL's example tuner plugin reads.

The plugin makes a choice cheap; what NCCL cannot run it then skips, without a word. So combinations that
NCCL's model skips are refused here. Source: NVIDIA/nccl ext-tuner/example (README.md) for the fields,
src/graph/tuning.cc (ncclTopoTuneModel) for the combinations.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import astuple, dataclass

from foreshard.comm.nccl.choice import nccl_choice
from foreshard.comm.nccl.communicator import Communicator
from foreshard.comm.nccl.estimates import COLLECTIVES
from foreshard.errors import SpecError, unknown

MAX_BYTES = 4294967295  # "all sizes"
FIELDS = (
    "collective_type",
    "min_bytes",
    "max_bytes",
    "algorithm",
    "protocol",
    "channels",
    "nNodes",
    "nRanks",
    "numPipeOps",
    "regBuff",
)
PROTOCOLS = ("ll", "ll128", "simple")
ALGORITHMS_OF = {
    "broadcast": ("ring",),
    "reduce": ("ring",),
    "allgather": ("ring", "collnet_direct", "nvls", "pat"),
    "reducescatter": ("ring", "collnet_direct", "nvls", "pat"),
    "allreduce": ("tree", "ring", "collnet_direct", "collnet_chain", "nvls", "nvls_tree"),
}
"""Algorithms that NCCL's model has a time for."""
_TUNER_NAME = {
    "Ring": "ring",
    "Tree": "tree",
    "NVLS": "nvls",
    "NVLSTree": "nvls_tree",
    "CollNetDirect": "collnet_direct",
    "CollNetChain": "collnet_chain",
    "PAT": "pat",
}
"""The tuner's names of algorithms as NCCL prints them."""
_SIMPLE_ONLY = ("collnet_direct", "collnet_chain", "nvls", "nvls_tree", "pat")


@dataclass(frozen=True, slots=True, kw_only=True)
class TunerChoice:
    """An algorithm for sizes of a collective, by NCCL's names; -1 stands for any, or for NCCL's default."""

    collective: str
    min_bytes: int
    max_bytes: int
    algorithm: str
    protocol: str = "simple"
    channels: int = -1
    num_nodes: int = -1
    num_ranks: int = -1
    num_pipe_ops: int = -1
    registered: int = -1

    def __post_init__(self) -> None:
        """Refuse what NCCL would not run."""
        if self.collective not in ALGORITHMS_OF:
            raise unknown("collective", self.collective, ALGORITHMS_OF, key="collective_type")
        known = ALGORITHMS_OF[self.collective]
        if self.algorithm not in known:
            rule = f"Algorithms of {self.collective} are"
            raise unknown("algorithm", self.algorithm, known, key="algorithm", rule=rule)
        protocols = ("simple",) if self.algorithm in _SIMPLE_ONLY else PROTOCOLS
        if self.protocol not in protocols:
            rule = f"Protocols of {self.algorithm} are"
            raise unknown("protocol", self.protocol, protocols, key="protocol", rule=rule)
        self._check_numbers()

    def _check_numbers(self) -> None:
        """Refuse numbers out of range."""
        if not 0 <= self.min_bytes <= self.max_bytes <= MAX_BYTES:
            rule = f"Sizes are from 0 to {MAX_BYTES}, the smaller first"
            raise SpecError(
                f"{self.min_bytes} to {self.max_bytes} bytes",
                key="max_bytes",
                value=self.max_bytes,
                rule=rule,
            )
        counts = (
            ("channels", self.channels),
            ("nNodes", self.num_nodes),
            ("nRanks", self.num_ranks),
            ("numPipeOps", self.num_pipe_ops),
        )
        for key, value in counts:
            if value != -1 and value < 1:
                raise SpecError(f"{key} is {value}", key=key, value=value, rule="It is at least 1, or -1")
        if self.registered not in (-1, 0, 1):
            raise SpecError(
                "regBuff", key="regBuff", value=self.registered, rule="It is 0, 1, or -1 for both"
            )
        exact = -1 not in (self.num_nodes, self.num_ranks)
        if self.algorithm == "pat" and exact and self.num_nodes != self.num_ranks:
            raise SpecError(
                f"pat on {self.num_ranks} ranks of {self.num_nodes} nodes",
                key="nRanks",
                value=self.num_ranks,
                rule="NCCL runs PAT with one rank for each node",
            )


def nccl_tuner_csv(choices: Iterable[TunerChoice]) -> str:
    """Return the file that NCCL_TUNER_CONFIG_FILE names.

    Raises
    ------
    SpecError
        For two choices that match the same call.

    Examples
    --------
    >>> choice = TunerChoice(collective="allreduce", min_bytes=0, max_bytes=9, algorithm="tree")
    >>> print(nccl_tuner_csv([choice]))
    # collective_type,min_bytes,max_bytes,algorithm,protocol,channels,nNodes,nRanks,numPipeOps,regBuff
    allreduce,0,9,tree,simple,-1,-1,-1,-1,-1
    <BLANKLINE>
    """
    rows = list(choices)
    for n, one in enumerate(rows):
        for other in rows[:n]:
            if _overlap(one, other):
                raise SpecError(
                    f"two choices for {one.collective} of {max(one.min_bytes, other.min_bytes)} bytes",
                    key="min_bytes",
                    value=one.min_bytes,
                    rule="At most one choice matches a call",
                )
    lines = [",".join(map(str, astuple(one))) for one in rows]
    return "\n".join([f"# {','.join(FIELDS)}", *lines, ""])


def picked_choices(
    comm: Communicator, *, all_reduces: Collection[str] | None = None, exact: bool = False
) -> list[TunerChoice]:
    """Return the picks of NCCL's model for powers of two, ranges of one pick joined.

    Parameters
    ----------
    comm : Communicator
    all_reduces : collection of str, optional
        Algorithms, as NCCL prints them, of which an all-reduce takes the fastest; all unless given.
    exact : bool
        Whether the choices hold for communicators of this shape only.

    Raises
    ------
    SpecError
        Where none of these algorithms runs.
    """
    shape = {"num_nodes": comm.num_nodes, "num_ranks": comm.num_ranks} if exact else {}
    sizes = [2**power for power in range(8, MAX_BYTES.bit_length())]
    rows = []
    for name in COLLECTIVES:
        allowed = all_reduces if name == "all-reduce" else None
        picks = [_picked(name, size, comm, allowed) for size in sizes]
        starts = [at for at in range(len(sizes)) if at == 0 or picks[at] != picks[at - 1]]
        for at, after in zip(starts, [*starts[1:], None], strict=True):
            rows.append(
                TunerChoice(
                    collective=name.replace("-", ""),
                    min_bytes=0 if at == 0 else sizes[at],
                    max_bytes=MAX_BYTES if after is None else sizes[after] - 1,
                    algorithm=picks[at][0],
                    protocol=picks[at][1],
                    **shape,
                )
            )
    return rows


def _picked(
    collective: str, num_bytes: float, comm: Communicator, allowed: Collection[str] | None
) -> tuple[str, str]:
    """Return the tuner's names of the fastest algorithm, of those allowed, and its protocol."""
    for found in nccl_choice(collective, num_bytes, comm).estimates:
        algorithm, _, protocol = found.name.partition("/")
        if found.runs and (allowed is None or algorithm in allowed):
            return _TUNER_NAME[algorithm], protocol.lower()
    names = ", ".join(allowed or _TUNER_NAME)
    what = f"none of {names} runs on {comm.num_ranks} ranks of {comm.num_nodes} nodes"
    rule = "NCCL skips what it cannot run"
    raise SpecError(what, key="collectives", value=names, rule=rule, fix="Leave collectives out of the plan")


def _overlap(one: TunerChoice, other: TunerChoice) -> bool:
    """Return whether a call exists that both match."""

    def meet(a: int, b: int) -> bool:
        return a == b or -1 in (a, b)

    return (
        one.collective == other.collective
        and one.min_bytes <= other.max_bytes
        and other.min_bytes <= one.max_bytes
        and meet(one.num_nodes, other.num_nodes)
        and meet(one.num_ranks, other.num_ranks)
        and meet(one.num_pipe_ops, other.num_pipe_ops)
        and meet(one.registered, other.registered)
    )
