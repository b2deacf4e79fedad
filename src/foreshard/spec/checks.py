"""Rules that join a plan with its model and cluster: one function per rule, whose docstring errors state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from foreshard.errors import SpecError
from foreshard.spec.block import Block
from foreshard.spec.cluster import Cluster
from foreshard.spec.codec import one_of, whole
from foreshard.spec.degrees import divisors
from foreshard.spec.model import Model
from foreshard.spec.plan import (
    OFFLOADS,
    OPTIMIZERS,
    PRECISIONS,
    SCHEDULES,
    TURNING,
    Group,
    Plan,
    Stage,
    check_recompute,
)
from foreshard.units import number_of


def check_plan(plan: Plan, model: Model, cluster: Cluster, *, file: str | None = None) -> None:
    """Raise SpecError at the first rule that the plan breaks on this model and cluster.

    `file` is where the plan was read: the error names the key in it, else the flag.
    """
    _check(_OF_PLAN, _Case(plan=plan, model=model, cluster=cluster, file=file))


def check_cut(plan: Plan, model: Model, *, file: str | None = None) -> None:
    """Raise SpecError where the plan does not cut this model, whatever the cluster."""
    _check(_OF_CUT, _Case(plan=plan, model=model, cluster=Cluster(name="", nodes=()), file=file))


def check_structure(plan: Plan, *, file: str | None = None) -> None:
    """Raise SpecError at the first rule that the plan breaks whatever the model and cluster are."""
    _check(_OF_STRUCTURE, _PlanCase(plan=plan, file=file))


class Violation(NamedTuple):
    """A rule that a plan breaks; `rule` is its wording where that names values."""

    key: str
    value: object
    what: str
    fix: str
    rule: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _PlanCase:
    """A plan, and how to name what breaks a rule."""

    plan: Plan
    file: str | None

    def stages(self) -> Iterator[tuple[str, Group, Stage]]:
        """Yield every stage with its key in the plan file."""
        for where, group in self.groups():
            for s, stage in enumerate(group.stages):
                yield f"{where}.stages[{s}]", group, stage

    def groups(self) -> Iterator[tuple[str, Group]]:
        """Yield every group with its key in the plan file."""
        for g, group in enumerate(self.plan.groups):
            yield f"groups[{g}]", group

    def key(self, where: str, name: str, flag: str | None = None) -> str:
        """Return the flag where the plan came from flags, else the key in the file."""
        if self.file is None:
            return f"--{flag or name}"
        return f"{where}.{name}" if where else name


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case(_PlanCase):
    """A plan and what it must fit."""

    model: Model
    cluster: Cluster

    def kinds(self) -> list[Block]:
        """Return the distinct blocks of the model."""
        return [block for block, _ in self.model.block_kinds()]


Rule = Callable[[Any], Iterator[Violation]]


def _check(rules: Iterable[Rule], case: _PlanCase) -> None:
    for rule in rules:
        for broken in rule(case):
            key, value, what, fix, text = broken
            raise SpecError(what, file=case.file, key=key, value=value, rule=text or rule.__doc__, fix=fix)


def _options_known(case: _Case) -> Iterator[Violation]:
    plan, file = case.plan, case.file
    one_of(plan.precision, PRECISIONS, key=case.key("", "precision", "dtype"), file=file, exact=True)
    one_of(plan.optimizer, OPTIMIZERS, key=case.key("", "optimizer"), file=file, exact=True)
    for where, group in case.groups():
        key = case.key(where, "schedule")
        one_of(group.schedule, SCHEDULES, key=key, file=file, exact=True)
        whole(group.micro_batch, key=case.key(where, "micro_batch", "micro-batch"), file=file)
    for where, _, stage in case.stages():
        whole(stage.zero, 0, 3, key=case.key(where, "zero"), file=file)
        one_of(stage.offload, OFFLOADS, key=case.key(where, "offload"), file=file, exact=True)
        check_recompute(stage.recompute, key=case.key(where, "recompute"), file=file)
    return iter(())


def _ranks_exist(case: _Case) -> Iterator[Violation]:
    count = case.cluster.num_devices
    for where, _, stage in case.stages():
        for rank in (min(stage.ranks, default=0), max(stage.ranks, default=0)):
            if not 0 <= rank < count:
                what = f"rank {rank} is used, the cluster has {number_of(count, 'device')}"
                fix = f"Name ranks below {count}, or use a larger cluster"
                yield Violation(f"{where}.ranks", rank, what, fix, f"Ranks go from 0 to {count - 1}")


def _ranks_once(case: _PlanCase) -> Iterator[Violation]:
    """Every rank is at most in one place."""
    seen: dict[int, str] = {}
    ranks = case.plan.ranks
    if len(set(ranks)) == len(ranks):
        return
    for where, _, stage in case.stages():
        for rank in stage.ranks:
            if rank in seen:
                what = f"rank {rank} is used twice, first in {seen[rank]}"
                yield Violation(f"{where}.ranks", rank, what, f"Leave rank {rank} out of one of the two")
            seen[rank] = where


def _samples_once(case: _PlanCase) -> Iterator[Violation]:
    """Every sample is taken once per step."""
    total, batch = sum(group.share for group in case.plan.groups), case.plan.global_batch
    if total != batch:
        what = f"shares sum to {total}, the global batch is {batch}"
        yield Violation("groups.share", total, what, f"Make the shares sum to {batch}")


def _rank_shares_split(case: _PlanCase) -> Iterator[Violation]:
    """rank_shares has one entry per inner data-parallel rank and sums to micro_batch."""
    for where, group, stage in case.stages():
        shares, size = stage.rank_shares, group.micro_batch
        if shares is None:
            continue
        if len(shares) * stage.tp * stage.cp != len(stage.ranks) or sum(shares) != size:
            what = f"{list(shares)} does not split micro_batch {size} over {stage.inner_dp} ranks"
            fix = f"Give {stage.inner_dp} numbers that sum to {size}"
            yield Violation(f"{where}.rank_shares", ", ".join(map(str, shares)), what, fix)


_LAYERS_RULE = "Stages cover every layer in order, chunk by chunk, each exactly once"


def _layers_in_order(case: _PlanCase) -> Iterator[Violation]:
    for where, group in case.groups():
        reached = 0
        for s, (start, stop) in _spans(group):
            if start != reached:
                gap = f"layers {reached} to {start - 1} are not covered"
                what = gap if start > reached else f"layer {start} is assigned twice or out of order"
                key, fix = f"{where}.stages[{s}].layers", f"Start the interval at {reached}"
                yield Violation(key, f"[{start}, {stop}]", what, fix, _LAYERS_RULE)
            reached = stop


def _layers_of_model(case: _Case) -> Iterator[Violation]:
    blocks = case.model.num_layers
    where = f"{case.model.name} has layers 0 to {blocks + 1} (embedding, {blocks} blocks, head)"
    return _layers_end(case, blocks + 2, where, _LAYERS_RULE)


def _layers_agree(case: _PlanCase) -> Iterator[Violation]:
    last = case.plan.groups[0].num_layers
    return _layers_end(case, last, f"those of groups[0] at {last}", "Every group holds every layer")


def _layers_end(case: _PlanCase, last: int, which: str, rule: str) -> Iterator[Violation]:
    for where, group in case.groups():
        reached = group.num_layers
        if reached != last:
            key, what = f"{where}.stages.layers", f"layers end at {reached}, {which}"
            yield Violation(key, reached, what, f"End the last interval at {last}", rule)


def _spans(group: Group) -> Iterator[tuple[int, tuple[int, int]]]:
    """Yield (stage, interval) in the order in which a sample passes them."""
    stages = list(enumerate(group.stages))
    for chunk in range(max(len(stage.layers) for stage in group.stages)):
        turned = chunk % 2 == 1 and group.schedule in TURNING
        for s, stage in reversed(stages) if turned else stages:
            if chunk < len(stage.layers):
                yield s, stage.layers[chunk]


def _degrees_fit_ranks(case: _Case) -> Iterator[Violation]:
    rules = {"tp cp": "len(ranks) = tp x cp x inner dp", "ep etp": "etp x ep divides tp x cp x inner dp"}
    for where, _, stage in case.stages():
        count = len(stage.ranks)
        for names, rule in rules.items():
            first, second = names.split()
            degree, other = getattr(stage, first), getattr(stage, second)
            if count % (degree * other):
                what = f"{first} {degree} x {second} {other} does not divide {count} ranks"
                fix = f"Choose {first} x {second} that divides {count}"
                yield Violation(case.key(where, first), degree, what, fix, rule)


def _shards_divide(case: _Case) -> Iterator[Violation]:
    """Shard groups divide the data-parallel ranks, inner dp x cp."""
    for where, _, stage in case.stages():
        if stage.shard_size is None:
            continue
        key, replicas = case.key(where, "shard_size", "shard-size"), stage.inner_dp * stage.cp
        whole(stage.shard_size, key=key, name="shard_size", file=case.file)
        if replicas % stage.shard_size:
            what = f"shard_size {stage.shard_size} does not divide {replicas} ranks"
            yield Violation(key, stage.shard_size, what, f"Use a divisor of {replicas}")
        if stage.zero == 0:
            what, rule = f"shard_size {stage.shard_size} at zero 0", "At zero 0 every rank keeps all states"
            yield Violation(key, stage.shard_size, what, "Leave it out, or shard by zero 1 to 3", rule)


def _divides(
    case: _PlanCase, where: str, name: str, degree: int, count: int, what: str
) -> Iterator[Violation]:
    if count % degree:
        rule, what = f"{name} divides the number of {what}", f"{name} {degree} does not divide {count} {what}"
        fix = f"Use a divisor of {count}: {divisors(count)}"
        yield Violation(case.key(where, name), degree, what, fix, rule)


def _tensor_divides_model(case: _Case) -> Iterator[Violation]:
    for where, _, stage in case.stages():
        for block in case.kinds():
            yield from _divides(case, where, "tp", stage.tp, block.num_heads, "attention heads")
            yield from _divides(case, where, "tp", stage.tp, block.ffn, "feed-forward channels")
            yield from _divides(case, where, "tp", stage.tp, block.shared_ffn, "channels of shared experts")


def _experts_divide_model(case: _Case) -> Iterator[Violation]:
    kinds = [block for block in case.kinds() if block.num_experts]
    for where, _, stage in case.stages():
        for name, degree in (("ep", stage.ep), ("etp", stage.etp)):
            if degree > 1 and not kinds:
                what = f"{name} {degree} for {case.model.name}, which has no experts"
                rule = f"{name} > 1 needs a mixture-of-experts model"
                yield Violation(case.key(where, name), degree, what, f"Leave out {name}", rule)
        for block in kinds:
            yield from _divides(case, where, "ep", stage.ep, block.num_experts, "experts")
            yield from _divides(case, where, "etp", stage.etp, block.expert_ffn, "channels of an expert")


def _recomputes_what_is_there(case: _Case) -> Iterator[Violation]:
    """Recompute a module that the model has."""
    lacks = modules_lacking(case.model)
    for where, _, stage in case.stages():
        kind, _, named = stage.recompute.partition(":")
        if kind == "selective" and set(named.split("+")) <= lacks:
            what = f"recompute {stage.recompute} for {case.model.name}, which has none of that"
            yield Violation(case.key(where, "recompute"), stage.recompute, what, "Leave out recompute")


def modules_lacking(model: Model) -> set[str]:
    """Return the modules of selective rules that a model does not have."""
    kinds = [block for block, _ in model.block_kinds()]
    has = {
        "mla_up_proj": any(block.kv_lora for block in kinds),
        "shared_experts": any(block.shared_ffn for block in kinds),
        **dict.fromkeys(("moe", "moe_act"), any(block.num_experts for block in kinds)),
    }
    return {name for name, is_there in has.items() if not is_there}


def _chunks_match(case: _PlanCase) -> Iterator[Violation]:
    """Every stage of a group has the same number of layer intervals."""
    for where, group in case.groups():
        chunks = sorted({len(stage.layers) for stage in group.stages})
        if len(chunks) > 1:
            key, fix = f"{where}.stages.layers", f"Give each stage {chunks[-1]} intervals"
            yield Violation(key, str(chunks), "stages of one group differ in virtual stages", fix)


def _chunks_interleave(case: _PlanCase) -> Iterator[Violation]:
    """Only the interleaved schedule has virtual stages, and zbv and dualpipev have two."""
    for where, group in case.groups():
        if group.schedule in TURNING:
            if group.num_chunks != 2:
                what = f"{number_of(group.num_chunks, 'virtual stage')} with schedule {group.schedule}"
                yield Violation(
                    case.key(where, "schedule"), group.schedule, what, "Give every stage two intervals"
                )
        elif group.num_chunks > 1 and group.schedule != "interleaved":
            what = f"{group.num_chunks} virtual stages with schedule {group.schedule}"
            yield Violation(case.key(where, "schedule"), group.schedule, what, "Use interleaved")


def folding_rule(schedule: str, stages: int, micro_batches: int) -> tuple[str, str, str] | None:
    """Return what a pipeline breaks of its schedule's rule, the rule, and what to do; None if nothing."""
    if schedule == "dualpipev" and micro_batches < 2 * stages:
        least = 2 * stages
        return (
            f"{micro_batches} micro-batches on {stages} stages under dualpipev",
            "dualpipev takes at least two micro-batches for each stage",
            f"Use at least {least} micro-batches",
        )
    if schedule == "dualpipe" and (stages % 2 or micro_batches % 2 or micro_batches < 2 * stages):
        least = 2 * (stages + stages % 2)
        return (
            f"{micro_batches} micro-batches on {number_of(stages, 'stage')} under dualpipe",
            "dualpipe takes even numbers of stages and of micro-batches, at least two for each stage",
            f"Use an even number of stages, and an even number of micro-batches from {least} on",
        )
    return None


