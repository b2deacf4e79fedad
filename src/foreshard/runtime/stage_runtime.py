"""The connections of a rank under one plan: gradient groups, ZeRO and tensor-parallel peers, its executor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from foreshard.profile.batches import as_tuple, loss_input, moved
from foreshard.runtime.engine.bucket_sums import BucketSums
from foreshard.runtime.engine.exchange import Channel, Exchange, channels_of, header_of, parse_header
from foreshard.runtime.engine.executor import Executor, StepSums
from foreshard.runtime.engine.gradient_sync import GradientSync
from foreshard.runtime.job.data import Feed
from foreshard.runtime.job.user_code import in_file
from foreshard.runtime.membership.peer_group import PeerGroup
from foreshard.runtime.membership.world_group import WorldGroup
from foreshard.runtime.stage_messages import StageMessageSchedules
from foreshard.runtime.state.layout import RankLayout, ranks_of, shares_updates
from foreshard.runtime.state.optimizer_sharding import OptimizerSharding, shard_peers
from foreshard.runtime.state.rank_state import RankState
from foreshard.runtime.state.zero import ZeroExchange
from foreshard.runtime.trainer_context import TrainerContext
from foreshard.spec.plan import Plan


class StageRuntime:
    """A rank at its place in a layout, connected to its peers, with its state arranged for the layout.

    All ranks make theirs at the same time: they ask for process groups in one order. The samples that the
    feed of the plan before has read ahead stay useful.
    """

    def __init__(
        self,
        context: TrainerContext,
        world: WorldGroup,
        layout: RankLayout,
        sharding: OptimizerSharding,
        state: RankState,
        sums: BucketSums,
        messages: StageMessageSchedules,
        feed: Feed | None = None,
    ):
        self.context, self.layout, self._state = context, layout, state
        self._schedule_for = messages.connect(
            layout.plan, on_devices=context.membership.owns_devices(), says=world.rank == min(world.ranks)
        )
        self._sync = GradientSync(
            state.buckets,
            context.membership.group,
            context.clock,
            sums.connect,
            overlap=layout.plan.comm.get("grad_overlap", True),
        )
        self._zero = self._make_zero(world.rank, sharding)
        self._connect_tensor_ranks(world.rank)
        self.feed = self._make_feed(layout.plan, feed)
        self._executor = self._make_executor(world) if world.rank in layout.seats else None

    @property
    def is_idle(self) -> bool:
        """Whether the plan leaves the rank out."""
        return self._executor is None

    def train(self, step: int, loss_scale: float) -> StepSums:
        """Run this rank's part of a step, and sum its gradients over all ranks that share them."""
        self._state.zero_gradients()
        self._sync.begin()
        sums = StepSums()
        if self._executor is not None:
            self._executor.loss_scale = loss_scale
            with in_file(self.context.job.path), self.context.within_memory(self._state):
                sums = self._executor.run(step)
        self.context.phase("all-reduce")
        self._sync.finish()
        if self._executor is not None:
            self._executor.await_device()
        return sums

    def trained_in(self, step: int) -> list[range] | None:
        """Return the positions whose loss this rank computes; None if it is idle."""
        return None if self._executor is None else self._executor.trained_in(step)

    def after_update(self) -> None:
        """Get the parameters that other ranks of the stage have updated; until then they are not held."""
        if self._zero is None:
            return
        state = self._state
        whole, state.held = state.held, state.kept
        self._zero.after_update()
        state.held = whole

    def evaluate(self, step: int) -> Mapping[str, float] | None:
        """Evaluate on the first pipeline; return what the job gives on its lowest rank, None on others.

        Raises
        ------
        PeerLost
        """
        executor, evaluate = self._executor, self.context.job.evaluate
        if executor is None or executor.seat.group or evaluate is None:
            return None
        ranks = tuple(sorted(rank for stage in executor.group.stages for rank in stage.ranks))
        group = self.context.membership.group(ranks, "evaluation") if len(ranks) > 1 else None
        parts = [part for module in self._state.modules.values() for part in module.modules()]
        modes = [part.training for part in parts]
        try:
            for part in parts:
                part.training = False
            with self.feed.paused(step):
                found = evaluate(WholeModel(executor, group), step)
        finally:
            for part, mode in zip(parts, modes, strict=True):
                part.training = mode
        return found if executor.rank == ranks[0] else None

    def release(self) -> None:
        """Let go of all process groups."""
        self._sync.release()
        if self._executor is not None:
            self._executor.release()
        self._state.ranks.disconnect()

    def _make_feed(self, plan: Plan, feed: Feed | None) -> Feed:
        if feed is not None and feed.global_batch == plan.global_batch:
            return feed
        job, seed = self.context.job, self.context.options.seed
        return Feed(
            job.dataset,
            job.collate,
            global_batch=plan.global_batch,
            seed=seed,
            path=job.path,
            readers=self.context.readers,
        )

    def _make_executor(self, world: WorldGroup) -> Executor:
        context = self.context
        exchange = Exchange(
            world.group,
            self._make_channels(world.rank) if context.membership.owns_devices() else None,
            world.ranks,
            world.rank,
            context.clock,
            fixed_shapes=context.job.fixed_shapes,
            schedule_for=self._schedule_for,
        )
        return Executor(
            context,
            self.layout,
            self._state,
            self.feed,
            exchange,
            zero=self._zero,
            sync=self._sync,
        )

    def _make_channels(self, rank: int) -> dict[Channel, PeerGroup]:
        """Return the groups of this rank, asked for in one order by all ranks."""
        make_group = self.context.membership.group
        return {
            (source, target, backward): make_group(
                (min(source, target), max(source, target)),
                f"{'backward' if backward else 'forward'}-{source}",
            )
            for source, target, backward in channels_of(self.layout)
            if rank in (source, target)
        }

    def _make_zero(self, rank: int, sharding: OptimizerSharding) -> ZeroExchange | None:
        layout, state = self.layout, self._state
        if rank not in layout.seats or not shares_updates(layout.stage_of(rank)):
            return None
        stage = layout.stage_of(rank)
        ranks = shard_peers(stage, layout.seats[rank].tensor)
        own = state.parameters.of(layout.layers_of(rank))
        return ZeroExchange(
            self.context.membership.group(ranks, "stage"),
            stage,
            ranks,
            rank,
            {key: updater for key in own if (updater := sharding.updater(rank, key)) is not None},
            {key: state.parameter(*key) for key in own},
            state.parameters.users,
        )

    def _connect_tensor_ranks(self, rank: int) -> None:
        """Make the device mesh of the ranks that compute this rank's samples together, if there are any."""
        layout, connections = self.layout, self._state.ranks
        connections.disconnect()
        if rank in layout.seats and layout.stage_of(rank).tp > 1:
            seat, stage = layout.seats[rank], layout.stage_of(rank)
            ranks = ranks_of(stage.ranks, seat.inner, stage.tp)
            connections.connect(self.context.membership.group(ranks, "tensor"), self.context.device)


