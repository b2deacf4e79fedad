"""What would help: single changes of a run that win time, among those its framework supports.

Candidates are timed with the analytical engine, and the winners are timed
again with the engine of the prediction they are compared with.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from foreshard.advise.change import Effect, effect, rank
from foreshard.advise.group_times import better_shares
from foreshard.advise.request import stated_degrees
from foreshard.advise.traced_request import OFFERS, Asked, TracedRequest
from foreshard.catalog.frameworks import load_framework
from foreshard.catalog.offers import Offers, offers_of
from foreshard.planner.request import MARGIN
from foreshard.spec.plan import Plan
from foreshard.spec.prediction import Prediction

# Least gain of throughput reported: the predictor does not resolve less between plans.
MIN_GAIN = 0.01
TOP = 5  # changes reported; further ones win little
# Largest context and expert degree tried; more has not been trained.
MAX_DEGREE = 64
MAX_STEP_TOKENS, MAX_STEP_SAMPLES = 2**26, 2**16
"""Of a larger batch tried where none is stated: tokens or, where a sample is an image or a row, samples.

DeepSeek-V3's 15,360 x 4,096 (arXiv:2412.19437, 4.2), ImageNet by LARS (You et al. 2018)."""
# Of the changes of one kind only the best is reported.
_KINDS = {"tp": "split", "pp": "split", "cp": "split", "ep": "experts", "etp": "experts", "vpp": "schedule"}


def improvements(request: Asked, base: Prediction, *, top: int = TOP) -> tuple[Effect, ...]:
    """Return up to `top` changes that fit and win at least a hundredth of the throughput, one of a kind.

    `base` is the prediction of the request itself; gains are under its engine, best first.
    """
    larger: list[str] = []
    if request.plan is None:
        if request.choices.get("global_batch") is None:
            larger = list(_larger_batches(base.plan))
        request = request.with_choice("global_batch", base.plan.global_batch)
    engine = request.trial_engine
    reference = base if base.engine == engine else request.predict(engine)
    tried = (*larger, *_time_changes(request, base.plan), *better_shares(request, base.plan))
    changes = dict.fromkeys(tried)
    effects = [effect(request, reference, change, engine=engine) for change in changes]
    good = _one_of_a_kind([found for found in rank(effects) if _gains(found, base)])[: top + 2]
    if base.engine != engine:
        again = rank([effect(request, base, found.change) for found in good])
        good = [found for found in again if _gains(found, base)]
    return tuple(good[:top])


def _gains(found: Effect, base: Prediction) -> bool:
    """Return whether a change wins time, and fits as probably as a plan must or as the run does."""
    now = base.memory.fits_probability
    least = MARGIN if now is None else min(MARGIN, now)
    return found.gain is not None and found.gain >= MIN_GAIN and found.is_likely_to_fit(least)


def _one_of_a_kind(ranked: Sequence[Effect]) -> list[Effect]:
    """Return the best change of each kind, in their order."""
    best: dict[str, Effect] = {}
    for found in ranked:
        key = found.change.partition("=")[0]
        best.setdefault(_KINDS.get(key, key), found)
    return list(best.values())


def offered(request: Asked, plan: Plan) -> Offers:
    """Return what the framework of the plan ships, or what a traced module takes."""
    return OFFERS if isinstance(request, TracedRequest) else offers_of(load_framework(plan.framework))


def _time_changes(request: Asked, plan: Plan) -> Iterator[str]:
    """Yield changes of the plan that may win time; invalid ones drop out when they are predicted."""
    offers = offered(request, plan)
    yield from _overlap_changes(plan, offers)
    yield from _option_changes(plan, offers)
    yield from _dispatcher_changes(plan, offers)
    if request.plan is None:
        yield from splits(request, plan, offers)
        yield from expert_changes(request, plan, offers)
        yield from _virtual_stages(plan, offers)


def _overlap_changes(plan: Plan, offers: Offers) -> Iterator[str]:
    """Yield the switches of the framework that are off and have something to hide."""
    framework = load_framework(plan.framework)
    group, stage = plan.groups[0], plan.groups[0].stages[0]
    replicas = stage.inner_dp * stage.cp * len(plan.groups) > 1
    useful = {
        "tp_overlap": stage.tp > 1 and group.sp,
        "grad_overlap": replicas,
        "param_gather_overlap": replicas and stage.zero > 0,
        "p2p_overlap": group.num_chunks > 1,
        "expert_overlap": stage.ep > 1,
        "context_gather": stage.cp > 1,
        "shared_overlap": stage.ep > 1 and not plan.comm.get("expert_overlap", framework.expert_overlap),
        "narrow_gather": plan.precision == "fp8" and stage.zero > 0,
    }
    off = [
        name
        for name in offers.overlaps
        if useful[name] and not plan.comm.get(name, framework.hides(name, stage.zero))
    ]
    if "grad_overlap" in off and "param_gather_overlap" in off:  # gathering early needs early gradients
        off.remove("param_gather_overlap")
        yield "grad-overlap=true,param-gather-overlap=true"
    yield from (f"{name.replace('_', '-')}=true" for name in off)


