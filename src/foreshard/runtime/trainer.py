"""A rank's training: steps that commit together, changes between them, recovery when a peer is gone.

A step is: actions of the schedule, gradients summed, a vote, the update. What a rank has done is only worth
something once the vote has passed; a rank cut off behind it finishes the step when it meets the others again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from foreshard.errors import SpecError
from foreshard.runtime.adaptive.idle_probe import Probe
from foreshard.runtime.checkpoint.saving import Saving
from foreshard.runtime.committed_step import StepDone, TrainingProgress
from foreshard.runtime.engine.clock import Clock, WallClock
from foreshard.runtime.engine.executor import StepSums
from foreshard.runtime.engine.update import Update
from foreshard.runtime.engine.vote import Vote, cast
from foreshard.runtime.job.data import Feed
from foreshard.runtime.job.job import Job
from foreshard.runtime.membership.fixed_membership import FixedMembership, Generation
from foreshard.runtime.membership.recovery import Recovery, Status
from foreshard.runtime.membership.world_group import WorldGroup
from foreshard.runtime.plan_proposals import Proposals
from foreshard.runtime.stage_runtime import StageRuntime
from foreshard.runtime.state.layout import RankLayout, layout_of
from foreshard.runtime.state.migration import Moved, migrate, moves_of
from foreshard.runtime.state.optimizer_sharding import OptimizerSharding
from foreshard.runtime.state.parameters import parameters_of
from foreshard.runtime.state.rank_state import RankState
from foreshard.runtime.state.shard_keys import Held
from foreshard.runtime.tensor.checks import check_split
from foreshard.runtime.trainer_context import Options, TrainerContext
from foreshard.spec.online import Command
from foreshard.spec.plan import Plan

__all__ = ["Options", "StepDone", "Trainer"]


class Trainer:
    """Trains a job under a plan, as one rank of it.

    Parameters
    ----------
    job : Job
    plan : Plan, optional
        Needed without a membership: this process then is the plan's only rank.
    membership : FixedMembership or Membership, optional
        Who else is there.
    options : Options, optional
    clock : Clock, optional
        The wall's if not given.
    device : torch.device, optional
        The CPU if not given.
    checkpoints : Path, optional
        Folder that all ranks reach.
    phase : callable of name, optional
        Told the phase the rank is in.
    room_bytes : float, optional
        Memory of this rank: in proportion to it a stage deals out what its ranks share out (ZeRO).
    """

    def __init__(
        self,
        job: Job,
        plan: Plan | None = None,
        *,
        membership: Any = None,
        options: Options | None = None,
        clock: Clock | None = None,
        device: torch.device | None = None,
        checkpoints: Path | None = None,
        phase: Callable[[str], None] = lambda name: None,
        on_action: Callable[..., None] | None = None,
        on_event: Callable[..., None] = lambda kind, text, **facts: None,
        ledger: Any = None,
        room_bytes: float | None = None,
        before_step: Callable[[int], None] = lambda step: None,
        on_step: Callable[[StepDone], None] = lambda done: None,
    ):
        setting = self.setting = TrainerContext(
            job=job,
            membership=_alone(plan) if membership is None else membership,
            options=options or Options(),
            clock=clock or WallClock(),
            device=device or torch.device("cpu"),
            checkpoints=checkpoints,
            phase=phase,
            on_action=on_action,
            on_event=on_event,
            ledger=ledger,
            room_bytes=room_bytes,
            before_step=before_step,
            on_step=on_step,
        )
        self.rank: int = setting.membership.rank
        self.parameters = parameters_of(job)
        self.holding = RankState(job, self.rank, setting.device, self.parameters)
        self.update = Update(job, setting.options, setting.clock)
        self.last_moved: Moved | None = None
        self._progress = TrainingProgress()
        self._saving = Saving(setting)
        self._probe = Probe(job, self.rank, setting.clock, setting.device)
        self._feed: Feed | None = None
        self._rooms: dict[int, float | None] = {}
        self._generation: Generation | None = None
        self._layout: RankLayout
        self._company: WorldGroup
        self._proposals: Proposals
        self._place: StageRuntime

    @property
    def step(self) -> int:
        """The step that is trained next."""
        return self._progress.step

    @property
    def plan(self) -> Plan:
        """The plan that is run."""
        return self._layout.plan

    # -- a step ---------------------------------------------------------------------------------------------

    def train_step(self) -> StepDone:
        """Train one step and return what it was.

        Raises
        ------
        RuntimeError
            From torch.distributed, when a peer is gone; `adopt` the next generation then.
        """
        setting, progress = self.setting, self._progress
        if self._generation is None:
            self.adopt(setting.membership.generation)
        setting.before_step(self.step)
        began_s = setting.clock.now()
        progress.reduced = False
        sums = self._place.train(self.step, self.update.factor)
        positions = self._place.trained_in(self.step)
        if setting.ledger is not None and positions is not None:
            setting.ledger.trained(self.step, self._company.number, positions)
        setting.phase("vote")
        progress.reduced, progress.trained_in = True, self._company.number
        vote = self._cast(sums)
        setting.phase("update")
        self._commit(vote)
        self._place.spread()
        self._company.advance(setting.clock)
        done = progress.done(setting.clock.now() - began_s)
        self._tell(done)
        self._between(done)
        return done

    def _cast(self, sums: StepSums) -> Vote:
        wanted = self.setting.membership.wanted()
        self._look_around(sums)
        return cast(
            self._company.world,
            self._company.ranks,
            self.rank,
            loss=sums.loss,
            count=sums.count,
            square_norm=self.update.square_norm(self.holding),
            boundary=wanted,
            plan_number=self._proposals.newest,
            work_s=sums.work_s,
            samples=float(sums.samples),
            carried=self._carried() if self.setting.clock.virtual else None,
        )

    def _look_around(self, sums: StepSums) -> None:
        """Measure links, and this rank if it is idle: it then tells seconds of work for no samples."""
        every = self.setting.options.probe_every
        if not every or self.step % every:
            return
        if self._place.is_idle:
            batch, size = self.plan.global_batch, self.plan.groups[0].micro_batch
            positions = range(self.step * batch, self.step * batch + size)
            sums.work_s = self._probe.sample_s(self._place.feed, positions)
        self._probe.links(self._company.world, self._company.ranks)

    def _carried(self) -> dict[int, tuple[float, float, float]]:
        """Return what this rank has sent since the last vote, by target."""
        told = self.setting.clock.carried().items()
        return {target: amounts for (source, target), amounts in told if source == self.rank}

    def _commit(self, vote: Vote) -> None:
        """Update by what the vote brought: the step is done."""
        norm = self.update.apply(self.holding, vote, self.step, self._tell_skipped)
        self._progress.committed(vote, norm)
        if self.setting.ledger is not None:
            self.setting.ledger.commit(self.step - 1, self._progress.trained_in)

    def _tell_skipped(self, text: str) -> None:
        if self._company.conducts:
            self.setting.on_event("overflow", text, step=self.step)

    def _tell(self, done: StepDone) -> None:
        if self._company.conducts:
            self.setting.on_step(done)
            self._progress.told = done.step

    # -- between steps --------------------------------------------------------------------------------------

    def _between(self, done: StepDone) -> None:
        if self._proposals.is_due(done.vote.plan_number):
            self._adopt_plan(done.vote.plan_number)
        if done.vote.boundary:
            self.release()
            self.adopt(self.setting.membership.next_generation("boundary"))
        if self._saving.is_due(self.step):
            self._save()

    def propose(self, command: Command) -> None:
        """Announce a plan, to be adopted by all ranks after the next step; only the conducting rank may."""
        if command.plan is None:
            return
        self._check(command.plan)
        number = self._proposals.announce(command.plan)
        self.setting.on_event("plan", f"{command.kind}: {command.reason}", step=self.step, number=number)

    def _adopt_plan(self, number: int) -> None:
        plan = self._proposals.take(number)
        began_s = time.perf_counter()
        self._settle(plan, self._deal(self._layout).wanted(self._company.ranks))
        if self._company.conducts:
            self.setting.membership.plan_adopted(plan.to_dict())
        self.setting.on_event(
            "adopted",
            f"plan {number}",
            step=self.step,
            wall_s=time.perf_counter() - began_s,
            bytes_in=self.last_moved.bytes_in if self.last_moved else 0,
        )

    def release(self) -> None:
        """Let go of all process groups: only then do peers that wait for this rank learn that it has left."""
        place, company = vars(self).pop("_place", None), vars(self).get("_company")
        if place is not None:
            place.release()
        if company is not None:
            company.leave()
        self.holding.ranks.disconnect()

    def _save(self) -> None:
        """Write a checkpoint; every piece by the least rank that holds it."""
        wanted = self._deal(self._layout).wanted(self._company.ranks)
        mine = wanted[self.rank].difference(*(held for rank, held in wanted.items() if rank < self.rank))
        self._saving.save(
            self._company, self.holding, mine, plan=self.plan, step=self.step, scale=self.update.scale
        )

    # -- membership -----------------------------------------------------------------------------------------

    def adopt(self, generation: Generation) -> None:
        """Take a place in a generation: agree on the step, fetch what is missing, go on.

        Raises
        ------
        RuntimeError
            When a rank of the generation is gone again.
        """
        self.setting.phase("rebuild")
        first, self._generation = self._generation is None, generation
        company = self._company = WorldGroup(self.setting.membership, generation)
        self._proposals = Proposals(company)
        self._check(generation.plan)
        met = Recovery(company.statuses(self._status()))
        self._rooms = met.rooms
        held = self._roll_forward(met)
        self._tell_late(met)
        self.update.scale = met.loss_scale
        wanted = self._deal(layout_of(generation.plan)).wanted(company.ranks)
        _, missing = moves_of(held, wanted)
        resume = generation.resume and first and met.is_first
        if missing or resume:
            self._roll_back(generation.plan, missing, resume=resume)
            held = wanted
        else:
            self._progress.step = met.step
        self._settle(generation.plan, held)
        company.advance(self.setting.clock)  # a rank that is new has no time yet
        if not first:
            text = f"generation {generation.number}: ranks {list(company.ranks)}"
            self.setting.on_event("rebuilt", text, step=self.step)
        if self._saving.is_lacking(company, self.step):
            self._save()

    def _status(self) -> Status:
        return self._progress.status(self.holding, self.setting.room_bytes, self.update.scale)

    def _check(self, plan: Plan) -> None:
        layout = layout_of(plan)
        if layout.num_layers != self.setting.job.num_layers:
            raise SpecError(
                f"the plan splits {layout.num_layers} layers, the job has {self.setting.job.num_layers}",
                key="groups.stages.layers",
                value=layout.num_layers,
                rule="A plan holds every layer of the model once per group",
                fix=f"Cut 0..{self.setting.job.num_layers} in every group",
            )
        check_split(layout, self.parameters)

    def _roll_forward(self, met: Recovery) -> dict[int, Held]:
        """Finish a step that others have committed, and return what every rank holds then."""
        held, vote = met.held(), met.cut_off(self.rank)
        if vote is not None:
            self._commit(vote)
            self.holding.held = self.holding.kept
        elif self.rank not in held:
            self._forget()
        return held

    def _tell_late(self, met: Recovery) -> None:
        """Tell the last step if who conducted it was lost before it could."""
        late = met.late_teller()
        if self._progress.last is not None and late is not None and late[0] == self.rank:
            self.setting.on_step(self._progress.last)
            self._progress.told = late[1]

    def _forget(self) -> None:
        """Drop everything held: it is of another step than the run goes on from."""
        self.holding = RankState(self.setting.job, self.rank, self.setting.device, self.parameters)
        self._progress.reduced = False

    def _roll_back(self, plan: Plan, missing: frozenset[int], *, resume: bool) -> None:
        """Begin again from the latest checkpoint, or from the first values where there is none."""
        setting, step, layout = self.setting, self._saving.latest(), layout_of(plan)
        self._forget()
        self.holding.build(layout)
        self._progress.step, self.update.scale = step or 0, None
        if step is not None:
            wanted = self._deal(layout).pieces(self.rank)
            self.update.scale = self._saving.restore(step, self.holding, wanted)
        if setting.ledger is not None:
            setting.ledger.rollback(self.step, self._company.number)
        if step is not None or missing - frozenset(range(setting.job.num_layers)) or not resume:
            text = "first values" if step is None else f"checkpoint of step {step}"
            setting.on_event("restored", f"from the {text}", step=self.step, missing_layers=sorted(missing))

    # -- a place --------------------------------------------------------------------------------------------

    def _settle(self, plan: Plan, held: Mapping[int, Held]) -> None:
        """Move what has to move and take the place that the plan gives."""
        self.setting.phase("migration")
        company, layout = self._company, layout_of(plan)
        deal = self._deal(layout)
        moves, _ = moves_of(held, deal.wanted(company.ranks), self.parameters.weight)
        with self._at_work("build", layout):
            self.holding.build(layout)
        if company.world is not None:
            self.last_moved = migrate(self.holding, moves, company.world, company.ranks, self.setting.clock)
            company.wait_for_all()
        with self._at_work("arrange", layout):
            self._layout = layout
            self.holding.arrange(layout, deal)
            self.update.arrange(self.holding, plan)
            self._place = StageRuntime(self.setting, company, layout, deal, self.holding, self._feed)
            self._feed = self._place.feed

    @contextmanager
    def _at_work(self, name: str, layout: RankLayout) -> Iterator[None]:
        """Count work between steps: a change of plan takes the rank's time too."""
        self.setting.clock.begin()
        yield
        self.setting.clock.end(name, 0, len(layout.layers_of(self.rank)))

    def _deal(self, layout: RankLayout) -> OptimizerSharding:
        return OptimizerSharding(layout, self.parameters, self._rooms)


def _alone(plan: Plan | None) -> FixedMembership:
    if plan is None or len(plan.ranks) != 1:
        raise SpecError(
            "no membership",
            key="membership",
            rule="A plan of several ranks needs one",
            fix="Use foreshard run, or runtime.fixed.FixedMembership under torchrun",
        )
    return FixedMembership(None, plan.ranks[0], plan, plan.ranks)