def _folding_fits(case: _PlanCase) -> Iterator[Violation]:
    for where, group in case.groups():
        broken = folding_rule(group.schedule, len(group.stages), group.num_micro_batches)
        if broken is not None:
            what, rule, fix = broken
            key = case.key(where, "share", "global-batch")
            yield Violation(key, group.num_micro_batches, what, fix, rule)


def _interleaving_divides(case: _Case) -> Iterator[Violation]:
    """Interleaving takes micro-batches in groups of pp, so pp divides their number."""
    for where, group in case.groups():
        p, m = len(group.stages), group.num_micro_batches
        if group.schedule == "interleaved" and group.num_chunks > 1 and p > 1 and m % p:
            what = f"{m} micro-batches on {p} interleaved stages"
            fix = f"Use {max(1, m // p) * p} or {(m // p + 1) * p} micro-batches, or vpp 1"
            yield Violation(case.key(where, "share", "global-batch"), m, what, fix)


def _precision_supported(case: _Case) -> Iterator[Violation]:
    """Devices compute matrix products of the precision in hardware."""
    precision = case.plan.precision
    for device, _ in case.cluster.devices_on(case.plan.ranks):
        if not device.supports(precision):
            has = [name for name in PRECISIONS if device.supports(name)]
            fix = f"Use one of: {', '.join(has)}" if has else "Use another device"
            key = case.key("", "precision", "dtype")
            yield Violation(key, precision, f"{device.name} has no {precision}", fix)


