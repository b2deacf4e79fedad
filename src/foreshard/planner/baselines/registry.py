"""The baselines by name: what each decides, what it leaves out, and where it was published."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from foreshard.planner.baselines.even import even, lb_bsp
from foreshard.planner.baselines.malleus import malleus
from foreshard.planner.baselines.metis import metis
from foreshard.planner.baselines.ordered import amp, hetpipe
from foreshard.planner.baselines.pipedream import pipedream
from foreshard.planner.baselines.random_plans import anything
from foreshard.planner.baselines.sailor import sailor
from foreshard.planner.baselines.uniform_degrees import BestTried, DegreeGrid
from foreshard.planner.solver.problem import Problem
from foreshard.planner.solver.time_budget import ENDLESS, TimeBudget


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """A planner to compare with.

    Attributes
    ----------
    name : str
    planner : callable
        Offers what it looks at to a :class:`BestTried`.
    citation, decides, ignores : str
    """

    name: str
    planner: Callable[[DegreeGrid, BestTried], None]
    citation: str
    decides: str
    ignores: str

    def best(self, problem: Problem, budget: TimeBudget = ENDLESS) -> BestTried:
        """Return the best arrangements that it finds in time, without any where none fits."""
        best = BestTried(problem=problem, budget=budget)
        self.planner(DegreeGrid(problem=problem), best)
        return best


_ALL = (
    Baseline(
        name="even",
        planner=even,
        citation="Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters, SC 2021",
        decides="One set of degrees for all devices, by exhaustive search, and how many devices to use",
        ignores="That devices differ: layers and samples are equal everywhere",
    ),
    Baseline(
        name="lb-bsp",
        planner=lb_bsp,
        citation="Chen et al., Semi-Dynamic Load Balancing: Efficient Distributed Learning in Non-Dedicated "
        "Environments, SoCC 2020",
        decides="Samples of each replica in proportion to its speed, on one set of degrees",
        ignores="Layers are equal on all stages, and a replica stays on one kind of device",
    ),
    Baseline(
        name="pipedream",
        planner=pipedream,
        citation="Narayanan et al., PipeDream: Generalized Pipeline Parallelism for DNN Training, SOSP 2019",
        decides="Cuts and devices of each stage along the device order, for the least slowest stage",
        ignores="Filling the pipeline, the tail of the step, uneven samples",
    ),
    Baseline(
        name="amp",
        planner=amp,
        citation="Li et al., AMP: Automatically Finding Model Parallel Strategies with Heterogeneity "
        "Awareness, NeurIPS 2022",
        decides="One set of degrees and uneven cuts along the order of devices",
        ignores="Degrees by kind of device, pipelines that differ, uneven samples",
    ),
    Baseline(
        name="metis",
        planner=metis,
        citation="Um et al., Metis: Fast Automatic Distributed Training on Heterogeneous GPUs, ATC 2024",
        decides="The size of stages by kind of device; layers and data greedily by speed and memory",
        ignores="Cuts and shares are not searched; pipelines with stages of other depths are not mixed",
    ),
    Baseline(
        name="sailor",
        planner=sailor,
        citation="Strati et al., Sailor: Automating Distributed Training over Dynamic, Heterogeneous, and "
        "Geo-distributed Clusters, SOSP 2025",
        decides="Replicas of each stage on mixed kinds of device, tensor degree by kind, devices in use",
        ignores="Layers are equal on all stages, samples equal on all pipelines",
    ),
    Baseline(
        name="malleus",
        planner=malleus,
        citation="Li et al., Malleus: Straggler-Resilient Hybrid Parallel Training of Large-scale Models via "
        "Malleable Data and Model Parallelization, SIGMOD 2025",
        decides="Layers of each stage and samples of each pipeline, exactly, for groups dealt out by speed",
        ignores="Degrees by kind of device, pipelines of different depths, which groups to join",
    ),
    Baseline(
        name="hetpipe",
        planner=hetpipe,
        citation="Park et al., HetPipe: Enabling Large DNN Training on (Whimpy) Heterogeneous GPU Clusters "
        "through Integration of Pipelined Model Parallelism and Data Parallelism, ATC 2020",
        decides="Virtual workers of the same mix of devices, cut for the least slowest stage",
        ignores="Degrees by kind of device, uneven samples; judged synchronously, without parameter servers",
    ),
    Baseline(
        name="random",
        planner=anything,
        citation="None: a check on the others",
        decides="Nothing: the best of 200 plans drawn at random that fit",
        ignores="Everything",
    ),
)

BASELINES: dict[str, Baseline] = {one.name: one for one in _ALL}
"""Every baseline by name."""
