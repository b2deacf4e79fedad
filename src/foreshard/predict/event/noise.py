"""A step whose ranks differ: how long it takes when every rank waits for the slowest.

The passes of every rank get seconds of their own. Ranks that meet in every pass (tensor, context and expert
parallel) are folded into the slowest of them, an order statistic; pipelines beside each other keep their own
times until their gradients meet. Where transfers share a network, every step drawn is simulated with links of
their own for all pipelines; beyond `MAX_PHASES` contention is solved once, with ranks alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from foreshard.graph.program import Kind
from foreshard.predict.batch import PlannedRun
from foreshard.predict.event.jitter import slowest_of
from foreshard.predict.graph.lowering import LoweredGroup, Step
from foreshard.predict.graph.transfers import SharedStep
from foreshard.predict.placement import first_of_equals
from foreshard.sim.contended_replicas import contended_end_s, num_copies
from foreshard.sim.contention import MAX_PHASES
from foreshard.sim.critical_path import TaskTimes
from foreshard.sim.replicas import ALL, EACH, SET, ReplicatedProgram, last_end_s
from foreshard.spec.plan import Group
from foreshard.spec.variation import Noise

_COMPUTED = ("compute", "recompute", "host")
_MAX_ROW = 2**18  # draws of a task at once, some MB


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Passes:
    """Which ranks run the passes of a group.

    `block` ranks of a stage meet in every pass; `blocks` of them run side by side, `width` of which share
    sharded weights.
    """

    groups: list[int]  # of the plan, that are the same
    block: list[int]  # per stage
    blocks: int
    width: int

    @property
    def shape(self) -> tuple[int, int]:
        """Sets of pipelines, and pipelines of a set."""
        return len(self.groups) * self.blocks // self.width, self.width


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NoisyStep:
    """A step that was simulated with ranks alike, and who runs its tasks."""

    case: PlannedRun
    replicated: ReplicatedProgram
    passes: dict[int, _Passes]
    times: TaskTimes  # with ranks alike
    computed_s: np.ndarray  # seconds of each task that jitter and slow ranks lengthen; shape (tasks,)
    work: np.ndarray  # the pass that a task is a piece of: its pieces are slow together; shape (tasks,)
    shared: SharedStep | None = None  # the same step where its transfers share a network
    compiled: bool | None = None  # as in `sim.contention.run`

    @classmethod
    def of(
        cls,
        case: PlannedRun,
        step: Step,
        times: TaskTimes,
        shared: SharedStep | None = None,
        *,
        compiled: bool | None = None,
    ) -> NoisyStep:
        """Return the step of a plan."""
        first = first_of_equals(case.cluster, case.plan)
        passes = {
            lowered.prices.index: _passes(
                case.plan.groups[lowered.prices.index],
                [g for g, other in enumerate(first) if other == lowered.prices.index],
            )
            for lowered in step.groups
        }
        work = np.arange(step.program.num_tasks)
        for lowered in step.groups:
            work[lowered.first[0] : lowered.last[-1] + 1] = np.repeat(
                lowered.first, lowered.last - lowered.first + 1
            )
            for pieces, launches in lowered.launches:  # the host of a slow pass is slow with it
                work[launches] = work[pieces]
        return cls(
            case=case,
            replicated=ReplicatedProgram(
                program=step.program,
                together=_together(step),
                ranks={index: found.shape for index, found in passes.items()},
            ),
            passes=passes,
            times=times,
            computed_s=_computed_s(step),
            work=work,
            shared=shared,
            compiled=compiled,
        )

    def contention(self, noise: Noise) -> str:
        """Return when transfers of ranks that differ share links: one of `spec.variation.CONTENTIONS`."""
        if self.shared is None:
            return "none"
        if self.shared.network.others:  # their bursts meet the one rank that stands for all
            return "once"
        phases = self._steps(noise) * num_copies(self.replicated, self.shared.phases)
        return "every step" if phases <= MAX_PHASES else "once"

    def seconds(self, noise: Noise) -> np.ndarray:
        """Return the seconds of the step, one for each step drawn."""
        steps, shared = self._steps(noise), self.shared
        rng, slow_rng = (np.random.default_rng([noise.seed, stream]) for stream in (0, 1))
        if shared is not None and self.contention(noise) == "every step":
            draws = _Draws(self, noise, steps, rng, slow_rng)
            return contended_end_s(
                self.replicated,
                shared.phases,
                shared.network,
                draws.added_s,
                self.times.start_s,
                steps=steps,
                compiled=self.compiled,
            )
        most = max(math.prod(found.shape) for found in self.passes.values())
        at_once = max(1, min(steps, _MAX_ROW // most))
        found = []
        for begin in range(0, steps, at_once):
            count = min(at_once, steps - begin)
            draws = _Draws(self, noise, count, rng, slow_rng)
            found.append(last_end_s(self.replicated, draws, self.times.start_s, steps=count))
        return np.concatenate(found)

    def _steps(self, noise: Noise) -> int:
        return noise.seeds if noise.jitter > 0.0 else 1


class _Draws:
    """Seconds of each task on every rank that runs it; pieces of a pass share a factor."""

    def __init__(
        self,
        step: NoisyStep,
        noise: Noise,
        steps: int,
        rng: np.random.Generator,
        slow_rng: np.random.Generator,
    ):
        self.step, self.noise, self.steps, self.rng, self.slow_rng = step, noise, steps, rng, slow_rng
        self.alike_s = step.times.end_s - step.times.start_s
        self.left = np.bincount(step.work, minlength=len(step.work))
        self.factors: dict[int, np.ndarray] = {}
        self.slow = {index: _slow_blocks(step.case, found, noise) for index, found in step.passes.items()}

    def __call__(self, task: int) -> np.ndarray:
        """Return the seconds of a task, shape (steps or 1, sets or 1, ranks or 1)."""
        return self.alike_s[task] + self.added_s(task)  # type: ignore[no-any-return]

    def added_s(self, task: int) -> np.ndarray:
        """Return what a task takes beyond its seconds with ranks alike, of the same shape."""
        step = self.step
        if step.computed_s[task] <= 0.0:
            return np.zeros((1, 1, 1))
        work = int(step.work[task])
        if work not in self.factors:
            self.factors[work] = self._factors(task)
        factors = self.factors[work]
        self.left[work] -= 1
        if self.left[work] == 0:
            del self.factors[work]
        return (factors - 1.0) * step.computed_s[task]  # type: ignore[no-any-return]

    def _factors(self, task: int) -> np.ndarray:
        program = self.step.replicated.program
        group, stage = int(program.group[task]), int(program.stage[task])
        shape = (self.steps, *self.step.replicated.shape(task))
        block = self.step.passes[group].block[stage]
        factors = self._slowest(self.rng, block, shape)
        for place, slowness in self.slow[group].get(stage, {}).items():
            drawn = [factor * self._slowest(self.slow_rng, 1, shape[:1]) for factor in slowness]
            others = self._slowest(self.slow_rng, block - len(slowness), shape[:1])
            factors[:, place[0], place[1]] = np.max([others, *drawn], axis=0)
        return factors

    def _slowest(self, rng: np.random.Generator, num_ranks: int, shape: tuple[int, ...]) -> np.ndarray:
        return slowest_of(rng, num_ranks, shape, jitter=self.noise.jitter, tail=self.noise.jitter_tail)


def _passes(group: Group, equal: list[int]) -> _Passes:
    """Return which ranks of a group meet in every pass, and which run side by side."""
    block = [math.lcm(stage.tp * stage.cp, stage.ep * stage.etp) for stage in group.stages]
    blocks = {len(stage.ranks) // size for stage, size in zip(group.stages, block, strict=True)}
    sharing = {stage.shard_size or stage.inner_dp for stage in group.stages}
    is_even = len(blocks) == 1 and all(stage.rank_shares is None for stage in group.stages)
    if not is_even:  # rows pass from each rank of a stage to several of the next
        return _Passes(groups=equal, block=[len(stage.ranks) for stage in group.stages], blocks=1, width=1)
    (count,) = blocks
    width = count
    if len(sharing) == 1:
        width = max(1, count * sharing.pop() // group.stages[0].inner_dp)
    return _Passes(groups=equal, block=block, blocks=count, width=width if count % width == 0 else count)


def _slow_blocks(
    case: PlannedRun, passes: _Passes, noise: Noise
) -> dict[int, dict[tuple[int, int], list[float]]]:
    """Return the factors of slow ranks by stage and by place of their block among those of the group."""
    found: dict[int, dict[tuple[int, int], list[float]]] = {}
    for at, index in enumerate(passes.groups):
        for s, stage in enumerate(case.plan.groups[index].stages):
            for place, rank in enumerate(stage.ranks if noise.slow else ()):
                if rank in noise.slow:
                    block = at * passes.blocks + place // passes.block[s]
                    where = divmod(block, passes.width)
                    found.setdefault(s, {}).setdefault(where, []).append(float(noise.slow[rank]))
    return found


def _together(step: Step) -> np.ndarray:
    """Return who runs each task: sums of a whole step all ranks, transfers of sharded weights a set."""
    program = step.program
    together = np.where(program.kind == Kind.PARAMETER_GATHER, SET, EACH)
    is_sum = program.kind == Kind.GRADIENT_REDUCE
    together[is_sum] = np.where(program.micro_batch[is_sum] >= 0, SET, ALL)
    together[program.stage < 0] = ALL
    return together


def _computed_s(step: Step) -> np.ndarray:
    """Return the seconds of each task that its rank computes."""
    program = step.program
    seconds = np.zeros(program.num_tasks)
    for lowered in step.groups:
        seconds[lowered.optimizer] = program.duration_s[lowered.optimizer]
        ops = np.arange(lowered.first[0], lowered.last[-1] + 1)
        ops = ops[program.kind[ops] <= Kind.BACKWARD_WEIGHT]
        own_s = program.duration_s[ops] - step.data_s[ops]
        seconds[ops] = own_s * _computed_share(step, lowered, ops)
        for _, launches in lowered.launches:
            seconds[launches] = program.duration_s[launches]
    return seconds


def _computed_share(step: Step, lowered: LoweredGroup, ops: np.ndarray) -> np.ndarray:
    """Return which part of each op is no collective, shape (ops,)."""
    prices, program = lowered.prices, step.program
    computed_s = sum(prices.parts[name] for name in _COMPUTED if name in prices.parts)
    share = np.divide(computed_s, prices.op_s, out=np.zeros(prices.op_s.shape), where=prices.op_s > 0.0)
    last = (program.micro_batch[ops] == prices.num_micro_batches - 1).astype(np.int64)
    return share[program.kind[ops], program.stage[ops], program.chunk[ops], last]  # type: ignore[no-any-return]
