"""What a search remembers between slots of one chain: states, tables of cuts, structures chosen lately."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from foreshard.control.search.cuts import Effort
from foreshard.control.slots import Chain, State

if TYPE_CHECKING:
    from foreshard.control.search.state_cache import StateCache

_MOST_STATES = 256
"""States kept, each with up to some hundred structures: tens of megabytes for 64 workers."""
_MOST_TABLES = 4096
"""Fronts of pipelines or stages of several workers kept, some kilobytes each: tens of megabytes."""
_RECENT = 12
"""Structures chosen lately that a new state looks at: as many as a warm slot has looks."""
Cells = tuple[tuple[int, ...], ...]
"""Workers of each pipeline, or of each stage of one pipeline."""
Counts = tuple[int, ...]
"""Workers of each device class."""
S = TypeVar("S", bound="StateCache")
T = TypeVar("T")


@dataclass(kw_only=True)
class SearchCache:
    """States least recently used are forgotten, everything with another chain.

    Attributes
    ----------
    states : OrderedDict of StateCache
    links : dict
        Classes of links by state, see `device_classes`.
    mixes : dict
        All structures of some numbers of workers of each class.
    recent : OrderedDict of Cells
        Those of the structures chosen in the latest slots, the newest last.
    effort : Effort
        Spent on cuts so far.
    """

    states: OrderedDict[object, StateCache] = field(default_factory=OrderedDict)
    links: dict[bytes, list[int]] = field(default_factory=dict)
    mixes: dict[object, list[tuple[Counts, ...]]] = field(default_factory=dict)
    recent: OrderedDict[Cells, None] = field(default_factory=OrderedDict)
    effort: Effort = field(default_factory=Effort)
    _tables: dict[object, object] = field(default_factory=dict)
    _chain: Chain | None = None

    def state(
        self,
        kind: type[S],
        chain: Chain,
        state: State,
        *,
        batch: int,
        micro_batch: int,
        max_stages: int,
        apart: frozenset[int],
    ) -> S:
        """Return what is known of a state, from an earlier call where there was one."""
        if self._chain is not chain:
            for known in (self.states, self.links, self.mixes, self.recent, self._tables):
                known.clear()
            self._chain = chain
        asked = (batch, micro_batch, max_stages, apart)
        key = (kind, state.key(), *asked)
        if key not in self.states:
            self.states[key] = kind(self, chain, state, *asked)
            if len(self.states) > _MOST_STATES:
                self.states.popitem(last=False)
        self.states.move_to_end(key)
        return self.states[key]  # type: ignore[return-value]

    def table(self, key: object, make: Callable[[], T]) -> T:
        """Return what is the same in all states in which some workers are as they are."""
        if key not in self._tables:
            if len(self._tables) > _MOST_TABLES:
                self._tables.clear()
            self._tables[key] = make()
        return self._tables[key]  # type: ignore[return-value]

    def chose(self, cells: Cells) -> None:
        """Note what a slot has chosen."""
        self.recent[cells] = None
        self.recent.move_to_end(cells)
        while len(self.recent) > _RECENT:
            self.recent.popitem(last=False)
