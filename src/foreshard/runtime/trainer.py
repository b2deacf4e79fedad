"""A rank's training loop: steps that commit together, changes of plan between them, recovery after a loss.

A step is: actions of the schedule, gradients summed, a vote, the update. The work of a rank only counts once
the vote has passed; a rank that is cut off after it finishes the step in the next generation.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from foreshard.errors import ForeshardError, SpecError
from foreshard.runtime.adaptive.idle_probe import Probe
from foreshard.runtime.checkpoint.saving import Checkpoints
from foreshard.runtime.committed_step import StepDone, TrainingProgress
from foreshard.runtime.engine.bucket_sums import BucketSums
from foreshard.runtime.engine.executor import StepSums
from foreshard.runtime.engine.update import Update
from foreshard.runtime.engine.vote import Vote, cast
from foreshard.runtime.gradient_sums import GradientSums, check_order, check_sums, gradient_sums
from foreshard.runtime.job.data import Feed
from foreshard.runtime.job.job import Job
from foreshard.runtime.membership.fixed_membership import FixedMembership, Generation, GroupMembership
from foreshard.runtime.membership.member import BOUNDARY
from foreshard.runtime.membership.recovery import Recovery
from foreshard.runtime.membership.world_group import WorldGroup
from foreshard.runtime.run_settings import Options
from foreshard.runtime.stage_messages import StageMessageSchedules
from foreshard.runtime.stage_runtime import StageRuntime
from foreshard.runtime.state.layout import RankLayout, layout_of
from foreshard.runtime.state.migration import migrate, moves_of
from foreshard.runtime.state.optimizer_sharding import OptimizerSharding
from foreshard.runtime.state.parameters import Parameters, parameters_of
from foreshard.runtime.state.rank_state import RankState
from foreshard.runtime.state.shard_keys import Shards
from foreshard.runtime.tensor.checks import check_split
from foreshard.runtime.trainer_context import TrainerContext
from foreshard.spec.adapters import adapters_of
from foreshard.spec.online import Command
from foreshard.spec.plan import Plan

_SKIPPED_STEPS = 20
"""Steps in a row that half precision may skip, their gradients being infinite, before a run ends."""
__all__ = ["Options", "StepDone", "Trainer"]


class Trainer:
    """Trains a job under a plan, as one rank of it.

    Parameters
    ----------
    job : Job
    plan : Plan, optional
        Needed without a membership: this process then is the plan's only rank.
    membership : GroupMembership, optional
        The other ranks, and how they find each other.
    surroundings
        Further fields of `TrainerContext`.
    """

    def __init__(
        self,
        job: Job,
        plan: Plan | None = None,
        *,
        membership: GroupMembership | None = None,
        **surroundings: Any,
    ):
        membership = membership or _single_rank(plan)
        context = self.context = TrainerContext(job=job, membership=membership, **surroundings)
        self.rank: int = context.membership.rank
        self.parameters = parameters_of(job)
        self.state = self._new_state()
        self.update = Update(job, context.options, context.clock)
        self._progress = TrainingProgress()
        self._checkpoints = Checkpoints(context)
        self._probe = Probe(job, self.rank, context.clock, context.device)
        self._sums = BucketSums(context.options, context.on_event)
        self._messages = StageMessageSchedules(context.options.stage_messages, context.on_event)
        self._feed: Feed | None = None
        self.is_stopped = False
        """Whether all ranks have agreed to end before the last step."""
        self._evaluated = (-1, -1)
        self._memory_bytes: dict[int, float | None] = {}
        self._generation: Generation | None = None
        self._layout: RankLayout
        self._world: WorldGroup
        self._stage: StageRuntime

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
        """Train one step and return what was measured.

        Raises
        ------
        PeerLost
            When a peer is gone; `adopt` the next generation then.
        """
        context, progress = self.context, self._progress
        if self._generation is None:
            self.adopt(context.membership.generation)
        self._evaluate()
        context.before_step(self.step)
        began_s = context.clock.now()
        progress.reduced = False
        self._sums.warm_up.step = self.step
        self._sums.warm_up.momentum = self.update.momentum(self.state)
        sums = self._stage.train(self.step, self.update.factor)
        positions = self._stage.trained_in(self.step)
        if context.ledger is not None and positions is not None:
            context.ledger.trained(self.step, self._world.number, positions)
        context.phase("vote")
        progress.reduced, progress.trained_in = True, self._world.number
        vote = self._cast_vote(sums)
        context.phase("update")
        self._commit(vote)
        self._stage.after_update()
        self._world.advance(context.clock)
        done = progress.done(context.clock.now() - began_s)
        self._report(done)
        self._after_step(done)
        self._evaluate()
        return done

    def _cast_vote(self, sums: StepSums) -> Vote:
        membership = self.context.membership
        boundary = membership.wanted()
        self._measure_idle(sums)
        return cast(
            self._world.group,
            self._world.ranks,
            self.rank,
            loss=sums.loss,
            count=sums.count,
            square_norm=self.update.square_norm(self.state),
            boundary=boundary,
            plan_number=self._world.newest_plan,
            saves=self._world.leads and self._checkpoints.may_retry(),
            stops=membership.stopping(),
            written=self._checkpoints.is_written,
            work_s=sums.work_s,
            samples=float(sums.samples),
            traffic=self.context.clock.traffic_from(self.rank),
        )

    def _measure_idle(self, sums: StepSums) -> None:
        """Measure links, and this rank if it is idle: it then votes seconds of work for no samples."""
        every = self.context.options.probe_every
        if not every or self.step % every:
            return
        if self._stage.is_idle:
            batch, size = self.plan.global_batch, self.plan.groups[0].micro_batch
            positions = range(self.step * batch, self.step * batch + size)
            sums.work_s = self._probe.sample_s(self._stage.feed, positions)
        self._probe.links(self._world.group, self._world.ranks)

    def _commit(self, vote: Vote) -> None:
        """Update with the sums of the vote: the step is done."""
        self._check_finite(vote)
        norm = self.update.apply(self.state, vote, self.step, self._report_skipped)
        self._progress.committed(vote, norm)
        if self.context.ledger is not None:
            self.context.ledger.commit(self.step - 1, self._progress.trained_in)

    def _check_finite(self, vote: Vote) -> None:
        """End the run before a gradient is applied that is not finite; fp16 skips a few such steps."""
        scale = self.update.scale
        fine = math.isfinite(vote.square_norm) and (math.isfinite(vote.loss) or scale is not None)
        ends = scale is None or scale.skipped + 1 >= _SKIPPED_STEPS
        if self.context.options.stop_on_nan and not fine and ends:
            raise ForeshardError(
                f"the gradient of step {self.step} is not finite (loss {vote.loss / (vote.count or 1.0):g})",
                key="--stop-on-nan",
                value=self.step,
                rule="Training ends before such a gradient is applied; the checkpoints before are kept",
                fix="Check the data, lower the learning rate or clip gradients, and continue with --resume; "
                "--no-stop-on-nan trains on",
            )

    def _report_skipped(self, reason: str) -> None:
        if self._world.leads:
            self.context.on_event("overflow", reason, step=self.step)

    def _report(self, done: StepDone) -> None:
        if self._world.leads:
            self.context.on_step(done)
            self._progress.reported = done.step

    # -- between steps --------------------------------------------------------------------------------------

    def _after_step(self, done: StepDone) -> None:
        if self._world.is_new_plan(done.vote.plan_number):
            self._adopt_plan(done.vote.plan_number)
        self.is_stopped = done.vote.stops
        leaves = done.vote.boundary and not self.is_stopped
        if done.vote.written or leaves:
            self._checkpoints.complete(self._world)
        if leaves:
            self.release()
            self.adopt(self.context.membership.next_generation(BOUNDARY))
        if self._checkpoints.is_due(self.step, done.vote):
            self._save()

    def _evaluate(self) -> None:
        """Evaluate if it is due; again in a new generation, where ranks were cut off in it or are new."""
        every, now = self.context.options.eval_every, (self._world.number, self.step)
        if not every or not self.step or self.step % every or self.is_stopped or self._evaluated == now:
            return
        self._evaluated = now
        self.context.phase("evaluation")
        found = self._stage.evaluate(self.step)
        if found is not None:
            self.context.on_evaluation(self.step, found)

    def save_last(self) -> None:
        """Make sure that the checkpoint at the end of training is written.

        Raises
        ------
        ForeshardError
            When the disk does not accept it for a while.
        PeerLost
        """
        self._evaluate()
        self._checkpoints.save_last(self._world, self.step, self._save)

    def propose(self, command: Command) -> None:
        """Announce a plan, which all ranks adopt after the next step; only the leader may."""
        if command.plan is None:
            return
        self._check(command.plan)
        sums = self._summed_by(command.plan)
        check_sums(command.plan, sums, virtual=self.context.clock.virtual)
        if command.plan.collectives != self.plan.collectives:
            check_order(command.plan, sums, self.context.options.bucket_order)
        number = self._world.announce_plan(command.plan)
        self.context.on_event("plan", f"{command.kind}: {command.reason}", step=self.step, number=number)

    def _adopt_plan(self, number: int) -> None:
        plan = self._world.take_plan(number)
        began_s = time.perf_counter()
        bytes_in = self._arrange(plan, self._sharding(self._layout).shards_by_rank(self._world.ranks))
        if self._world.leads:
            self.context.membership.plan_adopted(plan.to_dict())
        wall_s = time.perf_counter() - began_s
        self.context.on_event("adopted", f"plan {number}", step=self.step, wall_s=wall_s, bytes_in=bytes_in)

    def release(self) -> None:
        """Let go of all process groups: only then do peers that wait for this rank learn that it has left."""
        stage, world = vars(self).pop("_stage", None), vars(self).get("_world")
        if stage is not None:
            stage.release()
        if world is not None:
            world.leave()
        self.state.ranks.disconnect()

    def _save(self) -> None:
        """Write a checkpoint; every shard by the lowest rank that holds it."""
        shards = self._sharding(self._layout).shards_by_rank(self._world.ranks)
        mine = shards[self.rank].difference(*(held for rank, held in shards.items() if rank < self.rank))
        options = self.context.options
        self._checkpoints.save(
            self._world,
            self.state,
            mine,
            plan=self.plan,
            step=self.step,
            scale=self.update.scale,
            behind=options.save_async and not self.is_stopped and self.step != options.save_at,
        )

    # -- membership -----------------------------------------------------------------------------------------

    def adopt(self, generation: Generation) -> None:
        """Join a generation: agree on the step, fetch what is missing, continue.

        Raises
        ------
        PeerLost
            When a rank of the generation is gone again.
        """
        self.context.phase("rebuild")
        first, self._generation = self._generation is None, generation
        self._checkpoints.drop()
        self.is_stopped = False  # a rank that is new has not heard of it: agree again
        world = self._world = WorldGroup(self.context.membership, generation)
        self._check(generation.plan)
        status = self._progress.status(self.state, self.context.memory_bytes, self.update.scale)
        recovery = Recovery(world.statuses(status))
        self._memory_bytes = recovery.memory_bytes
        held = self._roll_forward(recovery)
        self._report_late(recovery)
        self.update.scale = recovery.loss_scale
        wanted = self._sharding(layout_of(generation.plan)).shards_by_rank(world.ranks)
        _, missing = moves_of(held, wanted)
        resume = generation.resume and first and recovery.is_first
        if missing or resume:
            self._roll_back(generation.plan, missing, resume=resume)
            held = wanted
        else:
            self._progress.step = recovery.step
        self._arrange(generation.plan, held)
        world.advance(self.context.clock)  # the virtual clock of a new rank starts at 0
        if not first:
            text = f"generation {generation.number}: ranks {list(world.ranks)}"
            self.context.on_event("rebuilt", text, step=self.step)
        if self._checkpoints.is_lacking(world, self.step):
            self._save()

    def _check(self, plan: Plan) -> None:
        layout = layout_of(plan)
        if layout.num_layers != self.context.job.num_layers:
            raise SpecError(
                f"the plan splits {layout.num_layers} layers, the job has {self.context.job.num_layers}",
                key="groups.stages.layers",
                value=layout.num_layers,
                rule="A plan holds every layer of the model once per group",
                fix=f"Cut 0..{self.context.job.num_layers} in every group",
            )
        check_split(layout, self.parameters)
        check_adapters(plan, self.context.job, self.parameters)

    def _summed_by(self, plan: Plan) -> GradientSums:
        """Return how gradients are summed under a plan: as the run's options say, else as the plan does."""
        run = self.context.options
        return gradient_sums(plan, run.collectives, run.compress, run.bucket_bytes, file="the plan")

    def _roll_forward(self, recovery: Recovery) -> dict[int, Shards]:
        """Finish a step that others have committed, and return what every rank then holds."""
        held, vote = recovery.held(), recovery.vote_to_finish(self.rank)
        if vote is not None:
            self._commit(vote)
            self.state.held = self.state.kept
        elif self.rank not in held:
            self._forget()
        return held

    def _report_late(self, recovery: Recovery) -> None:
        """Report the last step if the leader was lost before it could."""
        late = recovery.unreported_step()
        if self._progress.last is not None and late is not None and late[0] == self.rank:
            self.context.on_step(self._progress.last)
            self._progress.reported = late[1]

    def _forget(self) -> None:
        """Drop all state: it is of another step than the run continues from."""
        self.state = self._new_state()
        self._progress.reduced = False

    def _new_state(self) -> RankState:
        return RankState(self.context.job, self.rank, self.context.device, self.parameters)

    def _roll_back(self, plan: Plan, missing: frozenset[int], *, resume: bool) -> None:
        """Restart from the latest checkpoint, or from initial values where there is none."""
        context, step = self.context, self._checkpoints.sound_step(self._world)
        layout = layout_of(plan)
        self._forget()
        self.state.build(layout)
        self._progress.step, self.update.scale = step or 0, None
        if step is not None:
            shards = self._sharding(layout).shards(self.rank)
            self.update.scale = self._checkpoints.restore(step, self.state, shards, plan)
        if context.ledger is not None:
            context.ledger.rollback(self.step, self._world.number)
        # The first values of a run that starts are no news, and one rank says what holds for all.
        lost = not resume and self._world.number > 0
        lost = lost or bool(missing - frozenset(range(context.job.num_layers)))
        if (step is not None or lost) and self.rank == min(self._world.ranks):
            text = "first values" if step is None else f"checkpoint of step {step}"
            text = f"training restarts from the {text}"
            context.on_event("restored", text, step=self.step, missing_layers=sorted(missing))

    # -- a place in the plan --------------------------------------------------------------------------------

    def _arrange(self, plan: Plan, held: Mapping[int, Shards]) -> int:
        """Take this rank's place in a plan, with the shards that have to move; return the bytes received."""
        self.context.phase("migration")
        world, layout, bytes_in = self._world, layout_of(plan), 0
        sharding = self._sharding(layout)
        moves, _ = moves_of(held, sharding.shards_by_rank(world.ranks), self.parameters.weight)
        with self._timed("build", layout):
            self.state.build(layout)
        if world.group is not None:
            bytes_in = migrate(self.state, moves, world.group, world.ranks, self.context.clock)
            world.barrier()
        with self._timed("arrange", layout):
            self._layout = layout
            sums = self._summed_by(plan)
            self._sums.select(sums.collectives)
            self.state.bucket_bytes = sums.bucket_bytes
            self.state.arrange(layout, sharding)
            self.update.arrange(self.state, plan)
            if plan.precision == "tf32":
                torch.set_float32_matmul_precision("high")  # unlike autocast it has no context
            self._stage = StageRuntime(
                self.context, world, layout, sharding, self.state, self._sums, self._messages, self._feed
            )
            self._sums.plan_connected()
            self._feed = self._stage.feed
        return bytes_in

    @contextmanager
    def _timed(self, name: str, layout: RankLayout) -> Iterator[None]:
        """Count work between steps on the clock: a change of plan takes the rank's time too."""
        self.context.clock.begin()
        yield
        self.context.clock.end(name, 0, len(layout.layers_of(self.rank)))

    def _sharding(self, layout: RankLayout) -> OptimizerSharding:
        return OptimizerSharding(layout, self.parameters, self._memory_bytes)


