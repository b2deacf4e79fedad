"""The first screen of a prediction: three boxes, where time and memory go, what would help."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from foreshard import quantity
from foreshard.advise.change import Effect
from foreshard.advise.group_times import GroupTime, uneven
from foreshard.advise.request import SPLIT_EVENLY
from foreshard.report.plan_words import counted, dated, place_of, plan_line, priced
from foreshard.report.screen import Box, Screen, Table, spans, table
from foreshard.spec.prediction import MEMORY_LABELS, TIME_LABELS, Memory, Prediction
from foreshard.spec.variation import RunEfficiency, StepDistribution
from foreshard.units import number_of

_CLASS_LABELS = {
    "tensor_comm": "tensor-parallel",
    "context_comm": "context-parallel",
    "expert_comm": "expert",
    "gradient_reduce": "reduction of gradients",
    "parameter_gather": "gathering of weights",
    "pipeline_comm": "messages between stages",
}
_LOSSES = {
    "loading_data": "waiting for data",
    "checkpoints": "saving checkpoints",
    "lost_steps": "work lost with failures, done again",
    "restarts": "restarts",
}
FEWER_UPDATES = (
    "A larger global batch is tried as none was stated (--global-batch): the same tokens in fewer updates."
)
NOTHING_HELPS = "What would help: no single change tried wins one per cent or more."


def boxes(prediction: Prediction) -> tuple[Box, Box, Box]:
    """Return the three headline numbers."""
    memory = prediction.memory
    price, of = priced(prediction.plan, prediction.cost.usd_per_1b_tokens)
    dated = _prices(prediction.cost.price_date)
    whole = "" if prediction.run_time_s is None else f", {run_line(prediction)}"
    return (
        step_box(prediction),
        Box(
            title="Peak",
            value=_of_capacity(memory),
            note=f"on rank {memory.peak_rank}" + (_likely(memory) if memory.fits else ", does not fit"),
            alarm=not memory.fits,
        ),
        Box(
            title=f"Cost of {of}",
            value="no price known" if price is None else quantity.usd(price),
            note=("give --usd-per-device-hour" if price is None else dated) + whole,
        ),
    )


def _likely(memory: Memory) -> str:
    """Return the probability of fitting in words, where it is known."""
    known = memory.fits_probability
    return "" if known is None else f", {quantity.percent(known, 0)} likely to fit"


def step_box(prediction: Prediction) -> Box:
    """Return the step time with its interval."""
    low, high = prediction.step_time_interval_s
    note = f"{quantity.seconds_range(low, high)}, {quantity.percent(prediction.interval, 0)}"
    return Box(title="Step", value=quantity.seconds(prediction.step_time_s), note=note)


def _prices(price_date: str | None) -> str:
    if price_date is None:
        return "price stated by you"
    return f"prices of {dated(price_date)}" if price_date[0].isdigit() else f"prices {price_date}"


def _of_capacity(memory: Memory) -> str:
    peak, capacity = quantity.memory(memory.peak_bytes), quantity.memory(memory.capacity_bytes)
    return f"{peak.removesuffix(' GiB')} / {capacity}"


def run_line(prediction: Prediction) -> str:
    """Return how long the whole run takes at this speed, and its price where known."""
    total = prediction.cost.usd_total
    price = "" if total is None else f", {quantity.usd(total)}"
    hours = prediction.cost.device_hours
    used = "" if hours is None else f", {quantity.count(hours)} device-hours"
    energy = prediction.energy_j_total
    drawn = "" if energy is None else f", {quantity.watt_hours(energy)}"
    return f"whole run {quantity.seconds(prediction.run_time_s)}{used}{drawn}{price}"


def groups_table(groups: Sequence[GroupTime]) -> Table:
    """Return how long each group works on its share and waits for the slowest, equal groups once."""
    rows: dict[tuple[str, ...], list[int]] = {}
    for group in groups:
        step_s = group.work_s + group.wait_s
        cells = (
            group.devices,
            str(group.share),
            quantity.seconds(group.work_s),
            quantity.seconds(group.wait_s),
            quantity.percent(group.wait_s / step_s),
        )
        rows.setdefault(cells, []).append(group.group)
    return Table(
        title="Groups: work on their shares, and waiting for the slowest",
        columns=("group", "devices", ">share", ">works", ">waits", ">idle"),
        rows=tuple((spans(numbers), *cells) for cells, numbers in rows.items()),
    )


def time_table(prediction: Prediction) -> Table:
    """Return where the step's time goes; the rows sum to the step."""
    parts = {label: prediction.time_breakdown_s.get(name, 0.0) for name, label in TIME_LABELS.items()}
    total = ("step", quantity.seconds(sum(parts.values())), "100.0 %")
    columns = ("part", ">time", ">share")
    return _parts_table(
        "Where the time goes", columns, parts, prediction.step_time_s, quantity.seconds, total
    )


