"""Processor time of a controller's decision: median and worst slot, warm, over sticky random states.

Run: python bench/bench_controller.py [slots]
"""

from __future__ import annotations

import sys
import time

import numpy as np

from foreshard.control.grouping import solve_slot
from foreshard.control.landscape import Memo
from foreshard.control.slots import Budget, Chain, State

SLOTS = int(sys.argv[1]) if len(sys.argv) > 1 else 100
COUNTS = [int(one) for one in sys.argv[2:]] or [4, 8, 16, 64]


def made(workers: int, layers: int = 34) -> tuple[Chain, np.ndarray]:
    """Return a chain on workers of speeds 1, 2 and 4 in two sites."""
    speed = np.array([4.0, 2.0, 1.0])[np.arange(workers) % 3]
    chain = Chain(
        layer_s=np.tile(np.full(layers, 0.01), (workers, 1)) / speed[:, None],
        boundary_bytes=np.full(layers - 1, 1e7), sync_bytes=np.full(layers, 2e7),
        state_bytes=np.full(layers, 1.6e8), saved_bytes=np.full(layers, 1e7),
        memory_bytes=np.full(workers, 1.6e10),
    )  # fmt: skip
    return chain, speed


def state(speed: np.ndarray, slow: np.ndarray, rate: float, *, egress: bool) -> State:
    """Return the workers as they are now."""
    size = len(speed)
    site = np.arange(size) * 2 // size
    apart = site[:, None] != site[None, :]
    return State(
        speed=slow, available=np.ones(size, bool),
        bandwidth_bytes_per_s=np.where(apart, rate, 1e10), latency_s=np.where(apart, 1e-3, 1e-5),
        usd_per_h=speed, busy_w=np.full(size, 300.0), idle_w=np.full(size, 80.0),
        usd_per_byte=np.where(apart, 1e-11, 0.0) * egress, kg_per_j=np.full(size, 1e-7),
    )  # fmt: skip


def measure(workers: int, *, egress: bool, energy: bool, levels: int = 6) -> None:
    """Print how long slots take when one worker at a time is slow and the link between sites swings."""
    rng = np.random.default_rng(0)
    chain, speed = made(workers)
    budgets = [Budget(name="money", kind="usd", limit=1.0)]
    if energy:
        budgets.append(Budget(name="energy", kind="joule", limit=1e4))
    memo, running, times = Memo(), None, []
    slow, rate = np.ones(workers), 1e9
    for slot in range(SLOTS + 50):
        if rng.random() > 0.9:
            slow = np.ones(workers)
            slow[rng.integers(workers)] = 0.25
            rate = 1e9 * 10 ** -(rng.integers(levels) / (levels - 1))
        weights = {"money": float(rng.uniform(0, 300)), "energy": float(rng.uniform(0, 1e-3))}
        began = time.process_time()
        running = solve_slot(
            chain, state(speed, slow, rate, egress=egress), batch=512, micro_batch=4, time_weight=1.0,
            cost_weights=weights, budgets=budgets, start=running, memo=memo, max_stages=4,
        )  # fmt: skip
        if slot >= 50:
            times.append(1e3 * (time.process_time() - began))
    print(
        f"{workers:3d} workers, egress {egress!s:5}, energy {energy!s:5}: median {np.median(times):7.2f} ms, "
        f"p90 {np.quantile(times, 0.9):7.2f} ms, worst {max(times):7.2f} ms, "
        f"{len(running.structure.groups)} groups"
    )


if __name__ == "__main__":
    for count in COUNTS:
        for egress, energy in ((False, False), (True, False), (True, True)):
            measure(count, egress=egress, energy=energy)
