"""A rank's training: steps that commit together, changes between them, recovery when a peer is gone.

A step is: actions of the schedule, gradients summed, a vote, the update. What a rank has done is only worth
something once the vote has passed; a rank cut off behind it finishes the step when it meets the others again.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from foreshard.errors import SpecError
from foreshard.runtime.checkpoint_folders import latest as latest_checkpoint
from foreshard.runtime.checkpoint_folders import prune
from foreshard.runtime.checkpoint_keys import is_wanted, item_of, key_of
from foreshard.runtime.clock import Clock, WallClock
from foreshard.runtime.data import Feed
from foreshard.runtime.exchange import Exchange
from foreshard.runtime.executor import Executor, StepSums
from foreshard.runtime.fixed import FixedMembership, Generation
from foreshard.runtime.holding import Holding
from foreshard.runtime.job import Job
from foreshard.runtime.layout import Layout, layout_of
from foreshard.runtime.loss_scale import LossScale, first_scale, heard_scale
from foreshard.runtime.meeting import Meeting, Status, heard_status
from foreshard.runtime.migrate import Held, Moved, Piece, migrate, moves_of
from foreshard.runtime.own_code import in_file
from foreshard.runtime.probe import Probe
from foreshard.runtime.slices import parsed
from foreshard.runtime.sync import GradientSync, gradient_sync, latest
from foreshard.runtime.tensor_ranks import ranks_of
from foreshard.runtime.tensor_split import check_split
from foreshard.runtime.vote import Vote, cast
from foreshard.runtime.zero import Deal, Shards, equals_of, is_dealt, parameters_of
from foreshard.spec.online import Command, Event, Policy, StepMeasured
from foreshard.spec.plan import Plan, parse_plan


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDone:
    """A committed step.

    Attributes
    ----------
    step : int
    loss : float
        Mean over what the job counts (tokens), of the whole step.
    count : float
    gradient_norm : float or None
        Of the mean gradient, where it was asked for.
    time_s : float or None
        On the run's clock, of the slowest rank where time is virtual; None for a step that was cut in two.
    vote : Vote
    """

    step: int
    loss: float
    count: float
    gradient_norm: float | None
    time_s: float | None
    vote: Vote


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a run is done, apart from the plan.

    Attributes
    ----------
    seed : int
        Of initial values, order of samples and dropout.
    clip_norm : float or None
        Largest norm of the mean gradient.
    sync : str
        Name of the gradient synchronisation.
    checkpoint_every : int
        Steps between checkpoints; 0 for none but the first values, which need no file.
    track_norm : bool
        Whether to report the gradient's norm without clipping.
    probe_every : int
        Steps between measurements of idle ranks and links; 0 for none.
    """

    seed: int = 0
    clip_norm: float | None = None
    sync: str = "all-reduce"
    checkpoint_every: int = 0
    track_norm: bool = False
    probe_every: int = 0


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
    policy : Policy, optional
        Asked by the least rank after every step for the next plan.
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
        policy: Policy | None = None,
        phase: Callable[[str], None] = lambda name: None,
        on_action: Callable[..., None] | None = None,
        on_event: Callable[..., None] = lambda kind, text, **facts: None,
        ledger: Any = None,
        room_bytes: float | None = None,
        before_step: Callable[[int], None] = lambda step: None,
        on_step: Callable[[StepDone], None] = lambda done: None,
    ):
        if membership is None:
            membership = _alone(plan)
        self.job, self.membership = job, membership
        self.options, self.clock = options or Options(), clock or WallClock()
        self.device = device or torch.device("cpu")
        self.checkpoints, self.policy, self.phase = checkpoints, policy, phase
        self.on_action, self.on_event, self.ledger = on_action, on_event, ledger
        self.before_step, self.on_step = before_step, on_step
        self.room_bytes = room_bytes
        self.rank: int = membership.rank
        self.step = 0
        self.parameters = parameters_of(job)
        self.holding = Holding(job, self.rank, self.device, self.parameters)
        self.feed: Feed | None = None
        self.last_moved: Moved | None = None
        self._held: Held = frozenset()
        self._kept: Held = frozenset()
        self._generation: Generation | None = None
        self._sync: GradientSync | None = None
        self._shards: Shards | None = None
        self._executor: Executor | None = None
        self._probe = Probe(job, self.rank, self.clock, self.device)
        self._vote: Vote | None = None
        self._reduced = False
        self._trained_in = 0
        self._plan_number = 0
        self._next_plans: dict[int, Plan] = {}
        self._base_lr: list[float] = []
        self._rooms: dict[int, float | None] = {}
        self._scale: LossScale | None = None
        self._last: StepDone | None = None
        self._told = self._saved = -1

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
        if self._generation is None:
            self.adopt(self.membership.generation)
        self.before_step(self.step)
        began_s = self.clock.now()
        self._reduced = False
        sums = self._compute()
        if self.ledger is not None and self._executor is not None:
            self.ledger.trained(self.step, self._generation.number, self._executor.trained_in(self.step))  # type: ignore[union-attr]
        self.phase("vote")
        self._reduced, self._trained_in = True, self._generation.number  # type: ignore[union-attr]
        vote = self._cast(sums)
        done = self._commit(vote, began_s)
        self._tell(done)
        self._between(done)
        return done

    def _compute(self) -> StepSums:
        assert self._sync is not None
        self.holding.zero_gradients()
        self._sync.begin()
        if self._executor is not None:
            self._executor.loss_scale = 1.0 if self._scale is None else self._scale.value
        with in_file(self.job.path):
            sums = self._executor.run(self.step) if self._executor is not None else StepSums()
        self.phase("all-reduce")
        self._sync.finish()
        return sums

    def _cast(self, sums: StepSums) -> Vote:
        wanted = self.membership.wanted()
        self._look_around(sums)
        number = max(self._next_plans, default=0) if self._conducts else 0
        return cast(
            self._world, self._ranks, self.rank, loss=sums.loss, count=sums.count,
            square_norm=self._square_norm(),
            boundary=wanted, plan_number=number, work_s=sums.work_s, samples=float(sums.samples),
            carried=self._carried() if self.clock.virtual else None,
        )  # fmt: skip

    def _look_around(self, sums: StepSums) -> None:
        """Measure links, and this rank if it is idle: it then tells seconds of work for no samples."""
        every = self.options.probe_every
        if not every or self.step % every:
            return
        if self._executor is None and self.feed is not None:
            batch, size = self.feed.global_batch, self.plan.groups[0].micro_batch
            sums.work_s = self._probe.sample_s(self.feed, range(self.step * batch, self.step * batch + size))
        self._probe.links(self._world, self._ranks)

    def _carried(self) -> dict[int, tuple[float, float, float]]:
        """Return what this rank has sent since the last vote, by target."""
        told = self.clock.carried().items()
        return {target: amounts for (source, target), amounts in told if source == self.rank}

    def _square_norm(self) -> float:
        """Return the squares of the gradients that this rank answers for: each parameter is counted once."""
        if self.options.clip_norm is None and not self.options.track_norm and self._scale is None:
            return 0.0
        mine = [b.flat for b in self.holding.buckets if b.segment.owners[0] == self.rank]
        return float(sum(flat.double().square().sum() for flat in mine))

    def _commit(self, vote: Vote, began_s: float) -> StepDone:
        self.phase("update")
        norm = self._update(vote)
        self.step, self._vote, self._reduced = self.step + 1, vote, False
        self._last = self._done(vote, norm, None)
        if self.ledger is not None:
            self.ledger.commit(self.step - 1, self._trained_in)
        self._spread_values()
        self._advance_together()
        return self._done(vote, norm, self.clock.now() - began_s)

    def _done(self, vote: Vote, norm: float | None, time_s: float | None) -> StepDone:
        return StepDone(
            step=self.step - 1, loss=vote.loss / max(vote.count, 1e-300), count=vote.count,
            gradient_norm=norm,
            time_s=time_s, vote=vote,
        )  # fmt: skip

    def _update(self, vote: Vote) -> float | None:
        """Divide the summed gradients once, clip, and let the optimizer step."""
        scale, norm = 1.0 / vote.count if vote.count else 0.0, None
        if self._scale is not None:
            scale /= self._scale.value
            if self._rescale(vote):
                return None
        if self.options.clip_norm is not None or self.options.track_norm:
            norm = vote.square_norm**0.5 * scale
        if norm is not None and self.options.clip_norm is not None and norm > self.options.clip_norm:
            scale *= self.options.clip_norm / (norm + 1e-6)
        layers = len(self.holding.modules)
        self.clock.begin()
        for bucket in self.holding.buckets:
            bucket.flat.mul_(scale)
            bucket.empty()
        if self.holding.optimizer is not None:
            self._set_lr()
            self.holding.optimizer.step()
        self.clock.end("optimizer", 0, layers)
        return norm

    def _rescale(self, vote: Vote) -> bool:
        """Choose the next loss scale; return whether the gradient is not finite and nothing is updated."""
        before = self._scale
        assert before is not None
        self._scale = before.after(vote.square_norm)
        skipped = not math.isfinite(vote.square_norm)
        if skipped and self._conducts:
            text = f"gradient not finite: nothing updated, loss scale {self._scale.value:g}"
            self.on_event("overflow", text, step=self.step)
        return skipped

    def _spread_values(self) -> None:
        """Get the parameters that other ranks of the stage have updated.

        Until then this rank does not have them.
        """
        if self._shards is None:
            return
        whole, self._held = self._held, self._kept
        self._shards.updated()
        self._held = whole

    def _set_lr(self) -> None:
        if self.job.lr is not None and self.holding.optimizer is not None:
            factor = self.job.lr(self.step)
            for group, base in zip(self.holding.optimizer.param_groups, self._base_lr, strict=True):
                group["lr"] = base * factor

    def _advance_together(self) -> None:
        """Bring virtual clocks to the latest: nobody begins a step before the vote of all."""
        if self.clock.virtual and self._world is not None:
            now = torch.tensor([self.clock.now()], dtype=torch.float64)
            latest(self._world, now)
            self.clock.received(float(now[0]) + self.clock.reduced_s(0, self._ranks))

    # -- between steps --------------------------------------------------------------------------------------

    def _between(self, done: StepDone) -> None:
        if done.vote.plan_number > self._plan_number:
            self._adopt_plan(done.vote.plan_number)
        elif self.policy is not None and self._conducts:
            self._ask(done)
        if done.vote.boundary:
            self.release()
            self.adopt(self.membership.next_generation("boundary"))
        if self._saves() and self._saved != self.step:
            self.save()

    def _ask(self, done: StepDone) -> None:
        """Ask the policy; its plan is announced with the next vote and adopted after it."""
        event: Event = StepMeasured(
            step=done.step, time_s=done.time_s or 0.0, stage_s=done.vote.sample_s, link_s=done.vote.links
        )
        for command in self.policy.on(event):  # type: ignore[union-attr]
            self.propose(command)

    def propose(self, command: Command) -> None:
        """Announce a plan, to be adopted by all ranks after the next step; only the conducting rank may."""
        if command.plan is None:
            return
        self._check(command.plan)
        number = max([self._plan_number, *self._next_plans]) + 1
        self._next_plans[number] = command.plan
        if self.membership.store is not None:
            where = f"g{self._generation.number}/plan/{number}"  # type: ignore[union-attr]
            self.membership.store.set(where, json.dumps(command.plan.to_dict()))
        self.on_event("plan", f"{command.kind}: {command.reason}", step=self.step, number=number)

    def _adopt_plan(self, number: int) -> None:
        plan = self._next_plans.pop(number, None)
        if plan is None:
            text = self.membership.store.get(f"g{self._generation.number}/plan/{number}")  # type: ignore[union-attr]
            plan = parse_plan(json.loads(bytes(text)))
        self._plan_number = number
        began_s = time.perf_counter()
        self._settle(plan, self._wanted(self._layout))
        if self._conducts:
            self.membership.plan_adopted(plan.to_dict())
        self.on_event("adopted", f"plan {number}", step=self.step, wall_s=time.perf_counter() - began_s,
                      bytes_in=self.last_moved.bytes_in if self.last_moved else 0)  # fmt: skip

    def release(self) -> None:
        """Let go of all process groups: only then do peers that wait for this rank learn that it has left."""
        if self._executor is not None:
            self._executor.release()
        self._world = self._executor = self._sync = self._shards = None
        self.holding.ranks.disconnect()

    # -- membership -----------------------------------------------------------------------------------------

    def adopt(self, generation: Generation) -> None:
        """Take a place in a generation: agree on the step, fetch what is missing, go on.

        Raises
        ------
        RuntimeError
            When a rank of the generation is gone again.
        """
        self.phase("rebuild")
        first = self._generation is None
        self._generation, self._ranks = generation, tuple(sorted(generation.ranks))
        self._conducts = self.rank == self._ranks[0]
        self._world = self.membership.group(self._ranks, "world") if len(self._ranks) > 1 else None
        self._plan_number, self._next_plans = 0, {}
        self._check(generation.plan)
        met = Meeting(self._tell_all(self._status()))
        self._rooms = met.rooms
        resume = generation.resume and first and met.is_first
        held = self._roll_forward(met)
        self._tell_late(met)
        self._scale = met.loss_scale
        wanted = self._wanted(layout_of(generation.plan))
        _, missing = moves_of(held, wanted)
        if missing or resume:
            self._roll_back(generation.plan, missing, resume=resume)
            held = wanted
        else:
            self.step = met.step
        self._settle(generation.plan, held)
        self._advance_together()  # a rank that is new has no time yet
        if not first:
            self.on_event(
                "rebuilt", f"generation {generation.number}: ranks {list(self._ranks)}", step=self.step
            )
        if self._lacks_checkpoint():
            self.save()

    def _check(self, plan: Plan) -> None:
        count = layout_of(plan).num_layers
        if count != self.job.num_layers:
            raise SpecError(
                f"the plan splits {count} layers, the job has {self.job.num_layers}",
                key="groups.stages.layers",
                value=count, rule="A plan holds every layer of the model once per group",
                fix=f"Cut 0..{self.job.num_layers} in every group",
            )  # fmt: skip
        check_split(layout_of(plan), self.parameters, self.job.path)

    def _status(self) -> Status:
        return Status(
            step=self.step, reduced=self._reduced, vote=self._vote, told=self._told,
            last=-1 if self._last is None else self._last.step, held=self._held, kept=self._kept,
            room_bytes=self.room_bytes, loss_scale=self._scale,
        )  # fmt: skip

    def _tell_all(self, status: Status) -> dict[int, Status]:
        """Return the status of every rank of the generation."""
        if self._world is None:
            return {self.rank: status}
        store, number = self.membership.store, self._generation.number  # type: ignore[union-attr]
        store.set(f"g{number}/status/{self.rank}", status.to_json())
        return {rank: heard_status(bytes(store.get(f"g{number}/status/{rank}"))) for rank in self._ranks}

    def _roll_forward(self, met: Meeting) -> dict[int, Held]:
        """Finish a step that others have committed, and return what every rank holds then."""
        held, vote = met.held(), met.cut_off(self.rank)
        if vote is not None:
            self._finish_cut_off(vote)
        elif self.rank not in held:
            self._forget()
        return held

    def _finish_cut_off(self, vote: Vote) -> None:
        norm = self._update(vote)
        self._held = self._kept
        self.step, self._vote, self._reduced = self.step + 1, vote, False
        self._last = self._done(vote, norm, None)
        if self.ledger is not None:
            self.ledger.commit(self.step - 1, self._trained_in)

    def _tell(self, done: StepDone) -> None:
        if self._conducts:
            self.on_step(done)
            self._told = done.step

    def _tell_late(self, met: Meeting) -> None:
        """Tell the last step if who conducted it was lost before it could."""
        late = met.late_teller()
        if self._last is not None and late is not None and late[0] == self.rank:
            self.on_step(replace(self._last, time_s=None))
            self._told = late[1]

    def _forget(self) -> None:
        """Drop everything held: it is of another step than the run goes on from."""
        self.holding, self._held = (
            Holding(self.job, self.rank, self.device, self.parameters), frozenset()
        )  # fmt: skip

    def _roll_back(self, plan: Plan, missing: frozenset[int], *, resume: bool) -> None:
        """Begin again from the latest checkpoint, or from the first values where there is none."""
        step = self._latest_checkpoint()
        self._forget()
        layout = layout_of(plan)
        self.holding.build(layout)
        self.step, self._scale = 0 if step is None else step, None
        if step is not None:
            self._scale = heard_scale(self._meta_of(step).get("loss_scale"))
            self._load(step, self._wanted(layout)[self.rank])
        if self.ledger is not None:
            self.ledger.rollback(self.step, self._generation.number)  # type: ignore[union-attr]
        if step is not None or missing - frozenset(range(self.job.num_layers)) or not resume:
            text = "first values" if step is None else f"checkpoint of step {step}"
            self.on_event("restored", f"from the {text}", step=self.step, missing_layers=sorted(missing))

    def _settle(self, plan: Plan, held: Mapping[int, Held]) -> None:
        """Move what has to move and take the place that the plan gives."""
        self.phase("migration")
        layout = layout_of(plan)
        wanted = self._wanted(layout)
        moves, _ = moves_of(held, wanted, self._bytes_of)
        with self._at_work("build", layout):
            self.holding.build(layout)
        if self._world is not None:
            self.last_moved = migrate(self.holding, moves, self._world, self._ranks, self.clock)
            barrier = torch.zeros(1, dtype=torch.float64)
            self._world.allreduce([barrier]).wait()
        with self._at_work("arrange", layout):
            self._take_place(layout, wanted[self.rank])

    @contextmanager
    def _at_work(self, name: str, layout: Layout) -> Iterator[None]:
        """Count work between steps: a change of plan takes the rank's time too."""
        self.clock.begin()
        yield
        self.clock.end(name, 0, len(layout.layers_of(self.rank)))

    def _take_place(self, layout: Layout, wanted: Held) -> None:
        deal = Deal(layout, self.parameters, self._rooms)
        self._layout, self._held = layout, wanted
        scaled = layout.plan.precision == "fp16"
        self._scale = (self._scale or first_scale(layout.plan.tokens)) if scaled else None
        updated = {piece[1:] for piece in wanted if piece[0] == "state"}
        self._kept = frozenset(piece for piece in wanted if piece[0] != "value" or piece[1:] in updated)
        self.holding.arrange(layout, deal)
        self._base_lr = (
            [g["lr"] for g in self.holding.optimizer.param_groups] if self.holding.optimizer else []
        )
        self._sync = gradient_sync(
            self.options.sync, self.holding.buckets, self.membership.group, self.clock
        )  # fmt: skip
        self._shards = self._make_shards(layout, deal)
        self._meet_tensor_ranks(layout)
        self.feed = self._make_feed(layout.plan)
        self._executor = self._make_executor(layout) if self.rank in layout.seats else None

    def _make_feed(self, plan: Plan) -> Feed:
        if self.feed is not None and self.feed.global_batch == plan.global_batch:
            return self.feed
        return Feed(
            self.job.dataset, self.job.collate, global_batch=plan.global_batch, seed=self.options.seed,
            path=self.job.path,
        )  # fmt: skip

    def _make_executor(self, layout: Layout) -> Executor:
        carriers = (self._world, self._world)
        if self.device.type != "cpu" and self._world is not None:
            carriers = tuple(self.membership.group(self._ranks, name) for name in ("forward", "backward"))
        exchange = Exchange(
            self._world, carriers, self._ranks, self.rank, self.clock, fixed_shapes=self.job.fixed_shapes
        )
        return Executor(
            self.job, self.feed, layout, self.rank, self.holding.modules, exchange, self.clock,  # type: ignore[arg-type]
            device=self.device, seed=self.options.seed, on_action=self.on_action,
            on_gradients=None if self._sync is None else self._sync.passed, phase=self.phase,
            shards=self._shards, tensor=self.holding.ranks,
            windows=self.holding.draws.windows,
        )  # fmt: skip

    def _make_shards(self, layout: Layout, deal: Deal) -> Shards | None:
        if self.rank not in layout.seats or not is_dealt(layout.stage_of(self.rank)):
            return None
        stage = layout.stage_of(self.rank)
        ranks = equals_of(stage, layout.seats[self.rank].tensor)
        own = self.parameters.of(layout.layers_of(self.rank))
        return Shards(
            self.membership.group(ranks, "stage"), stage, ranks, self.rank,
            {key: deal.updater(self.rank, key) for key in own},  # type: ignore[misc]
            {key: self.holding.parameter(*key) for key in own}, self.parameters.users,
        )  # fmt: skip

    def _meet_tensor_ranks(self, layout: Layout) -> None:
        """Make the mesh of the ranks that compute this rank's samples together, if there are others."""
        self.holding.ranks.disconnect()
        if self.rank in layout.seats and layout.stage_of(self.rank).tp > 1:
            seat, stage = layout.seats[self.rank], layout.stage_of(self.rank)
            ranks = ranks_of(stage.ranks, seat.inner, stage.tp)
            group = self.membership.group(ranks, "tensor")
            self.holding.ranks.connect(group, ranks, self.rank, self.device)

    def _wanted(self, layout: Layout) -> dict[int, Held]:
        """Return what every rank that is there holds between steps under a layout."""
        deal = Deal(layout, self.parameters, self._rooms)
        return {rank: deal.pieces(rank) for rank in self._ranks}

    def _bytes_of(self, piece: Piece) -> float:
        name, _, num = parsed(piece[2])
        return self.parameters.sizes.get((piece[1], name), 1) / num

    # -- checkpoints ----------------------------------------------------------------------------------------

    def _saves(self) -> bool:
        """Return whether this step ends with a checkpoint."""
        every = self.options.checkpoint_every
        return every > 0 and self.checkpoints is not None and self.step > 0 and self.step % every == 0

    def _lacks_checkpoint(self) -> bool:
        """Return whether the checkpoint of this step was cut off, as the conducting rank sees it."""
        if not self._saves():
            return False
        lacks = torch.tensor([float(self._conducts and self._latest_checkpoint() != self.step)])
        if self._world is not None:
            self._world.allreduce([lacks]).wait()
        return bool(lacks[0] > 0)

    def save(self) -> None:
        """Write a checkpoint; every item by the least rank that holds it."""
        from foreshard.runtime import checkpoint

        self.phase("checkpoint")
        self.holding.remember()
        tensors = {
            key_of(*item): tensor
            for piece in sorted(self._first_of_mine())
            for item, tensor in self.holding.items_of(piece)
        }
        cuts = {f"{layer}.{name}": cut.to_dict() for (layer, name), cut in self.parameters.cuts.items()}
        meta = {
            "plan": self._layout.plan.to_dict(), "seed": self.options.seed, "cuts": cuts,
            "loss_scale": None if self._scale is None else self._scale.told(),
        }  # fmt: skip
        assert self.checkpoints is not None
        try:
            checkpoint.save(
                self.checkpoints, step=self.step, tensors=tensors, meta=meta, rank=self.rank,
                group=self._world,
                lead=self._conducts, before=self.ledger.flush if self.ledger is not None else lambda: None,
            )  # fmt: skip
        except checkpoint.CheckpointFault as fault:
            self.on_event("checkpoint failed", str(fault), step=self.step)
            return
        self._saved = self.step
        if self._conducts:
            prune(self.checkpoints)
            self.on_event("checkpoint", f"after step {self.step - 1}", step=self.step)

    def _first_of_mine(self) -> Held:
        """Return the pieces of which this rank is the least holder."""
        wanted = self._wanted(self._layout)
        return wanted[self.rank].difference(*(held for rank, held in wanted.items() if rank < self.rank))

    def _latest_checkpoint(self) -> int | None:
        return None if self.checkpoints is None else latest_checkpoint(self.checkpoints)

    def _meta_of(self, step: int) -> dict[str, Any]:
        from foreshard.runtime import checkpoint

        assert self.checkpoints is not None
        return checkpoint.read_meta(self.checkpoints, step)

    def _load(self, step: int, wanted: Held) -> None:
        from foreshard.runtime import checkpoint

        assert self.checkpoints is not None
        pieces = frozenset((kind, layer, parsed(name)[0]) for kind, layer, name in wanted)
        found = checkpoint.load(self.checkpoints, step, lambda key: is_wanted(key, pieces))
        for key, tensor in found.items():
            self.holding.put(item_of(key), tensor)


def _alone(plan: Plan | None) -> FixedMembership:
    if plan is None or len(plan.ranks) != 1:
        raise SpecError("no membership", key="membership", rule="A plan of several ranks needs one",
                        fix="Use foreshard run, or runtime.fixed.FixedMembership under torchrun")  # fmt: skip
    return FixedMembership(None, plan.ranks[0], plan, plan.ranks)