def collectives_table(prediction: Prediction) -> Table:
    """Return what sharing the network does to each class of transfers on the critical rank."""
    rows = [
        (
            _CLASS_LABELS.get(one.collective, one.collective),
            quantity.seconds(one.closed_form_s),
            quantity.seconds(one.flow_s),
            quantity.gain(one.flow_s / one.closed_form_s - 1.0),
            one.busiest_resource,
            quantity.percent(one.utilisation),
        )
        for one in prediction.collectives
    ]
    columns = ("transfers", ">alone", ">shared", ">difference", "busiest on their way", ">busy")
    return table("Transfers by themselves, and on the network that all share", columns, rows)


def distribution_table(varied: StepDistribution) -> Table:
    """Return how a step varies with its ranks, and what each kind of noise adds to its mean."""
    rows = [
        ("all ranks alike", quantity.seconds(varied.alike_s)),
        ("jitter: waiting for the slowest rank", quantity.seconds(varied.jitter_s)),
        ("slow ranks", quantity.seconds(varied.slow_ranks_s)),
        ("slow links", quantity.seconds(varied.slow_links_s)),
        ("mean", quantity.seconds(varied.mean_s)),
        ("median", quantity.seconds(varied.p50_s)),
        ("90 of 100 steps within", quantity.seconds(varied.p90_s)),
        ("99 of 100 steps within", quantity.seconds(varied.p99_s)),
    ]
    title = f"Steps whose ranks differ, {number_of(varied.steps, 'draw')} (seed {varied.seed})"
    if varied.contention == "once":
        title += "; sharing of links solved once, with all ranks alike"
    return table(title, ("step", ">time"), rows)


def run_table(run: RunEfficiency) -> Table:
    """Return what becomes of the time of a run."""
    rows = [("predicted steps (goodput)", quantity.percent(run.goodput))]
    rows += [(_LOSSES[name], quantity.percent(part)) for name, part in run.lost.items() if part > 0.0]
    title = "Where the time of the run goes"
    if run.mtbf_s is not None and run.checkpoint_every_s is not None:
        title += (
            f": a failure every {quantity.seconds(run.mtbf_s)}, "
            f"a checkpoint every {quantity.seconds(run.checkpoint_every_s)}"
        )
    return table(title, ("time", ">share"), rows)


def memory_table(memory: Memory) -> Table:
    """Return where the memory of the fullest rank goes; the rows sum to the peak."""
    unit = quantity.memory_unit(memory.peak_bytes)
    write = partial(quantity.memory_in, unit)
    parts = {label: memory.breakdown_bytes.get(name, 0.0) for name, label in MEMORY_LABELS.items()}
    share = quantity.percent(memory.peak_bytes / memory.capacity_bytes)
    total = ("peak", write(memory.peak_bytes), share)
    title, columns = f"Where the memory of rank {memory.peak_rank} goes", ("part", f">{unit}", ">of capacity")
    return _parts_table(title, columns, parts, memory.capacity_bytes, write, total)


def _parts_table(
    title: str,
    columns: tuple[str, ...],
    parts: Mapping[str, float],
    whole: float,
    write: Callable[[float], str],
    total: tuple[str, ...],
) -> Table:
    """Return the parts that are not nothing, each with its share of the whole."""
    shown = {name: value for name, value in parts.items() if value}
    rows = tuple((name, write(value), quantity.percent(value / whole)) for name, value in shown.items())
    bars = tuple(value / whole for value in shown.values())
    return Table(title=title, columns=columns, rows=rows, total=total, bars=bars)


def advice_table(advice: Sequence[Effect], many: str = "tokens") -> Table:
    """Return what would help, best first; `many` is what throughput counts."""
    rows = []
    for effect in advice:
        assert effect.prediction is not None and effect.gain is not None
        step, peak = effect.prediction.step_time_s, effect.prediction.memory.peak_bytes
        cells = (quantity.gain(effect.gain), quantity.seconds(step), quantity.memory(peak))
        rows.append((effect.change, *cells))
    return table("What would help (predicted)", ("change", f">{many}/s", ">step", ">peak"), rows)


