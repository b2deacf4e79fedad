"""Time of one call of each collective's closed form over a batch of rows."""

from __future__ import annotations

import time

import numpy as np

from foreshard.catalog.fabrics import link_constants
from foreshard.comm import collectives
from foreshard.comm.fabric import Fabric, fabric_from
from foreshard.predict.run_setup import stacked

ROWS = 1000
RUNS = 50
LIMIT_S = 2e-3  # an all-reduce; above it something fell back to loops of Python
NAMES = ("all_reduce_s", "all_gather_s", "reduce_scatter_s", "all_to_all_s", "broadcast_s")


def h100_nodes() -> Fabric:
    """Return eight H100 a node with a NIC of 400 Gb/s each."""
    return fabric_from(
        link_constants("hopper-nvlink"),
        intra_bytes_per_s=450e9,
        domain=8,
        per_node=8,
        nic_bytes_per_s=400e9,
        nic_latency_s=5e-6,
        in_network=True,
    )


def main() -> None:
    """Print the least and the median time of each collective."""
    rows = stacked([h100_nodes()] * ROWS, Fabric)
    sizes, ranks = np.full(ROWS, 1e8), np.full(ROWS, 16.0)
    for name in NAMES:
        call, times = getattr(collectives, name), []
        for _ in range(RUNS):
            start = time.perf_counter()
            call(sizes, ranks, 1, rows)
            times.append(time.perf_counter() - start)
        times.sort()
        print(
            f"{name:<18} {ROWS} rows: least {1e3 * times[0]:.3f} ms  median {1e3 * times[RUNS // 2]:.3f} ms"
        )
    print(f"limit for an all-reduce: {1e3 * LIMIT_S:g} ms")


if __name__ == "__main__":
    main()
