"""Our plans on Sailor's profile and clusters, by its formula: python bench/bench_sailor.py [--sailor PATH].

With a checkout of eth-easl/sailor its own simulator judges beside the restated formula, plan by plan.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent / "sailor"))
import judge
import plans
from clock import use_processor_clock
from judge import Group
from search import Found, find
from theirs import Theirs


@dataclass(frozen=True, slots=True)
class Cluster:
    """A100-40 and V100-16 devices, and the iterations a second to beat (to reach where all are alike)."""

    a100: int
    v100: int
    target: float

    @property
    def name(self) -> str:
        """Return the key of the tables."""
        return f"{self.a100}+{self.v100}"


CLUSTERS = (
    Cluster(8, 8, 0.0446),
    Cluster(16, 16, 0.0838),
    Cluster(32, 96, 0.2035),
    Cluster(80, 240, 0.3609),
    Cluster(128, 384, 0.5229),
    Cluster(32, 0, 0.1297),
    Cluster(80, 0, 0.2722),
    Cluster(128, 0, 0.4175),
)


def main() -> None:
    """Print the comparison of the formula, the table of clusters and the plans."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sailor", type=Path, help="checkout of https://github.com/eth-easl/sailor")
    parser.add_argument("--budget-s", type=float, default=8.0, help="search per cluster")
    parser.add_argument("--only", help="one cluster, such as 32+96")
    parser.add_argument("--markdown", action="store_true", help="the table of docs/sailor.md alone")
    arguments = parser.parse_args()
    if arguments.markdown:
        markdown(arguments.budget_s)
        return
    theirs = Theirs(arguments.sailor) if arguments.sailor else None
    compare_theirs(theirs)
    if theirs:
        compare_random(theirs)
    find((8, 0), 0.5)
    print(
        f"{'cluster':>8} {'Sailor':>7} {'target':>7} {'ours':>7} {'bound':>7} {'gap':>6} {'s':>5}"
        f" {'alike':>7} {'code':>7} {'apart':>7}"
    )
    found = {}
    for cluster in CLUSTERS:
        if arguments.only in (None, cluster.name):
            counts = (cluster.a100, cluster.v100)
            found[cluster.name] = result = find(counts, arguments.budget_s)
            print(row(cluster, result, theirs), flush=True)
    for name, result in found.items():
        print(f"\n{name}: {judge.samples(result.groups)} places for 1024 samples")
        print("\n".join(describe(group) for group in result.groups))
        print(f"  all-reduce {judge.sync_seconds(result.groups):.4f} s")


def markdown(budget_s: float) -> None:
    """Print iterations a second on an idle core and on one shared with a busy process, by processor time."""
    find((8, 0), 0.5)
    print("| A100+V100 | Sailor | to beat | ours | bound | gap | equal cuts | busy: ours | bound | gap |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for cluster in CLUSTERS:
        told, _ = plans.their_plans()[cluster.name]
        cells = [cluster.name, f"{told:.4f}", f"{cluster.target:.4f}"]
        for busy in (0, 1):
            use_processor_clock(busy)
            found = find((cluster.a100, cluster.v100), budget_s)
            cells += [
                f"**{1 / found.step_time_s:.4f}**",
                f"{1 / found.lower_bound_s:.4f}",
                f"{found.gap:.1%}",
            ]
            cells += [] if busy else [f"{1 / found.alike_s:.4f}" if found.alike else ""]
        print(f"| {' | '.join(cells)} |".replace("%", " %"), flush=True)


def row(cluster: Cluster, result: Found, theirs: Theirs | None) -> str:
    """Return a line of the table; what needs their code is a dash without it."""
    told, _ = plans.their_plans()[cluster.name]
    alike = f"{1 / result.alike_s:7.5f}" if result.alike else f"{'-':>7}"
    code = f"{1 / theirs.seconds(result.alike):7.5f}" if theirs and result.alike else f"{'-':>7}"
    apart = f"{1 / theirs.apart(result.groups):7.5f}" if theirs else f"{'-':>7}"
    return (
        f"{cluster.name:>8} {told:7.5f} {cluster.target:7.5f} {1 / result.step_time_s:7.5f}"
        f" {1 / result.lower_bound_s:7.5f} {result.gap:6.1%} {result.search_s:5.1f}"
        f" {alike} {code} {apart}"
    )


def describe(group: Group) -> str:
    """Return a line about a group: replicas, stages as devices x layers, micro-batches, seconds."""
    stages = " ".join(f"{s.gpu[0]}{s.tp}x{s.stop - s.start}" for s in group.replicas[0])
    return (
        f"  {len(group.replicas):3d} x [{stages}]  {group.rounds} micro-batches of {group.micro_batch},"
        f" {judge.pipeline_seconds(group):.4f} s"
    )


def compare_theirs(theirs: Theirs | None) -> None:
    """Print what the restated formula makes of the plans Sailor chose."""
    worst = 0.0
    for told, group in plans.their_plans().values():
        ours = judge.iteration_seconds((group,))
        worst = max(worst, abs(ours * told - 1.0))
        if theirs and theirs.fits((group,)):
            worst = max(worst, abs(ours / theirs.simulate((group,)) - 1.0))
    print(f"Sailor's 8 plans: largest relative difference {worst:.1e} (told to six digits)")


def compare_random(theirs: Theirs, number: int = 300) -> None:
    """Print how far the restated formula is from their code on random plans."""
    rng = np.random.default_rng(0)
    even = [(plans.random_even(rng),) for _ in range(number)]
    uneven = [plans.random_uneven(rng) for _ in range(number)]
    apart = [abs(judge.iteration_seconds(plan) / theirs.simulate(plan) - 1.0) for plan in even]
    parted = [abs(judge.iteration_seconds(plan) / theirs.seconds(plan) - 1.0) for plan in uneven]
    differ = sum(judge.fits(plan) != theirs.fits(plan) for plan in even + uneven)
    print(f"{number} random even plans, whole simulator: largest relative difference {max(apart):.1e}")
    print(f"{number} random uneven plans, their functions: largest relative difference {max(parted):.1e}")
    print(f"memory check differs on {differ} of {2 * number}")


if __name__ == "__main__":
    main()
