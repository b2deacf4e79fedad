"""Search for plans that the planner misses, and for bounds that a plan breaks: small clusters at random.

    python scripts/soak_plans.py [--cases 2000] [--seed 0] [--budgets-s 0.5 4 30] [--processes 2]

Every case is a cluster of 2 to 5 devices of 1 to 3 kinds with random links, and a model of few layers. Plans
are made here by hand, drawn at random and then improved a layer, sample, micro-batch or rule at a time. The
planner's answer must be at most 1 % slower than the best of them, and its bound above none of those inside
its space. Budgets are in seconds of the processor, which a busy machine does not shorten.
Exit code 0 if that holds in every case, else 1.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import get_context

from foreshard.catalog.clusters import load_cluster
from foreshard.catalog.frameworks import load_framework
from foreshard.catalog.models import load_model
from foreshard.catalog.training import training_constants
from foreshard.errors import ForeshardError
from foreshard.planner.mixed.node_sets import are_apart, are_short_alike
from foreshard.planner.mixed.search import INTERLEAVED
from foreshard.planner.result import PlanResult
from foreshard.planner.search import plan
from foreshard.predict.placement import link_domains
from foreshard.predict.step import predict
from foreshard.predict.step_source import FormulaSteps
from foreshard.spec.checks import check_plan
from foreshard.spec.cluster import Cluster, Link
from foreshard.spec.model import Model
from foreshard.spec.plan import Group, Plan, Stage

DEVICES = ("h100-sxm", "a100-sxm-80gb", "a100-sxm-40gb", "v100-sxm-16gb", "rtx-4090", "rtx-3090", "l4", "t4")
MODELS = ("gpt2-large", "gpt2-xl", "llama3.2-1b")
RULES = ("none", "full")
SIZES = {False: (1, 2, 4, 8), True: (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)}
AT_ONCE_TOKENS = 16384
"""Samples that ranks take at once in the printed space, in several stages and in one, up to so many tokens
from the fifth on."""
SAY_EVERY = 100
"""Cases between two lines that say how far the search is."""
LOST = 0.01
"""Part of a step that the planner's answer may be slower than a plan made by hand."""
CHUNKS = (2, 4)
"""Of layers, on each device of pipelines that are interleaved."""
NEAR = 1.1
"""Times the best plan so far, by the closed form, above which a plan is not timed by the graph: they agree on
all but a few percent."""
DRAWN, IMPROVED, STEPS = 60, 3, 40
"""Plans drawn at random, those of them that are improved, and the most changes to each."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is planned."""

    seed: int
    model: Model
    cluster: Cluster
    global_batch: int
    seq_len: int

    def __str__(self) -> str:
        """Return what to write to plan it again."""
        links = ", ".join(f"{link.bandwidth_bytes_per_s * 8e-9:g} Gb/s" for link in self.cluster.links)
        return (
            f"seed {self.seed}: {self.model.name} of {self.model.num_layers} layers on {self.cluster.name}"
            f"{' over ' + links if links else ''}, batch {self.global_batch}, sequence {self.seq_len}"
        )


def drawn_case(seed: int) -> Case:
    """Return a case: 2 to 5 devices, every other one with racks joined by slower links."""
    draw = random.Random(seed)
    devices, terms = draw.randint(2, 5), []
    for kind in draw.sample(DEVICES, draw.randint(1, 3)):
        per_node = draw.randint(1, devices) if devices > 0 else 0
        if per_node:
            terms.append(f"1x{per_node}x{kind}")
            devices -= per_node
    if devices > 0:
        terms.append(f"{devices}x1x{draw.choice(DEVICES)}")
    cluster = load_cluster("+".join(terms) + f"@{draw.choice((1, 10, 25, 100, 400))}Gb/s")
    if draw.random() < 0.5 and len(cluster.nodes) > 1:
        nodes = tuple(replace(group, rack=f"r{g}") for g, group in enumerate(cluster.nodes))
        links = tuple(
            Link(
                between=(f"r{rack}", f"r{other}"),
                bandwidth_bytes_per_s=draw.choice((0.1, 1, 10, 50)) * 1e9 / 8,
                latency_s=draw.choice((1e-5, 1e-3)),
            )
            for rack in range(len(nodes))
            for other in range(rack)
        )
        cluster = replace(cluster, nodes=nodes, links=links)
    model = load_model(draw.choice(MODELS))
    return Case(
        seed=seed,
        model=replace(model, blocks=model.blocks[: draw.randint(3, 10)]),
        cluster=cluster,
        global_batch=draw.randint(3, 24),
        seq_len=draw.choice((256, 512, 1024)),
    )


