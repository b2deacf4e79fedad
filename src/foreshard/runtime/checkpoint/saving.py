"""When a rank writes its part of a checkpoint, which tensors, and how training restarts from one."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from typing import Any

from foreshard.errors import ForeshardError, SpecError
from foreshard.runtime.checkpoint.folders import latest, prune, steps_in
from foreshard.runtime.checkpoint.format import Attempt, CheckpointFault, damage_of, load, read_meta
from foreshard.runtime.engine.loss_scale import LossScale, parse_scale
from foreshard.runtime.engine.vote import Vote
from foreshard.runtime.job.data import size_of
from foreshard.runtime.membership.world_group import WorldGroup
from foreshard.runtime.state.rank_state import RankState
from foreshard.runtime.state.shard_keys import Shards, TensorKey
from foreshard.runtime.state.slices import parse_name
from foreshard.runtime.trainer_context import TrainerContext
from foreshard.spec.plan import Plan

_RETRY_S = 2.0
"""Least time between attempts to write a checkpoint that has failed."""
_LAST_S = 60.0
"""How long a finished run tries to write its last checkpoint."""
_FOLDERS = {"value": "layers", "frozen": "frozen", "buffer": "buffers"}


class Checkpoints:
    """The checkpoints of a run."""

    def __init__(self, context: TrainerContext):
        self._context, self._folder = context, context.checkpoints
        self._saved = -1
        self._fault: CheckpointFault | None = None
        self._retry_at_s = 0.0
        self._bad: set[int] = set()
        self._attempt: Attempt | None = None
        self._is_open = False

    def is_due(self, step: int, vote: Vote) -> bool:
        """Return whether a checkpoint is to be written before this step, and has not been."""
        stops = vote.stops and self._context.options.save_at is not None
        return (self._belongs_before(step) or vote.saves or stops) and self._saved != step

    def _belongs_before(self, step: int) -> bool:
        every, last = self._context.options.checkpoint_every, self._context.options.save_at
        periodic = every > 0 and step > 0 and step % every == 0
        return self._folder is not None and (periodic or step == last)

    def is_lacking(self, world: WorldGroup, step: int) -> bool:
        """Return whether the checkpoint before this step was cut off, as the leader sees it."""
        if self._folder is None or not self._belongs_before(step):
            return False
        return world.any(world.leads and latest(self._folder) != step)

    def may_retry(self) -> bool:
        """Return whether a checkpoint has failed and is worth another attempt: there is room for it."""
        if self._fault is None or self._folder is None or time.monotonic() < self._retry_at_s:
            return False
        self._retry_at_s = time.monotonic() + _RETRY_S
        return shutil.disk_usage(self._folder.parent).free > self._fault.needed_bytes

    def sound_step(self, world: WorldGroup) -> int | None:
        """Return the step of the newest checkpoint whose files are as they were written, or None.

        That all of several are damaged is an error.
        """
        damaged = ""
        while True:
            steps = [] if self._folder is None else [s for s in steps_in(self._folder) if s not in self._bad]
            step = round(world.of_leader(steps[0] if steps else -1.0))
            if step < 0 and damaged:
                what = f"every checkpoint is damaged: {damaged}"
                rule = "A run continues from a checkpoint whose files are as they were written"
                fix = "Put back a copy, or remove the folder to begin again"
                raise SpecError(what, file=str(self._folder), key="checkpoint", rule=rule, fix=fix)
            if step < 0 or self._folder is None:
                return None
            place = world.ranks.index(world.rank)
            found = damage_of(self._folder, step, place=place, size=len(world.ranks))
            if not world.any(found is not None):
                return step
            damaged = found or damaged or f"step {step}"
            self._bad.add(step)
            if found is not None:
                self._context.on_event("checkpoint damaged", f"{found}; the one before is used", step=step)

    def save(
        self,
        world: WorldGroup,
        state: RankState,
        mine: Shards,
        *,
        plan: Plan,
        step: int,
        scale: LossScale | None,
        behind: bool = False,
    ) -> None:
        """Write a checkpoint before a step together with all ranks; this one writes the shards `mine`.

        Training goes on `behind` it from a copy; `complete` ends it then.
        """
        context = self._context
        context.phase("checkpoint")
        self.complete(world)
        state.keep_optimizer_state()
        pairs = [pair for shard in sorted(mine) for pair in state.tensors_of(shard)]
        cuts = {f"{layer}.{name}": cut.to_dict() for (layer, name), cut in state.parameters.cuts.items()}
        meta = {
            "plan": plan.to_dict(),
            "seed": context.options.seed,
            "samples": size_of(context.job.dataset, context.job.path),
            "names": [[*key, name] for key, name in context.job.names.items()],
            "config": context.job.config,
            "tied": context.job.tied,
            "cuts": cuts,
            "loss_scale": None if scale is None else scale.to_json(),
        }
        assert self._folder is not None
        if self._attempt is not None:
            self._attempt.wait()  # it was dropped, and writes files of the same names
        self._attempt = Attempt(
            self._folder,
            step=step,
            tensors={tensor_name(*key): tensor for key, tensor in pairs},
            meta=meta,
            rank=world.rank,
            group=world.group,
            lead=world.leads,
        )
        self._is_open = True
        before = context.ledger.flush if context.ledger is not None else lambda: None
        self._attempt.write(before, behind=behind)
        if not behind:
            self.complete(world)

    @property
    def is_written(self) -> bool:
        """Whether this rank has written a checkpoint that is to be completed."""
        return self._is_open and self._attempt is not None and self._attempt.is_written

    def drop(self) -> None:
        """Give up a checkpoint that is under way: ranks that write it are gone."""
        self._is_open = False

    def complete(self, world: WorldGroup) -> None:
        """Complete a checkpoint that is under way, together with all ranks."""
        context, attempt = self._context, self._attempt
        if attempt is None or not self._is_open or self._folder is None:
            return
        step, self._is_open = attempt.step, False
        try:
            attempt.finish()
        except CheckpointFault as fault:
            self._fault, self._retry_at_s = fault, time.monotonic() + _RETRY_S
            if world.leads:
                text = f"checkpoint failed: {fault}; it is tried again when there is room"
                context.on_event("checkpoint failed", text, step=step)
            return
        finally:
            self._attempt = None
        late, self._fault, self._saved = self._fault is not None, None, step
        self._bad.discard(step)
        if world.leads:
            prune(self._folder, context.options.keep)
            context.on_event("checkpoint", f"after step {step - 1}", step=step)
            if late:
                text = f"the checkpoint of step {step} is written"
                context.on_event("checkpoint saved at last", text, step=step)

    def save_last(self, world: WorldGroup, step: int, save: Callable[[], None]) -> None:
        """Save until the last checkpoint is written; that it cannot be for a while is an error."""
        self.complete(world)
        until_s = time.monotonic() + _LAST_S
        while self._folder is not None and self._fault is not None and self._saved != step:
            if world.any(world.leads and time.monotonic() > until_s):
                raise ForeshardError(
                    f"the last checkpoint is not written: {self._fault}",
                    file=str(self._folder),
                    rule="A run ends when what it has trained is on disk",
                    fix="Free space and start again with --resume: it continues from the checkpoint before",
                )
            time.sleep(_RETRY_S / 4)
            save()

    def restore(self, step: int, state: RankState, shards: Shards, plan: Plan) -> LossScale | None:
        """Fill the shards of a rank from the checkpoint of a step; return its factor on the loss.

        It has to be of the same samples.
        """
        assert self._folder is not None
        context, meta = self._context, read_meta(self._folder, step)
        size = size_of(context.job.dataset, context.job.path)
        check_same_samples(meta, plan.global_batch, context.options.seed, size, file=str(self._folder))
        scale = parse_scale(meta.get("loss_scale"))
        whole = frozenset((kind, layer, parse_name(name)[0]) for kind, layer, name in shards)
        for name, tensor in load(self._folder, step, lambda name: _is_in(name, whole)).items():
            state.put(tensor_key(name), tensor)
        return scale


def check_same_samples(
    meta: Mapping[str, Any], global_batch: int, seed: int, size: int | None, *, file: str
) -> None:
    """Check that a run goes on with the samples of its checkpoint: step t has the same in both."""
    facts = [
        ("--plan", "global batch", meta["plan"]["global_batch"], global_batch),
        ("--seed", "seed", meta["seed"], seed),
        ("dataset", "dataset length", meta.get("samples"), size),
    ]
    for key, name, before, now in facts:
        if before is not None and now is not None and before != now:
            raise SpecError(
                f"the checkpoint was made with {name} {before}, this run has {now}",
                file=file,
                key=key,
                value=now,
                rule="A run that is resumed trains each of its samples once",
                fix=f"Give {name} {before}, or begin another run with --out",
            )


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
