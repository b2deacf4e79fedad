"""One slot: layers, the state of the workers, a structure with shares, budgets.

Two readings of "groups": with `dp_over_mp` a group is a pipeline that holds a replica and gets a share of the
batch; with `mp_over_dp` a group is a stage of one pipeline whose workers split every micro-batch.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields

import numpy as np

from foreshard.errors import SpecError

DP_OVER_MP, MP_OVER_DP = "dp_over_mp", "mp_over_dp"
KINDS = ("usd", "rent_usd", "egress_usd", "joule", "carbon_kg", "duty")
SECONDS = {"second": 1.0, "hour": 3600.0}
J_PER_KWH = 3.6e6


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chain:
    """Layers and workers as numbers that do not change.

    Attributes
    ----------
    layer_s : ndarray, shape (W, L), seconds per sample
        Forward and backward of a layer on a worker at nominal speed.
    boundary_bytes : ndarray, shape (L - 1,), bytes per sample
        That cross after a layer, forward and backward together.
    sync_bytes : ndarray, shape (L,), bytes
        Gradients of a layer.
    state_bytes : ndarray, shape (L,), bytes
        Parameters, gradients and optimizer states of a layer; also what moves when it changes its worker.
    saved_bytes : ndarray, shape (L,), bytes per sample
        Activations kept for backward.
    memory_bytes : ndarray, shape (W,), bytes
    before_s, before_state, before_saved, before_sync : ndarray
        Sums over the layers before each.
    """

    layer_s: np.ndarray
    boundary_bytes: np.ndarray
    sync_bytes: np.ndarray
    state_bytes: np.ndarray
    saved_bytes: np.ndarray
    memory_bytes: np.ndarray
    before_s: np.ndarray = field(init=False)
    before_state: np.ndarray = field(init=False)
    before_saved: np.ndarray = field(init=False)
    before_sync: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        """Add up layers."""
        object.__setattr__(self, "boundary_bytes", np.asarray(self.boundary_bytes, float))
        for kind in ("s", "state", "saved", "sync"):
            name = "layer_s" if kind == "s" else f"{kind}_bytes"
            object.__setattr__(self, f"before_{kind}", _before(np.asarray(getattr(self, name), float)))

    @property
    def num_workers(self) -> int:
        """Return W."""
        return len(self.layer_s)

    @property
    def num_layers(self) -> int:
        """Return L."""
        return self.layer_s.shape[1]


def _before(values: np.ndarray) -> np.ndarray:
    return np.concatenate([np.zeros((*values.shape[:-1], 1)), np.cumsum(values, axis=-1)], axis=-1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class State:
    """What changes between slots.

    Attributes
    ----------
    speed : ndarray, shape (W,)
        Factor on the nominal speed.
    available : ndarray of bool, shape (W,)
    bandwidth_bytes_per_s, latency_s : ndarray, shape (W, W)
    usd_per_h : ndarray, shape (W,)
    busy_w, idle_w : ndarray, shape (W,), watts
    usd_per_byte : ndarray, shape (W, W)
        Egress from row to column.
    kg_per_j : ndarray, shape (W,)
        Carbon of the power a worker draws.
    """

    speed: np.ndarray
    available: np.ndarray
    bandwidth_bytes_per_s: np.ndarray
    latency_s: np.ndarray
    usd_per_h: np.ndarray
    busy_w: np.ndarray
    idle_w: np.ndarray
    usd_per_byte: np.ndarray
    kg_per_j: np.ndarray
    _key: list[bytes] = field(init=False, default_factory=list, repr=False)

    def key(self) -> bytes:
        """Return what is equal for equal states, for solvers to remember them by."""
        if not self._key:
            digest = hashlib.blake2b(digest_size=16)
            for column in fields(self):
                if column.init:
                    digest.update(np.ascontiguousarray(getattr(self, column.name)).tobytes())
            self._key.append(digest.digest())
        return self._key[0]


def link_kinds(state: State) -> list[int]:
    """Return numbers equal for workers whose links to all others, and between them, are the same."""
    tables = [state.bandwidth_bytes_per_s, state.latency_s, state.usd_per_byte]
    both = np.concatenate([*tables, *(table.T for table in tables)], axis=1)
    size = len(state.speed)
    columns = np.arange(both.shape[1]) % size
    first: list[int] = []
    kinds = []
    for worker in range(size):
        for kind, other in enumerate(first):
            others = (columns != worker) & (columns != other)
            back = all(table[worker, other] == table[other, worker] for table in tables)
            if back and np.array_equal(both[worker, others], both[other, others]):
                kinds.append(kind)
                break
        else:
            kinds.append(len(first))
            first.append(worker)
    return kinds


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPipeline:
    """Workers of a group, and its cuts.

    Attributes
    ----------
    workers : tuple of int
        First stage first.
    cuts : tuple of int
        `dp_over_mp`: where stages begin, and the end: (0, ..., L), one more than workers.
        `mp_over_dp`: (start, stop) of the layers that all its workers hold.
    """

    workers: tuple[int, ...]
    cuts: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """Groups of workers; those in no group are idle."""

    groups: tuple[WorkerPipeline, ...]
    reading: str = DP_OVER_MP

    @property
    def workers(self) -> tuple[int, ...]:
        """Return those that are not idle, in order of groups."""
        return tuple(worker for group in self.groups for worker in group.workers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A structure with shares, what a batch takes and what it costs by kind.

    Attributes
    ----------
    structure : Structure
    shares : tuple of int
        `dp_over_mp`: samples of the batch by group. `mp_over_dp`: samples of each micro-batch by worker, in
        the order of `structure.workers`.
    time_s : float
        inf where it cannot run.
    costs : mapping of cost key to cost of one batch
        See :attr:`Budget.key`.
    """

    structure: Structure
    shares: tuple[int, ...]
    time_s: float
    costs: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """A long-term mean that must be kept.

    Attributes
    ----------
    name : str
    kind : {'usd', 'rent_usd', 'egress_usd', 'joule', 'carbon_kg', 'duty'}
        'usd' is rent and egress together; 'duty' the seconds that a worker is busy.
    limit : float
        Mean per step, per second or per hour.
    per : {'step', 'second', 'hour'}
    worker : int or None
        Only what this worker causes; 'duty' needs it.
    """

    name: str
    kind: str
    limit: float
    per: str = "step"
    worker: int | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be kept."""
        if self.kind not in KINDS or (self.kind == "duty") > (self.worker is not None):
            raise SpecError(
                f"no budget of kind {self.kind!r}",
                key="kind",
                value=self.kind,
                rule=f"A budget counts one of {', '.join(KINDS)}; duty is of one worker",
            )
        if self.per not in ("step", *SECONDS):
            raise SpecError(
                f"a budget per {self.per!r}", key="per", value=self.per, rule="per is step, second or hour"
            )
        if not 0.0 < self.limit < math.inf:
            raise SpecError(
                f"a budget of {self.limit}", key="limit", value=self.limit, rule="A limit is above 0, finite"
            )

    @property
    def key(self) -> str:
        """Return where :class:`Choice` keeps the cost."""
        return self.kind if self.worker is None else f"{self.kind}:{self.worker}"

    def allowance(self, time_s: float) -> float:
        """Return what a step of so many seconds may cost in the mean."""
        return self.limit if self.per == "step" else self.limit * time_s / SECONDS[self.per]


def workers_apart(budgets: Iterable[Budget]) -> frozenset[int]:
    """Return the workers that budgets count by themselves: they are of no kind with others."""
    return frozenset(budget.worker for budget in budgets if budget.worker is not None)
