"""What a rank works with under a plan: who sums its gradients, who shares its weights, what runs its part."""

from __future__ import annotations

from foreshard.runtime.engine.exchange import Exchange
from foreshard.runtime.engine.executor import Executor, StepSums
from foreshard.runtime.engine.gradient_sync import GradientSync, gradient_sync
from foreshard.runtime.job.data import Feed
from foreshard.runtime.job.user_code import in_file
from foreshard.runtime.membership.world_group import WorldGroup
from foreshard.runtime.state.layout import RankLayout
from foreshard.runtime.state.optimizer_sharding import OptimizerSharding, equals_of, is_dealt
from foreshard.runtime.state.rank_state import RankState
from foreshard.runtime.state.zero import Shards
from foreshard.runtime.tensor.ranks import ranks_of
from foreshard.runtime.trainer_context import TrainerContext
from foreshard.spec.plan import Plan


class StageRuntime:
    """A rank's place in a layout, with all it is connected to.

    All ranks make theirs at once: they ask for process groups in one order.

    Parameters
    ----------
    setting : TrainerContext
    company : WorldGroup
    layout : RankLayout
    deal : OptimizerSharding
    holding : RankState
        Arranged for the layout.
    feed : Feed, optional
        Of the place before: what it has read ahead is kept.
    """

    def __init__(
        self,
        setting: TrainerContext,
        company: WorldGroup,
        layout: RankLayout,
        deal: OptimizerSharding,
        holding: RankState,
        feed: Feed | None = None,
    ):
        self.setting, self.layout, self._holding = setting, layout, holding
        self._sync: GradientSync = gradient_sync(
            setting.options.sync, holding.buckets, setting.membership.group, setting.clock
        )
        self._shards = self._make_shards(company.rank, deal)
        self._meet_tensor_ranks(company.rank)
        self.feed = self._make_feed(layout.plan, feed)
        self._executor = self._make_executor(company) if company.rank in layout.seats else None

    @property
    def is_idle(self) -> bool:
        """Whether the plan leaves the rank out."""
        return self._executor is None

    def train(self, step: int, loss_factor: float) -> StepSums:
        """Run this rank's part of a step; its gradients are summed over all who have a part in them.

        Raises
        ------
        RuntimeError
            From torch.distributed, when a peer is gone.
        """
        self._holding.zero_gradients()
        self._sync.begin()
        sums = StepSums()
        if self._executor is not None:
            self._executor.loss_scale = loss_factor
            with in_file(self.setting.job.path):
                sums = self._executor.run(step)
        self.setting.phase("all-reduce")
        self._sync.finish()
        return sums

    def trained_in(self, step: int) -> list[range] | None:
        """Return the positions whose loss this rank answers for; None if it is idle."""
        return None if self._executor is None else self._executor.trained_in(step)

    def spread(self) -> None:
        """Get the parameters that other ranks of the stage have updated.

        Until then this rank does not have them.
        """
        if self._shards is None:
            return
        holding = self._holding
        whole, holding.held = holding.held, holding.kept
        self._shards.updated()
        holding.held = whole

    def release(self) -> None:
        """Let go of all process groups."""
        if self._executor is not None:
            self._executor.release()
        self._holding.ranks.disconnect()

    def _make_feed(self, plan: Plan, feed: Feed | None) -> Feed:
        if feed is not None and feed.global_batch == plan.global_batch:
            return feed
        job = self.setting.job
        return Feed(
            job.dataset,
            job.collate,
            global_batch=plan.global_batch,
            seed=self.setting.options.seed,
            path=job.path,
        )

    def _make_executor(self, company: WorldGroup) -> Executor:
        setting, holding = self.setting, self._holding
        carriers = (company.world, company.world)
        if setting.device.type != "cpu" and company.world is not None:
            carriers = tuple(setting.membership.group(company.ranks, n) for n in ("forward", "backward"))
        exchange = Exchange(
            company.world,
            carriers,
            company.ranks,
            company.rank,
            setting.clock,
            fixed_shapes=setting.job.fixed_shapes,
        )
        return Executor(
            setting.job,
            self.feed,
            self.layout,
            company.rank,
            holding.modules,
            exchange,
            setting.clock,
            device=setting.device,
            seed=setting.options.seed,
            on_action=setting.on_action,
            on_gradients=self._sync.passed,
            phase=setting.phase,
            shards=self._shards,
            tensor=holding.ranks,
            windows=holding.draws.windows,
        )

    def _make_shards(self, rank: int, deal: OptimizerSharding) -> Shards | None:
        layout, holding = self.layout, self._holding
        if rank not in layout.seats or not is_dealt(layout.stage_of(rank)):
            return None
        stage = layout.stage_of(rank)
        ranks = equals_of(stage, layout.seats[rank].tensor)
        own = holding.parameters.of(layout.layers_of(rank))
        return Shards(
            self.setting.membership.group(ranks, "stage"),
            stage,
            ranks,
            rank,
            {key: deal.updater(rank, key) for key in own},  # type: ignore[misc]
            {key: holding.parameter(*key) for key in own},
            holding.parameters.users,
        )

    def _meet_tensor_ranks(self, rank: int) -> None:
        """Make the mesh of the ranks that compute this rank's samples together, if there are others."""
        layout, connections = self.layout, self._holding.ranks
        connections.disconnect()
        if rank in layout.seats and layout.stage_of(rank).tp > 1:
            seat, stage = layout.seats[rank], layout.stage_of(rank)
            ranks = ranks_of(stage.ranks, seat.inner, stage.tp)
            group = self.setting.membership.group(ranks, "tensor")
            connections.connect(group, ranks, rank, self.setting.device)
