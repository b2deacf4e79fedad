"""What a search remembers between slots of one chain: landscapes of states, and groups chosen lately."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from foreshard.control.slots import Chain, State

_STATES, _RECENT = 256, 12
Groups = tuple[tuple[int, ...], ...]
L = TypeVar("L")


@dataclass(kw_only=True)
class SearchCache(ABC, Generic[L]):
    """Landscapes by state, those least recently used forgotten, all of them with another chain.

    Attributes
    ----------
    links : dict
        Kinds of links by state, see `kinds`.
    recent : OrderedDict of Groups
        Groups chosen in the latest slots, the newest last.
    """

    links: dict[bytes, list[int]] = field(default_factory=dict)
    landscapes: OrderedDict[object, L] = field(default_factory=OrderedDict)
    recent: OrderedDict[Groups, None] = field(default_factory=OrderedDict)
    chain: Chain | None = None

    @abstractmethod
    def made(
        self, chain: Chain, state: State, batch: int, micro_batch: int, max_stages: int, apart: frozenset[int]
    ) -> L:
        """Return the landscape of a new state."""

    def landscape(
        self,
        chain: Chain,
        state: State,
        *,
        batch: int,
        micro_batch: int,
        max_stages: int,
        apart: frozenset[int],
    ) -> L:
        """Return the landscape of a state, the one of an earlier call where there was one."""
        if self.chain is not chain:
            self.forget()
            self.chain = chain
        asked = (batch, micro_batch, max_stages, apart)
        key = (state.key(), *asked)
        if key not in self.landscapes:
            self.landscapes[key] = self.made(chain, state, *asked)
            if len(self.landscapes) > _STATES:
                self.landscapes.popitem(last=False)
        self.landscapes.move_to_end(key)
        return self.landscapes[key]

    def forget(self) -> None:
        """Forget everything: it was of another chain."""
        for known in (self.links, self.landscapes, self.recent):
            known.clear()

    def chose(self, groups: Groups) -> None:
        """Note what a slot has chosen."""
        self.recent[groups] = None
        self.recent.move_to_end(groups)
        while len(self.recent) > _RECENT:
            self.recent.popitem(last=False)
