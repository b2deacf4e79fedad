"""Equal shares on every subset of the devices: what the strongest rival of that kind chooses from."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from foreshard.control.search.subsets import SubsetClasses, sample_s
from foreshard.control.slots import Chain, State


def equal_shares(kinds: SubsetClasses, chain: Chain, state: State, batch: int) -> SubsetClasses:
    """Return all subsets with the same share for every device, parts of samples allowed.

    Everybody waits for the slowest; gradients are summed as with any shares. Duty is taken to be free.
    """
    first = np.array([kind[0] for kind in kinds.members])
    counts, each_s = kinds.counts, sample_s(chain, state)[first]
    share = batch / counts.sum(1)
    busy_s = share * np.where(counts > 0, each_s, 0.0).max(1)
    time_s = busy_s + (kinds.time_s - kinds.busy_s)
    rent, egress = kinds.costs[:, 1] / kinds.time_s * time_s, kinds.costs[:, 2]
    costs = [rent + egress, rent, egress]
    for scale in (np.ones(len(first)), state.kg_per_j[first]):
        idle = counts @ (scale * state.idle_w[first])
        more = counts @ (scale * (state.busy_w - state.idle_w)[first] * each_s)
        costs.append(idle * time_s + more * share)
    priced = np.stack(costs, axis=1)
    return replace(kinds, time_s=time_s, busy_s=busy_s, costs=priced, floor=priced)
