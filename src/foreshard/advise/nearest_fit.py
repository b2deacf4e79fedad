"""A run that does not fit: what binds, and the changes that make it fit, the ones that cost least first.

A change must fit as probably as a plan of the planner does: one that takes all the memory may run out of it.
Tiers, each of which keeps more as it was than the next: one change of layout, several, another optimizer or
a shorter sequence, more nodes; offload is the last resort. Within a tier the fastest comes first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from foreshard import quantity
from foreshard.advise.advice import MAX_DEGREE, expert_changes, offered, partial_blocks, splits
from foreshard.advise.change import Effect, effect, rank
from foreshard.advise.request import Request, stated_degrees
from foreshard.advise.traced_request import Asked
from foreshard.catalog.offers import Offers
from foreshard.planner.nearest_change import shorter_sequences, smaller_optimizers
from foreshard.spec.plan import Group, Plan
from foreshard.spec.prediction import MEMORY_LABELS, Memory, Prediction

_MAX_NODES = 4096  # 32,768 devices in nodes of eight: above them other changes are nearer
_SAID = 3  # changes named; the nearest and what else would do
_TRAINING = 2  # the tier that is tried even where an earlier one fits: a shorter sequence is often the answer
_MILDEST_FIRST = ("seq", "nodes", "optimizer", "offload")  # of these the first that fits is the least change


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Changes that fit, nearest first (at most three), what binds, and how many were tried."""

    effects: tuple[Effect, ...]
    binding: str
    num_tried: int


def nearest_fit(request: Asked, base: Prediction) -> Fit:
    """Return the changes nearest to the request that fit; gains are against the run as if it fitted."""
    engine = request.trial_engine
    reference = base if base.engine == engine else request.predict(engine)
    trial = _Trial(request=request, reference=reference, tried=set())
    offers = offered(request, base.plan)
    found: list[Effect] = []
    for number, tier in enumerate(_tiers(request, base.plan, offers)):
        if not found:
            found += rank(trial.fitting(tier))[: _SAID - 1]
        elif number == _TRAINING:
            found += rank(trial.fitting(change for change in tier if "," not in change))[: _SAID - len(found)]
    return Fit(effects=tuple(found), binding=_binding(request, base.memory), num_tried=len(trial.tried))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trial:
    """Predicts candidates with the engine of trials and remembers which it saw."""

    request: Asked
    reference: Prediction
    tried: set[str]

    def fitting(self, changes: Iterator[str]) -> list[Effect]:
        """Return the effects of the changes that fit, one of a kind."""
        best: dict[str, Effect] = {}
        for change in changes:
            kind = change.partition("=")[0]
            if kind in best and kind in _MILDEST_FIRST:
                continue
            found = self._fitting(change)
            if found is not None and (kind not in best or (found.gain or 0) > (best[kind].gain or 0)):
                best[kind] = found
        return list(best.values())

    def _fitting(self, change: str) -> Effect | None:
        if change in self.tried:
            return None
        found = effect(self.request, self.reference, change, engine=self.reference.engine)
        if found.prediction is None:
            return None
        self.tried.add(change)
        return found if found.is_likely_to_fit() else None


def _tiers(request: Asked, plan: Plan, offers: Offers) -> Iterator[Iterator[str]]:
    """Yield the tiers of candidates, from what changes least."""
    group = plan.groups[0]
    levels = [level for level in _levels(request, group, offers) if level > group.stages[0].zero]
    savers = [*_recompute_rules(plan, offers), *_smaller_passes(plan), *(f"zero={level}" for level in levels)]
    layouts = []
    if request.plan is None:
        layouts = [*_wider(request, plan, offers)]
    yield iter([*savers, *layouts])
    strong = _strongest(request, plan, offers)
    yield iter([*_joined(strong), *(f"{layout},{','.join(strong)}" for layout in layouts if strong)])
    yield _other_training(plan, strong)
    yield _more_nodes(request, strong)
    yield _offload(plan, strong)


def _recompute_rules(plan: Plan, offers: Offers) -> Iterator[str]:
    """Yield recompute rules the framework takes, each more thorough than the present one."""
    stage = plan.groups[0].stages[0]
    if stage.recompute == "none":
        if "selective" in offers.recompute:
            yield from (f"recompute=selective:{m}" for m in ("core_attn", "mlp", "core_attn+mlp+layernorm"))
        if "every" in offers.recompute:
            yield from ("recompute=every-4", "recompute=every-2")
    if stage.recompute != "full":
        if "selective" in offers.recompute:  # Megatron's full:block:N
            yield from (f"recompute=full:block:{n}" for n in partial_blocks(plan))
        yield "recompute=full"


def _smaller_passes(plan: Plan) -> Iterator[str]:
    per_rank = plan.groups[0].micro_batch // plan.groups[0].stages[0].inner_dp
    while per_rank > 1:
        per_rank //= 2
        yield f"micro-batch={per_rank}"