def speed_line(prediction: Prediction) -> str:
    """Return throughput, utilisation and what binds, in one line; unknown values are left out."""
    unit = counted(prediction.plan)
    words = [
        f"{quantity.count(prediction.tokens_per_s)} {unit}/s",
        f"({quantity.count(prediction.tokens_per_s_per_device)} per device)",
    ]
    if unit == "tokens":
        words.append(f"{quantity.digits(prediction.samples_per_s)} samples/s")
    if prediction.mfu:
        words.append(f"MFU {quantity.percent(prediction.mfu)}")
    if prediction.energy_j_per_step is not None:
        words.append(f"energy {quantity.joules(prediction.energy_j_per_step)} per step")
    words.append(f"bound by {TIME_LABELS.get(prediction.bottleneck, prediction.bottleneck)}")
    return "  ".join(words)


def worst_stage_line(prediction: Prediction) -> str:
    """Return which rank of which stage is fullest, and the range over the other stages."""
    memory = prediction.memory
    peaks = [peak for group in memory.per_stage_peak_bytes for peak in group]
    place = place_of(prediction.plan, memory.peak_rank)
    where = f"stage {place[1]}" + (f" of group {place[0]}" if len(prediction.plan.groups) > 1 else "")
    unit = quantity.memory_unit(max(peaks))
    low, high = quantity.memory_in(unit, min(peaks)), quantity.memory_in(unit, max(peaks))
    each = f"{low} to {high}" if low != high else f"{high}"
    others = f"; stages take {each} {unit}" + (" each" if low == high else "")
    return f"Fullest: rank {memory.peak_rank}, {where}" + (others if len(peaks) > 1 else "")


def prediction_screen(
    prediction: Prediction,
    advice: Sequence[Effect] | None = None,
    explained: Mapping[str, str] | None = None,
    groups: Sequence[GroupTime] = (),
) -> Screen:
    """Return the first screen of a prediction.

    `advice` is what would help, best first; empty says that nothing tried does. `explained` has formula and
    source by the name of each number and brings every assumption. `groups` are shown when some group waits.
    """
    tables = [time_table(prediction), memory_table(prediction.memory)]
    if prediction.collectives:
        tables.append(collectives_table(prediction))
    if prediction.step_time_distribution is not None:
        tables.append(distribution_table(prediction.step_time_distribution))
    if prediction.run is not None:
        tables.append(run_table(prediction.run))
    if uneven(groups):
        tables.append(groups_table(groups))
    if advice:
        tables.append(advice_table(advice, counted(prediction.plan)))
    if explained:
        columns = ("number", "formula and source")
        tables.append(table("How each number comes about", columns, list(explained.items())))
    if explained is not None:
        tables.append(assumptions_table(prediction))
    network = "" if prediction.network == "closed-form" else f"{prediction.network} network, "
    footer = [
        f"{prediction.engine} engine, {network}{prediction.costs} costs, {prediction.fidelity}; "
        f"evidence: {prediction.evidence}",
        f"{prediction.framework}; catalog {prediction.catalog_version or 'unversioned'}; "
        f"{len(prediction.assumptions)} assumptions" + ("" if explained is not None else " (--explain)"),
    ]
    notes = [speed_line(prediction), worst_stage_line(prediction)]
    if SPLIT_EVENLY in prediction.assumptions:
        notes.append(f"Note: {SPLIT_EVENLY}.")
    if any("global-batch=" in effect.change for effect in advice or ()):
        notes.append(FEWER_UPDATES)
    if advice is not None and not advice:
        notes.append(NOTHING_HELPS)
    if prediction.fidelity == "calibrated" and prediction.assumptions:
        notes.append(f"Learned: {prediction.assumptions[0]}")
    return Screen(
        header=(f"{prediction.model} on {prediction.cluster}", plan_line(prediction.plan)),
        boxes=boxes(prediction),
        tables=tuple(tables),
        notes=tuple(notes),
        footer=tuple(footer),
    )


def assumptions_table(prediction: Prediction) -> Table:
    """Return what was not stated and took a default."""
    assumed = [(str(i), text) for i, text in enumerate(prediction.assumptions, start=1)]
    return table("Assumptions", (">#", "assumed"), assumed)
