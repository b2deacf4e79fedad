"""When a rank writes its part of a checkpoint, which tensors, and how training restarts from one."""

from __future__ import annotations

from foreshard.runtime.checkpoint.folders import latest, prune
from foreshard.runtime.engine.loss_scale import LossScale, parse_scale
from foreshard.runtime.membership.world_group import WorldGroup
from foreshard.runtime.state.rank_state import RankState
from foreshard.runtime.state.shard_keys import Shards, TensorKey
from foreshard.runtime.state.slices import parse_name
from foreshard.runtime.trainer_context import TrainerContext
from foreshard.spec.plan import Plan

_FOLDERS = {"value": "layers", "frozen": "frozen", "buffer": "buffers"}


class Checkpoints:
    """The checkpoints of a run."""

    def __init__(self, context: TrainerContext):
        self._context, self._folder = context, context.checkpoints
        self._saved = -1

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint is to be written before this step, and has not been."""
        return self._belongs_before(step) and self._saved != step

    def _belongs_before(self, step: int) -> bool:
        every = self._context.options.checkpoint_every
        return every > 0 and self._folder is not None and step > 0 and step % every == 0

    def is_lacking(self, world: WorldGroup, step: int) -> bool:
        """Return whether the checkpoint before this step was cut off, as the leader sees it."""
        return self._belongs_before(step) and world.any(world.leads and self.latest() != step)

    def latest(self) -> int | None:
        """Return the step of the newest checkpoint; None where there is none."""
        return None if self._folder is None else latest(self._folder)

    def save(
        self,
        world: WorldGroup,
        state: RankState,
        mine: Shards,
        *,
        plan: Plan,
        step: int,
        scale: LossScale | None,
    ) -> None:
        """Write a checkpoint together with all ranks.

        Parameters
        ----------
        world : WorldGroup
        state : RankState
        mine : frozenset of shards
            That this rank writes; every shard is written by one rank.
        plan : Plan
        step : int
            That is trained next.
        scale : LossScale or None
        """
        from foreshard.runtime.checkpoint import format

        context = self._context
        context.phase("checkpoint")
        state.keep_optimizer_state()
        tensors = {
            tensor_name(*key): tensor for shard in sorted(mine) for key, tensor in state.tensors_of(shard)
        }
        cuts = {f"{layer}.{name}": cut.to_dict() for (layer, name), cut in state.parameters.cuts.items()}
        meta = {
            "plan": plan.to_dict(),
            "seed": context.options.seed,
            "cuts": cuts,
            "loss_scale": None if scale is None else scale.to_json(),
        }
        assert self._folder is not None
        try:
            format.save(
                self._folder,
                step=step,
                tensors=tensors,
                meta=meta,
                rank=world.rank,
                group=world.group,
                lead=world.leads,
                before=context.ledger.flush if context.ledger is not None else lambda: None,
            )
        except format.CheckpointFault as fault:
            context.on_event("checkpoint failed", str(fault), step=step)
            return
        self._saved = step
        if world.leads:
            prune(self._folder)
            context.on_event("checkpoint", f"after step {step - 1}", step=step)

    def restore(self, step: int, state: RankState, shards: Shards) -> LossScale | None:
        """Fill the shards of a rank from the checkpoint of a step; return its factor on the loss."""
        from foreshard.runtime.checkpoint import format

        assert self._folder is not None
        scale = parse_scale(format.read_meta(self._folder, step).get("loss_scale"))
        whole = frozenset((kind, layer, parse_name(name)[0]) for kind, layer, name in shards)
        for name, tensor in format.load(self._folder, step, lambda name: _is_in(name, whole)).items():
            state.put(tensor_key(name), tensor)
        return scale


def tensor_name(kind: str, layer: int, name: str) -> str:
    """Return the name of a tensor in a checkpoint.

    Examples
    --------
    >>> tensor_name("value", 3, "up.weight@1/4"), tensor_name("state", 3, "up.weight/step")
    ('layers.3.up.weight@1/4', 'optimizer.3.up.weight.step')
    """
    if kind == "state":
        owner, _, entry = name.rpartition("/")
        return f"optimizer.{layer}.{owner}.{entry}"
    return f"{_FOLDERS[kind]}.{layer}.{name}"


def tensor_key(name: str) -> TensorKey:
    """Return the key of a tensor by its name in a checkpoint."""
    folder, layer, rest = name.split(".", 2)
    if folder == "optimizer":
        owner, _, entry = rest.rpartition(".")
        return "state", int(layer), f"{owner}/{entry}"
    return next(kind for kind, known in _FOLDERS.items() if known == folder), int(layer), rest


def _is_in(name: str, shards: Shards) -> bool:
    """Return whether a tensor belongs to one of the shards, each named as a whole."""
    kind, layer, rest = tensor_key(name)
    if kind == "state":
        return ("state", layer, rest.rpartition("/")[0]) in shards
    return ((kind, layer, rest) if kind == "value" else ("frame", layer, "")) in shards