def in_chunks(group: Group, chunks: int) -> Group:
    """Return a pipeline with so many chunks on each device where it has several stages, else itself.

    Stages keep their layers as far as these divide; the rules of plans say whether the result can run.
    """
    if len(group.stages) < 2 or min(stage.num_layers for stage in group.stages) < chunks:
        return group
    at, spans = 0, [[] for _ in group.stages]
    for chunk in range(chunks):
        for own, stage in zip(spans, group.stages, strict=True):
            size = (stage.num_layers + chunk) // chunks
            own.append((at, at + size))
            at += size
    stages = tuple(replace(stage, layers=tuple(own)) for stage, own in zip(group.stages, spans, strict=True))
    return replace(group, stages=stages, schedule="interleaved" if chunks > 1 else "1f1b")


@dataclass
class HandMade:
    """Plans made by hand for a case, with their step times by an engine.

    Attributes
    ----------
    case : Case
    engine : str
    closed_s : dict
        Step times by the closed form, by groups; infinite where a plan breaks a rule.
    fits : dict
    seconds : dict
        Step times of plans that fit, those near the best by the engine.
    """

    case: Case
    engine: str
    closed_s: dict[tuple[Group, ...], float] = field(default_factory=dict)
    fits: dict[tuple[Group, ...], bool] = field(default_factory=dict)
    seconds: dict[tuple[Group, ...], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.draw = random.Random(self.case.seed + 1)
        self.domains = link_domains(self.case.cluster).tolist()
        framework = load_framework("megatron-core")
        self.steps = FormulaSteps(
            model=self.case.model,
            cluster=self.case.cluster,
            framework=framework,
            constants=training_constants(),
        )

    def search(self) -> None:
        """Draw plans, and improve the best of them."""
        drawn = list(self._that_fit([self._drawn() for _ in range(DRAWN)]))
        for groups in drawn[:IMPROVED]:
            for _ in range(STEPS):
                better = next(self._that_fit(list(self._changed(groups))), groups)
                if self.step_s(better) >= self.step_s(groups):
                    break
                groups = better

    def _that_fit(self, some: list[tuple[Group, ...]]) -> Iterator[tuple[Group, ...]]:
        """Yield plans that can run and fit, the fastest by the closed form first."""
        new = [groups for groups in dict.fromkeys(some) if groups not in self.closed_s]
        able = [groups for groups in new if self._can_run(groups)]
        self.closed_s |= dict.fromkeys(new, float("inf"))
        self.closed_s |= zip(able, self.steps.seconds_of([self.plan(groups) for groups in able]), strict=True)
        for groups in sorted(some, key=self.closed_s.__getitem__):
            if self.closed_s[groups] < float("inf") and self._fits(groups):
                yield groups

    def _can_run(self, groups: tuple[Group, ...]) -> bool:
        try:
            check_plan(self.plan(groups), self.case.model, self.case.cluster)
        except ForeshardError:
            return False
        return True

    def _fits(self, groups: tuple[Group, ...]) -> bool:
        if groups not in self.fits:
            self.fits[groups] = self.steps.memory(self.plan(groups)).fits
        return self.fits[groups]

    @property
    def best(self) -> tuple[float, tuple[Group, ...]]:
        """Return the least step time and its groups; infinite where none fits."""
        if not self.seconds:
            return float("inf"), ()
        groups = min(self.seconds, key=self.seconds.__getitem__)
        return self.seconds[groups], groups

    def plan(self, groups: tuple[Group, ...]) -> Plan:
        """Return the plan of some groups."""
        return Plan(
            global_batch=self.case.global_batch,
            seq_len=self.case.seq_len,
            precision="fp16",
            optimizer="adamw",
            framework="megatron-core",
            groups=groups,
        )

    def step_s(self, groups: tuple[Group, ...]) -> float:
        """Return the step time of a plan that fits."""
        if groups not in self.seconds:
            closed_s = self.closed_s[groups]
            near = closed_s <= min(self.seconds.values(), default=closed_s) * NEAR
            self.seconds[groups] = self.exact_s(groups) if near else closed_s
        return self.seconds[groups]

    def exact_s(self, groups: tuple[Group, ...]) -> float:
        """Return the step time of a plan that fits by the engine of the answer."""
        made = self.plan(groups)
        return predict(
            self.case.model, self.case.cluster, made, engine=self.engine, timeline=False
        ).step_time_s

    def _drawn(self) -> tuple[Group, ...]:
        """Return pipelines of stages of one device each, or of all or a part of a node side by side."""
        ranks = list(range(self.case.cluster.num_devices))
        if self.draw.random() < 0.3:
            ranks = sorted(self.draw.sample(ranks, self.draw.randint(1, len(ranks))))
        stages = [[rank] for rank in ranks]
        if self.draw.random() < 0.5:
            nodes: dict[int, list[int]] = {}
            for rank in ranks:
                nodes.setdefault(self.domains[rank], []).append(rank)
            parts = [self.draw.randint(1, len(node)) for node in nodes.values()]
            stages = [
                own
                for node, part in zip(nodes.values(), parts, strict=True)
                for own in (node[:part], node[part:])
                if own
            ]
        self.draw.shuffle(stages)
        places = self.case.model.num_layers + 2
        most = min(len(stages), self.case.global_batch)
        number = self.draw.randint(1, most)
        dealt: list[list[list[int]]] = [[stage] for stage in stages[:number]]
        for stage in stages[number:]:
            self.draw.choice(dealt).append(stage)
        ends = sorted(self.draw.sample(range(1, self.case.global_batch), number - 1))
        shares = [b - a for a, b in zip([0, *ends], [*ends, self.case.global_batch], strict=True)]
        groups = []
        for share, chain in zip(shares, dealt, strict=True):
            cuts = sorted(self.draw.sample(range(1, places), len(chain) - 1))
            tensor = self.draw.random() < 0.3
            rule = self.draw.choice(RULES)
            width = max(len(own) for own in chain)
            made = tuple(
                Stage(
                    ranks=tuple(own), layers=((a, b),), tp=len(own) if tensor else 1, zero=1, recompute=rule
                )
                for own, a, b in zip(chain, [0, *cuts], [*cuts, places], strict=True)
            )
            size = self.draw.choice((1, 2, 4)) * (1 if tensor else width)
            sp = any(stage.tp > 1 for stage in made)
            groups.append(Group(share=share, stages=made, micro_batch=size, schedule="1f1b", sp=sp))
        return tuple(groups)

    def _changed(self, groups: tuple[Group, ...]) -> Iterator[tuple[Group, ...]]:
        """Yield plans that differ in a sample, a cut, a micro-batch or a rule."""
        for chunks in (1, *CHUNKS):
            yield tuple(in_chunks(group, chunks) for group in groups)
        for g, group in enumerate(groups):
            for other in range(len(groups)):
                if other != g and group.share > 1:
                    moved = list(groups)
                    moved[g] = replace(group, share=group.share - 1)
                    moved[other] = replace(groups[other], share=groups[other].share + 1)
                    yield tuple(moved)
            for made in self._of_group(group):
                yield (*groups[:g], made, *groups[g + 1 :])

    def _of_group(self, group: Group) -> Iterator[Group]:
        for size in (group.micro_batch * 2, group.micro_batch // 2):
            if size:
                yield replace(group, micro_batch=size)
        for i, stage in enumerate(group.stages):
            for rule in RULES:
                if rule != stage.recompute:
                    changed = replace(stage, recompute=rule)
                    yield replace(group, stages=(*group.stages[:i], changed, *group.stages[i + 1 :]))
            if i:
                before = group.stages[i - 1]
                (start, middle), (_, stop) = before.layers[0], stage.layers[0]
                for at in (middle - 1, middle + 1):
                    if start < at < stop:
                        pair = replace(before, layers=((start, at),)), replace(stage, layers=((at, stop),))
                        yield replace(group, stages=(*group.stages[: i - 1], *pair, *group.stages[i + 1 :]))

    def is_inside(self, groups: tuple[Group, ...], *, with_interleaved: bool) -> bool:
        """Return whether a plan is surely in the printed space."""
        chunks = {group.num_chunks for group in groups if len(group.stages) > 1}
        if chunks - {1} and (len(chunks) > 1 or not with_interleaved):
            return False
        for group in groups:
            widths, alone = {stage.inner_dp for stage in group.stages}, len(group.stages) == 1
            sizes = {n for n in SIZES[alone] if n <= max(4, AT_ONCE_TOKENS // self.case.seq_len)}
            if any(group.micro_batch not in {width * n for n in sizes} for width in widths):
                return False
            if group.share < group.micro_batch and not alone:
                return False
            if not all(self._is_a_stage(stage.ranks) for stage in group.stages):
                return False
        made = self.plan(groups)
        return are_apart(self.case.cluster, made) and are_short_alike(made)

    def below(self, found: PlanResult) -> list[str]:
        """Return what is wrong with the bound of an answer: that a plan inside its space is faster."""
        interleaved = INTERLEAVED in found.space
        inside = [drawn for drawn in self.closed_s if self.is_inside(drawn, with_interleaved=interleaved)]
        fastest = next(self._that_fit(inside), None)
        if fastest is None:
            return []
        least_s = self.exact_s(fastest)
        if found.lower_bound_step_time_s <= least_s * (1.0 + 1e-9):
            return []
        plan = json.dumps(self.plan(fastest).to_dict())
        return [f"bound {found.lower_bound_step_time_s:.5g} s, by hand {least_s:.5g} s: {plan}"]

    def _is_a_stage(self, ranks: tuple[int, ...]) -> bool:
        """Return whether ranks of one node are as many as a stage of the space has of it."""
        of_node = [n for n, domain in enumerate(self.domains) if domain == self.domains[ranks[0]]]
        size = len(of_node)
        return set(ranks) <= set(of_node) and (size % len(ranks) == 0 or size & (size - 1) > 0)


@dataclass(frozen=True, kw_only=True)
class Judged:
    """What comes of a case.

    Attributes
    ----------
    wrong : str
        What does not hold, empty if all does.
    slower : float
        Part by which the answer is slower than the best plan made by hand.
    again : bool
        Whether the first budget was too short for that plan.
    """

    wrong: str = ""
    slower: float = 0.0
    again: bool = False


def judged(seed: int, *, budgets_s: Sequence[float]) -> Judged:
    """Return what comes of a case, with the first budget that is long enough for it."""
    case = drawn_case(seed)
    # Plans made by hand may fill the memory, and so may those of the planner.
    asked = {
        "global_batch": case.global_batch,
        "seq_len": case.seq_len,
        "precision": "fp16",
        "memory_margin": 0.0,
    }
    made = HandMade(case=case, engine="graph")
    made.search()
    least_s, groups = made.best
    if least_s == float("inf"):
        return Judged()
    said, searches = [], 0
    for budget_s in budgets_s:
        found = plan(case.model, case.cluster, budget_s=budget_s, **asked)
        searches += 1
        said += made.below(found)
        if _seconds(found) <= least_s * (1.0 + LOST):
            break
    mine_s = _seconds(found)
    if mine_s > least_s * (1.0 + LOST):
        said.append(f"{mine_s:.5g} s, by hand {least_s:.5g} s: {json.dumps(made.plan(groups).to_dict())}")
    wrong = f"{case}: {'; '.join(said)}" if said else ""
    return Judged(wrong=wrong, slower=mine_s / least_s - 1.0, again=searches > 1)


def _seconds(found: PlanResult) -> float:
    return found.plans[0].prediction.step_time_s if found.plans else float("inf")


def main() -> int:
    """Search through the cases and print what does not hold."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--budgets-s", type=float, nargs="+", default=[0.5, 4.0, 30.0])
    parser.add_argument("--processes", type=int, default=2)
    asked = parser.parse_args()
    seeds = range(asked.seed, asked.seed + asked.cases)
    bad, worst, better, again, started = 0, 0.0, 0, 0, time.perf_counter()
    with get_context("spawn").Pool(asked.processes, initializer=_count_processor_time) as pool:
        for number, one in enumerate(pool.imap(partial(judged, budgets_s=asked.budgets_s), seeds), 1):
            if number % SAY_EVERY == 0:
                print(f"{number} of {asked.cases}: {bad} wrong, {again} took a second search", flush=True)
            worst, better, again = max(worst, one.slower), better + (one.slower < -LOST), again + one.again
            if one.wrong:
                bad += 1
                print(one.wrong, flush=True)
    print(
        f"{asked.cases} plans from seed {asked.seed}: {bad} wrong; at most {worst:+.2%} beside plans by "
        f"hand, in {better} cases over {LOST:.0%} faster, {again} searched more than once; "
        f"{time.perf_counter() - started:.0f} s"
    )
    return 1 if bad else 0


def _count_processor_time() -> None:
    time.perf_counter = time.process_time


if __name__ == "__main__":
    sys.exit(main())