class WholeModel:
    """Gives outputs of the last layer for inputs of the first, in evaluation mode and without gradients.

    All ranks of the pipeline call it with the same inputs, in one order. Each computes its own layers. What a
    stage gives goes to all ranks through host memory (`group`): evaluation is rare, and each of them needs
    the outputs.
    """

    def __init__(self, executor: Executor, group: Any):
        self._executor, self._group = executor, group

    def __call__(self, *inputs: Any) -> Any:
        """Return what `loss` takes as its output, for what `inputs(batch)` gives."""
        executor = self._executor
        given = as_tuple(inputs[0] if len(inputs) == 1 else inputs)
        values = [moved(value, executor.device) for value in given]
        stages = executor.group.stages
        for virtual in range(executor.num_virtual):
            chunk, place = divmod(virtual, len(stages))
            if place == executor.seat.stage:
                values = executor.infer(chunk, values)
            if self._group is not None:
                values = self._shown(values, stages[place].ranks[0])
        return loss_input(values, executor.layout.plan.precision)

    def _shown(self, values: list[Tensor], source: int) -> list[Tensor]:
        """Return the tensors that a rank has, on all ranks."""
        mine = source == self._executor.rank
        shapes = tuple((value.dtype, tuple(value.shape)) for value in values) if mine else ()
        header = header_of(shapes, 0.0)
        place = self._group.ranks.index(source)
        self._group.broadcast(header, place).wait()
        found = []
        for number, (dtype, shape) in enumerate(parse_header(header)[0]):
            whole = values[number].cpu().contiguous() if mine else torch.empty(shape, dtype=dtype)
            sent = whole.view(torch.uint8) if dtype is torch.bool else whole
            self._group.broadcast(sent, place).wait()
            found.append(whole.to(self._executor.device))
        return found
