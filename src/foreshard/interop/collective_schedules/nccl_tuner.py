"""Choices of algorithms as the CSV that NCCL's example tuner plugin reads.

The plugin makes a choice cheap; what NCCL cannot run it then skips, without a word: choices are those that
NCCL's model makes. Source: NVIDIA/nccl ext-tuner/example (README.md).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import astuple, dataclass

from foreshard.comm.nccl.choice import nccl_choice
from foreshard.comm.nccl.communicator import Communicator
from foreshard.comm.nccl.estimates import COLLECTIVES
from foreshard.errors import SpecError

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


@dataclass(frozen=True, slots=True, kw_only=True)
class TunerChoice:
    """An algorithm for sizes of a collective, by NCCL's names; -1 stands for any, or for NCCL's default."""

    collective: str
    min_bytes: int
    max_bytes: int
    algorithm: str
    protocol: str
    channels: int = -1
    num_nodes: int = -1
    num_ranks: int = -1
    num_pipe_ops: int = -1
    registered: int = -1


def nccl_tuner_csv(choices: Iterable[TunerChoice]) -> str:
    """Return the file that NCCL_TUNER_CONFIG_FILE names.

    Examples
    --------
    >>> choice = TunerChoice(
    ...     collective="allreduce", min_bytes=0, max_bytes=9, algorithm="tree", protocol="simple"
    ... )
    >>> print(nccl_tuner_csv([choice]))
    # collective_type,min_bytes,max_bytes,algorithm,protocol,channels,nNodes,nRanks,numPipeOps,regBuff
    allreduce,0,9,tree,simple,-1,-1,-1,-1,-1
    <BLANKLINE>
    """
    lines = [",".join(map(str, astuple(one))) for one in choices]
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
