"""What would help: single changes that win time, and the nearest change that makes a run fit.

Both only ask the predictor: candidates are timed with the analytical engine, and the winners are timed
again with the engine of the prediction they are compared with.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from foreshard.errors import ForeshardError
from foreshard.report import quantity
from foreshard.report.change import Effect, apply, effect, rank
from foreshard.report.request import Request, stated_degrees
from foreshard.spec.plan import Plan
from foreshard.spec.prediction import Prediction

WORTH_SAYING = 0.01
_MAX_DEGREE = 64
_MAX_NODES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The nearest change that fits, or None, and how many were tried."""

    effect: Effect | None
    num_tried: int


def improvements(request: Request, base: Prediction, *, top: int = 3) -> tuple[Effect, ...]:
    """Return up to `top` single changes that fit and win at least a hundredth of the throughput.

    Parameters
    ----------
    request : Request
    base : Prediction
        The prediction of the request itself.
    top : int

    Returns
    -------
    tuple of Effect
        Best first, gains under the engine of `base`.
    """
    if request.plan is None:
        request = request.with_choice("global_batch", base.plan.global_batch)
    reference = base if base.engine == "analytical" else request.predict("analytical")
    effects = [effect(request, reference, change, engine="analytical") for change in _time_changes(base.plan)]
    good = [one for one in rank(effects) if _worth(one)][: top + 2]
    if base.engine != "analytical":
        good = [one for one in rank([effect(request, base, one.change) for one in good]) if _worth(one)]
    return tuple(good[:top])


def _worth(one: Effect) -> bool:
    if one.prediction is None or one.gain is None:
        return False
    return one.prediction.memory.fits and one.gain >= WORTH_SAYING


def _time_changes(plan: Plan) -> Iterator[str]:
    """Yield changes of the plan that may win time; invalid ones drop out when they are predicted."""
    group, stage = plan.groups[0], plan.groups[0].stages[0]
    recompute = stage.recompute
    if recompute != "none":
        yield "recompute=none"
    if recompute.startswith(("full", "every")):
        yield "recompute=selective"
    now = stated_degrees(plan)
    per_rank = group.micro_batch // stage.inner_dp
    yield f"micro-batch={2 * per_rank}"
    if per_rank > 1:
        yield f"micro-batch={per_rank // 2}"
    for name in ("tp", "pp", "cp", "ep"):
        free = "" if name == "ep" else ",dp="
        yield from _scaled(name, now, free)
    if now["tp"] > 1 and not group.sp:
        yield "sp=on"
    if now["pp"] > 1:
        for chunks in (2, 4):
            if now["vpp"] != chunks:
                yield f"vpp={chunks},schedule=interleaved"
        if group.schedule == "1f1b":
            yield "schedule=zb-h1"
    for level in (1, 2, 3):
        if level != stage.zero:
            yield f"zero={level}"
    if plan.precision == "bf16":
        yield "dtype=fp8"


def _scaled(name: str, now: dict[str, int], free: str) -> Iterator[str]:
    """Yield one degree halved and doubled, data parallelism taking what it frees."""
    if now[name] > 1:
        yield f"{name}={now[name] // 2}" + (f"{free}{now['dp'] * 2}" if free else "")
    if now[name] < _MAX_DEGREE and now["dp"] % 2 == 0:
        yield f"{name}={now[name] * 2}" + (f"{free}{now['dp'] // 2}" if free else "")


def nearest_fit(request: Request, base: Prediction) -> Fit:
    """Return the first change that fits, from the mildest to adding nodes, and how many were tried.

    Single changes first (recompute, micro-batch, sharding, tensor, pipeline degree), then those that
    save memory together, then with more nodes.
    """
    tried = 0
    for change in _memory_changes(request, base.plan):
        try:
            candidate = apply(request, change).predict("analytical")
        except ForeshardError:
            continue
        tried += 1
        if candidate.memory.fits:
            gain = candidate.tokens_per_s / base.tokens_per_s - 1
            return Fit(effect=Effect(change=change, prediction=candidate, gain=gain), num_tried=tried)
    return Fit(effect=None, num_tried=tried)


def _memory_changes(request: Request, plan: Plan) -> Iterator[str]:
    """Yield changes that save memory, mildest first."""
    group, stage = plan.groups[0], plan.groups[0].stages[0]
    now = stated_degrees(plan)
    savers = []
    if stage.recompute == "none":
        yield "recompute=selective"
    if stage.recompute != "full":
        yield "recompute=full"
        savers.append("recompute=full")
    if group.micro_batch > stage.inner_dp:
        yield "micro-batch=1"
        savers.append("micro-batch=1")
    for level in range(stage.zero + 1, 4):
        yield f"zero={level}"
    if stage.zero < 3:
        savers.append("zero=3")
    degrees = [*_raised("tp", now), *_raised("pp", now)]
    yield from degrees
    together = ",".join(savers)
    if len(savers) > 1:
        yield together
    yield from (",".join([change, *savers]) for change in degrees if savers)
    yield from _more_nodes(request, savers)


def _raised(name: str, now: dict[str, int]) -> Iterator[str]:
    factor = 2
    while now["dp"] % factor == 0 and now[name] * factor <= _MAX_DEGREE:
        yield f"{name}={now[name] * factor},dp={now['dp'] // factor}"
        factor *= 2


def _more_nodes(request: Request, savers: list[str]) -> Iterator[str]:
    """Yield twice, four times, ... the nodes, data parallel; then with everything that saves memory."""
    if len(request.cluster.nodes) != 1:
        return
    num_nodes = request.cluster.nodes[0].count
    while num_nodes * 2 <= _MAX_NODES:
        num_nodes *= 2
        yield f"nodes={num_nodes}"
        if savers:
            yield ",".join([f"nodes={num_nodes}", *savers])


def verdict(prediction: Prediction, fit: Fit) -> str:
    """Return by how much, on which rank, and the nearest change that fits."""
    memory = prediction.memory
    over = quantity.gib(memory.peak_bytes - memory.capacity_bytes)
    text = (
        f"does not fit: rank {memory.peak_rank} needs {quantity.gib(memory.peak_bytes)} GiB, "
        f"{over} GiB more than its {quantity.gib(memory.capacity_bytes)} GiB. "
    )
    if fit.effect is None or fit.effect.prediction is None:
        return (
            f"{text}None of {fit.num_tried} changes tried fits (recompute, micro-batch, zero, tp, pp, nodes)."
        )
    peak = quantity.gib(fit.effect.prediction.memory.peak_bytes)
    return f"{text}Nearest change that fits: {fit.effect.change} (peak {peak} GiB)."