def _sequence_divides(case: _Case) -> Iterator[Violation]:
    """Sequences divide over cp, times tp with sp."""
    seq_len = case.plan.seq_len
    for _, group, stage in case.stages():
        parts = stage.cp * (stage.tp if group.sp else 1)
        if seq_len % parts:
            over = f"cp {stage.cp}" + (f" x tp {stage.tp}" if group.sp else "")
            what = f"sequence {seq_len} does not divide over {over}"
            without = ", or --no-sp" if group.sp and seq_len % stage.cp == 0 else ""
            fix = f"Use a multiple of {parts}{without}"
            yield Violation(case.key("", "seq_len", "seq"), seq_len, what, fix)


def _one_vendor(case: _Case) -> Iterator[Violation]:
    """No collective library joins devices of two vendors."""
    vendors = sorted({device.vendor for device, _ in case.cluster.devices_on(case.plan.ranks)})
    if len(vendors) > 1:
        what = f"devices of {' and '.join(vendors)} in one plan"
        yield Violation("groups.stages.ranks", ", ".join(vendors), what, "Use the devices of one vendor")


_OF_STRUCTURE: tuple[Rule, ...] = (
    _ranks_once,
    _samples_once,
    _rank_shares_split,
    _chunks_match,
    _chunks_interleave,
    _layers_in_order,
    _layers_agree,
)
_OF_CUT: tuple[Rule, ...] = (
    _layers_in_order,
    _layers_of_model,
    _tensor_divides_model,
    _experts_divide_model,
    _recomputes_what_is_there,
)
_OF_PLAN: tuple[Rule, ...] = (
    _options_known,
    _ranks_exist,
    _ranks_once,
    _samples_once,
    _rank_shares_split,
    _layers_in_order,
    _layers_of_model,
    _degrees_fit_ranks,
    _shards_divide,
    _tensor_divides_model,
    _experts_divide_model,
    _recomputes_what_is_there,
    _chunks_match,
    _chunks_interleave,
    _interleaving_divides,
    _folding_fits,
    _precision_supported,
    _sequence_divides,
    _one_vendor,
)