def _dispatcher_changes(plan: Plan, offers: Offers) -> Iterator[str]:
    """Yield other ways to send tokens to experts; those that the devices do not run drop out later."""
    own = plan.dispatcher or load_framework(plan.framework).dispatcher
    if any(stage.ep > 1 for group in plan.groups for stage in group.stages):
        yield from (f"dispatcher={name}" for name in offers.dispatchers if name != own)


def _larger_batches(plan: Plan) -> Iterator[str]:
    """Yield larger batches where the user stated none, in more passes, then in larger ones.

    None is larger than batches that have been trained.
    """
    group, stage = plan.groups[0], plan.groups[0].stages[0]
    per_rank = group.micro_batch // stage.inner_dp
    most = MAX_STEP_TOKENS // plan.seq_len if plan.seq_len > 1 else MAX_STEP_SAMPLES
    for factor in (f for f in (4, 16, 64) if f * plan.global_batch <= most):
        yield f"global-batch={factor * plan.global_batch}"
        yield f"global-batch={factor * plan.global_batch},micro-batch={factor * per_rank}"


def _option_changes(plan: Plan, offers: Offers) -> Iterator[str]:
    """Yield other recompute rules, micro-batches, sharding levels and dtypes."""
    group, stage = plan.groups[0], plan.groups[0].stages[0]
    if stage.recompute != "none":
        yield "recompute=none"
    if stage.recompute.startswith(("full", "every")):
        if "selective" in offers.recompute:
            yield from ("recompute=selective", "recompute=selective:core_attn+mlp+layernorm")
            yield from (f"recompute=full:block:{n}" for n in partial_blocks(plan))
        if "every" in offers.recompute:
            yield from ("recompute=every-2", "recompute=every-4")
    per_rank = group.micro_batch // stage.inner_dp
    yield f"micro-batch={2 * per_rank}"
    if per_rank > 1:
        yield f"micro-batch={per_rank // 2}"
    if stage.tp > 1 and not group.sp and offers.cuts_sequences:
        yield "sp=on"
    for level in offers.levels(len(group.stages)):
        if 0 < level != stage.zero:
            yield f"zero={level}"
    if plan.precision == "bf16" and offers.low_precision:
        yield "dtype=fp8"
    yield from (f"dtype={name}" for name in offers.narrower if plan.precision in ("fp32", "tf32"))


def partial_blocks(plan: Plan) -> list[int]:
    """Return how many of the blocks of a virtual stage to recompute: an eighth to three quarters."""
    group = plan.groups[0]
    layers = max(1, group.stages[0].num_layers // group.num_chunks)
    return list(dict.fromkeys(max(1, round(layers * share)) for share in (0.125, 0.25, 0.5, 0.75)))


def splits(request: Asked, plan: Plan, offers: Offers) -> Iterator[str]:
    """Yield other tensor, pipeline and context degrees, data parallelism taking what is left."""
    now = stated_degrees(plan)
    model_size = now["tp"] * now["pp"]
    widest = max(node.per_node for node in request.cluster.nodes)
    for size in dict.fromkeys((max(1, model_size // 2), model_size, 2 * model_size)):
        for tp in _powers(min(size, widest) if "tp" in offers.degrees else 1):
            pp, rest = divmod(size, tp)
            if rest or (tp, pp) == (now["tp"], now["pp"]) or (pp > 1 and "pp" not in offers.degrees):
                continue
            dp, rest = divmod(now["dp"] * model_size, size)
            if not rest and dp:
                yield f"tp={tp},pp={pp},dp={dp}" + (",vpp=1" if pp == 1 < now["vpp"] else "")
    if "cp" in offers.degrees:
        if now["cp"] > 1:
            yield f"cp={now['cp'] // 2},dp={now['dp'] * 2}"
        if now["cp"] < MAX_DEGREE and now["dp"] % 2 == 0:
            yield f"cp={now['cp'] * 2},dp={now['dp'] // 2}"


def expert_changes(request: Asked, plan: Plan, offers: Offers) -> Iterator[str]:
    """Yield other expert degrees: every power of two up to the experts, and experts cut over tp."""
    if isinstance(request, TracedRequest) or "ep" not in offers.degrees:
        return
    experts = max(block.num_experts for block in request.model.blocks)
    if not experts:
        return
    now = stated_degrees(plan)
    for etp in dict.fromkeys((now["etp"], 1, now["tp"])):
        if etp > 1 and "etp" not in offers.degrees:
            continue
        for ep in _powers(min(experts, MAX_DEGREE)):
            if (ep, etp) != (now["ep"], now["etp"]):
                yield f"ep={ep},etp={etp}" if etp != now["etp"] else f"ep={ep}"


def _powers(limit: int) -> list[int]:
    return [2**i for i in range(max(1, limit).bit_length())]


def _virtual_stages(plan: Plan, offers: Offers) -> Iterator[str]:
    now, schedule = stated_degrees(plan), plan.groups[0].schedule
    if now["pp"] == 1 or not offers.schedules:
        return
    if "interleaved" in offers.schedules:
        for chunks in (2, 4, 8):
            if now["vpp"] != chunks:
                yield f"vpp={chunks},schedule=interleaved"
    for other in offers.schedules:
        if other not in ("interleaved", schedule):
            yield f"schedule={other}" + (",vpp=1" if now["vpp"] > 1 else "")