def check_adapters(plan: Plan, job: Job, parameters: Parameters) -> None:
    """Raise SpecError for a plan with adapters of which the job has none, or others than it says."""
    if plan.lora is None:
        return
    wanted = adapters_of(plan.lora, key="lora")
    said = None if job.lora is None else adapters_of(job.lora, key="lora", file=job.path)
    if said is not None and (said[0], set(said[1])) != (wanted[0], set(wanted[1])):
        what, fix = f"the job has adapters {job.lora}", "Plan for the adapters of the job"
    elif said is None:
        what = "the job states no adapters"
        fix = f'Add them to its model(), with lora = "{plan.lora}" beside it'
    elif not parameters.has_frozen:
        what, fix = "the job trains all weights of its model", "Freeze those beside the adapters"
    else:
        return
    rule = "The job makes the adapters of a plan, on frozen weights; a run adds none"
    fix += ", or leave lora out of the plan"
    raise SpecError(what, file=job.path, key="lora", value=plan.lora, rule=rule, fix=fix)


def _single_rank(plan: Plan | None) -> FixedMembership:
    if plan is None or len(plan.ranks) != 1:
        raise SpecError(
            "no membership",
            key="membership",
            rule="A plan of several ranks needs one",
            fix="Use foreshard run, or runtime.membership.fixed_membership.FixedMembership under torchrun",
        )
    return FixedMembership(None, plan.ranks[0], plan, plan.ranks)