def _wider(request: Asked, plan: Plan, offers: Offers) -> Iterator[str]:
    """Yield layouts that hold less per device: experts spread, then tensor, pipeline, context degrees."""
    yield from expert_changes(request, plan, offers)
    yield from splits(request, plan, offers)
    now = stated_degrees(plan)
    widest = max(node.per_node for node in request.cluster.nodes)
    for name in ("tp", "pp", "cp"):
        factor, most = 4, widest if name == "tp" else MAX_DEGREE
        while name in offers.degrees and now["dp"] % factor == 0 and now[name] * factor <= most:
            yield f"{name}={now[name] * factor},dp={now['dp'] // factor}"
            factor *= 2


def _levels(request: Asked, group: Group, offers: Offers) -> tuple[int, ...]:
    """Return the levels of sharding of the framework, and of the one that flags switch to at the highest."""
    more = (3,) if request.plan is None and offers.sharded_by and len(group.stages) == 1 else ()
    return (*offers.levels(len(group.stages)), *more)


def _strongest(request: Asked, plan: Plan, offers: Offers) -> list[str]:
    """Return the changes that save most memory together without other degrees."""
    group, stage = plan.groups[0], plan.groups[0].stages[0]
    strong = [] if stage.recompute == "full" else ["recompute=full"]
    if group.micro_batch > stage.inner_dp:
        strong.append("micro-batch=1")
    if (highest := max(_levels(request, group, offers), default=0)) > stage.zero:
        strong.append(f"zero={highest}")
    return strong


def _joined(changes: list[str]) -> Iterator[str]:
    """Yield the changes two by two, then all together."""
    for i, change in enumerate(changes):
        yield from (f"{change},{other}" for other in changes[i + 1 :])
    if len(changes) > 2:
        yield ",".join(changes)


def _other_training(plan: Plan, strong: list[str]) -> Iterator[str]:
    """Yield what trains otherwise: smaller optimizers, then halved sequences, alone and with savers."""
    together = f",{','.join(strong)}" if strong else ""
    for name in smaller_optimizers(plan.optimizer):
        yield f"optimizer={name}"
        yield f"optimizer={name}{together}"
    shorter = list(shorter_sequences(plan.seq_len))
    yield from (f"seq={seq_len}" for seq_len in shorter)
    yield from (f"seq={seq_len}{together}" for seq_len in shorter)


def _more_nodes(request: Asked, strong: list[str]) -> Iterator[str]:
    """Yield twice, four times, ... the nodes, data parallel; then with everything that saves memory."""
    if len(request.cluster.nodes) != 1 or request.plan is not None:
        return
    num_nodes = request.cluster.nodes[0].count
    while num_nodes * 2 <= _MAX_NODES:
        num_nodes *= 2
        yield f"nodes={num_nodes}"
        if strong:
            yield ",".join([f"nodes={num_nodes}", *strong])


def _offload(plan: Plan, strong: list[str]) -> Iterator[str]:
    if any(stage.offload == "none" for group in plan.groups for stage in group.stages):
        yield "offload=optimizer"
        yield "offload=all"
        if strong:
            yield ",".join(["offload=all", *strong])


def _binding(request: Asked, memory: Memory) -> str:
    """Return the largest part of the peak in words, with the sequence where that makes it."""
    part = max(memory.breakdown_bytes, key=lambda name: memory.breakdown_bytes[name])
    text = f"{MEMORY_LABELS[part]} take {quantity.gib(memory.breakdown_bytes[part])} GiB"
    unstated = request.plan is None and request.choices.get("seq_len") is None
    if part == "activations" and unstated and isinstance(request, Request):
        text += (
            f" at sequence {request.model.max_seq_len}, which was not stated and is that of the model (--seq)"
        )
    return text


def verdict(prediction: Prediction, fit: Fit) -> str:
    """Return by how much, on which rank, what binds, and the changes that fit with what they cost."""
    memory = prediction.memory
    over = quantity.gib(memory.peak_bytes - memory.capacity_bytes)
    text = (
        f"does not fit: rank {memory.peak_rank} needs {quantity.gib(memory.peak_bytes)} GiB, "
        f"{over} GiB more than its {quantity.gib(memory.capacity_bytes)} GiB; {fit.binding}. "
    )
    if not fit.effects:
        return (
            f"{text}None of {fit.num_tried} changes tried fits (recompute, micro-batch, sharding, degrees, "
            "optimizer, sequence, nodes, offload)."
        )
    nearest, *others = (_priced(found, prediction) for found in fit.effects)
    also = f" Also: {'; '.join(others)}." if others else ""
    return f"{text}Nearest change that fits: {nearest}.{also}"


def _priced(found: Effect, base: Prediction) -> str:
    """Return a change with its peak and its speed against the run as asked, if that fitted."""
    assert found.prediction is not None and found.gain is not None
    peak = quantity.gib(found.prediction.memory.peak_bytes)
    more = len(found.prediction.plan.ranks) / len(base.plan.ranks)
    gain = (1 + found.gain) / more - 1
    side = "faster" if gain >= 0 else "slower"
    cost = f"{abs(100 * gain):.1f} % {side}" + (" per device" if more != 1 else "")
    if "offload" in found.change:
        cost += ", the transfers not counted"
    return f"{found.change} (peak {peak} GiB, {cost})"
