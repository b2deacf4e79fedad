"""When a rank writes its part of a checkpoint, what of it, and how it goes on from one."""

from __future__ import annotations

from typing import Any

from foreshard.runtime.checkpoint.folders import latest, prune
from foreshard.runtime.checkpoint.keys import is_wanted, item_of, key_of
from foreshard.runtime.engine.loss_scale import LossScale, heard_scale
from foreshard.runtime.membership.world_group import WorldGroup
from foreshard.runtime.state.rank_state import RankState
from foreshard.runtime.state.shard_keys import Held
from foreshard.runtime.state.slices import parsed
from foreshard.runtime.trainer_context import TrainerContext
from foreshard.spec.plan import Plan


class Saving:
    """The checkpoints of a run.

    Parameters
    ----------
    setting : TrainerContext
    """

    def __init__(self, setting: TrainerContext):
        self._setting, self._folder = setting, setting.checkpoints
        self._saved = -1

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint is made before this step, and has not been."""
        return self._ends_with_one(step) and self._saved != step

    def _ends_with_one(self, step: int) -> bool:
        every = self._setting.options.checkpoint_every
        return every > 0 and self._folder is not None and step > 0 and step % every == 0

    def is_lacking(self, company: WorldGroup, step: int) -> bool:
        """Return whether the checkpoint of this step was cut off, as the conducting rank sees it."""
        return self._ends_with_one(step) and company.any(company.conducts and self.latest() != step)

    def latest(self) -> int | None:
        """Return the step of the newest checkpoint; None where there is none."""
        return None if self._folder is None else latest(self._folder)

    def save(
        self,
        company: WorldGroup,
        holding: RankState,
        mine: Held,
        *,
        plan: Plan,
        step: int,
        scale: LossScale | None,
    ) -> None:
        """Write a checkpoint together with all ranks.

        Parameters
        ----------
        company : WorldGroup
        holding : RankState
        mine : frozenset of pieces
            What this rank writes; every piece is one rank's.
        plan : Plan
        step : int
            That is trained next.
        scale : LossScale or None
        """
        from foreshard.runtime.checkpoint import format

        setting = self._setting
        setting.phase("checkpoint")
        holding.remember()
        tensors = {
            key_of(*item): tensor for piece in sorted(mine) for item, tensor in holding.items_of(piece)
        }
        assert self._folder is not None
        try:
            format.save(
                self._folder,
                step=step,
                tensors=tensors,
                meta=self._meta(holding, plan, scale),
                rank=company.rank,
                group=company.world,
                lead=company.conducts,
                before=setting.ledger.flush if setting.ledger is not None else lambda: None,
            )
        except format.CheckpointFault as fault:
            setting.on_event("checkpoint failed", str(fault), step=step)
            return
        self._saved = step
        if company.conducts:
            prune(self._folder)
            setting.on_event("checkpoint", f"after step {step - 1}", step=step)

    def _meta(self, holding: RankState, plan: Plan, scale: LossScale | None) -> dict[str, Any]:
        cuts = {f"{layer}.{name}": cut.to_dict() for (layer, name), cut in holding.parameters.cuts.items()}
        return {
            "plan": plan.to_dict(),
            "seed": self._setting.options.seed,
            "cuts": cuts,
            "loss_scale": None if scale is None else scale.told(),
        }

    def restore(self, step: int, holding: RankState, wanted: Held) -> LossScale | None:
        """Fill what is held from the checkpoint of a step; return its factor on the loss."""
        from foreshard.runtime.checkpoint import format

        assert self._folder is not None
        scale = heard_scale(format.read_meta(self._folder, step).get("loss_scale"))
        pieces = frozenset((kind, layer, parsed(name)[0]) for kind, layer, name in wanted)
        found = format.load(self._folder, step, lambda key: is_wanted(key, pieces))
        for key, tensor in found.items():
            holding.put(item_of(key), tensor)
        return scale
