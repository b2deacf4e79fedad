"""The one-file HTML report: a static page, its script and style, and the data as JSON inside it.

Nothing is loaded from anywhere. The page draws what `page_data` holds; a reader without scripts gets the
plain-text summary.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from foreshard import quantity
from foreshard.advise.change import Effect
from foreshard.advise.group_times import group_times, uneven
from foreshard.advise.nearest_fit import Fit, verdict
from foreshard.advise.traced_request import Asked
from foreshard.comm.topology.drawing import drawing
from foreshard.comm.topology.of_cluster import topology_of
from foreshard.errors import SpecError
from foreshard.report.explain_screen import explanations
from foreshard.report.pages.markup import document, static
from foreshard.report.plain import render
from foreshard.report.plan_words import counted, plan_line
from foreshard.report.screen import spans
from foreshard.report.summary import boxes, groups_table, prediction_screen, speed_line
from foreshard.spec.cluster import Cluster
from foreshard.spec.plan import Group, Plan
from foreshard.spec.prediction import MEMORY_LABELS, MEMORY_PARTS, TIME_LABELS, TIME_PARTS, Prediction
from foreshard.spec.timeline import Event, Timeline

_STREAMS = ("compute", "tensor", "context", "expert", "host", "send_forward", "send_backward")
MAX_DRAWN = 24_000  # tasks in the page, about 0.7 MB
MAX_NETWORK = 4096  # devices of a network that is drawn: about 0.1 s


def page(data: dict[str, Any]) -> str:
    """Return the report as one HTML text."""
    return document(
        f"{data['title']} on {data['cluster']} · foreshard",
        f'<noscript><pre>{html.escape(data["text"])}</pre></noscript>\n<div id="app"></div>',
        {key: value for key, value in data.items() if key != "text"},
        style=static("report.css"),
        script=static("report.js"),
    )


def page_data(
    request: Asked,
    prediction: Prediction,
    timeline: Timeline | None,
    advice: Sequence[Effect] = (),
    fit: Fit | None = None,
) -> dict[str, Any]:
    """Return what the page draws, and the plain text for readers without scripts.

    `advice` is what would help a run that fits, `fit` the nearest change of one that does not.
    """
    explained = explanations(request, prediction)
    groups = group_times(request, prediction.plan)
    screen = prediction_screen(prediction, None if fit else advice, explained, groups)
    return {
        "text": render(screen),
        "title": prediction.model,
        "cluster": prediction.cluster,
        "planLine": plan_line(prediction.plan),
        "speedLine": speed_line(prediction),
        "boxes": [asdict(box) for box in boxes(prediction)],
        "prediction": prediction.to_dict() | {"explain": explained},
        "names": MEMORY_LABELS | TIME_LABELS,
        "timeParts": list(TIME_PARTS),
        "memoryParts": list(MEMORY_PARTS),
        "stages": _stages(request, prediction),
        "network": _network(request.cluster),
        "groups": _folded(prediction.plan),
        "groupTimes": asdict(groups_table(groups)) if uneven(groups) else None,
        "timeline": _drawn(timeline) if timeline else None,
        "counts": counted(prediction.plan),
        "advice": [_advice(effect) for effect in advice],
        "verdict": verdict(prediction, fit) if fit else None,
    }


def _network(cluster: Cluster) -> dict[str, Any] | None:
    """Return the links of a cluster as an image, or why there is none; None for a single device."""
    if cluster.num_devices < 2:
        return None
    if cluster.num_devices > MAX_NETWORK:
        return {"image": None, "why": f"Networks of more than {MAX_NETWORK:,} devices are not drawn."}
    try:
        picture = drawing(topology_of(cluster))
    except SpecError as error:
        return {"image": None, "why": f"Not drawn: {error}"}
    code = base64.b64encode(picture.encode("utf-8")).decode("ascii")
    return {"image": f"data:image/svg+xml;base64,{code}", "why": None}


def _advice(effect: Effect) -> dict[str, Any]:
    assert effect.prediction is not None and effect.gain is not None
    return {
        "change": effect.change,
        "gain": effect.gain,
        "step": quantity.seconds(effect.prediction.step_time_s),
        "peak": quantity.memory(effect.prediction.memory.peak_bytes),
    }


def _stages(request: Asked, prediction: Prediction) -> list[dict[str, Any]]:
    """Return each stage's peak in parts against the capacity of its devices, equal groups once."""
    memory, cluster = prediction.memory, request.cluster
    rows, seen = [], set()
    for g, (group, parts) in enumerate(zip(prediction.plan.groups, request.stage_memory(), strict=True)):
        for s, (stage, peak) in enumerate(zip(group.stages, memory.per_stage_peak_bytes[g], strict=True)):
            device = min(map(cluster.device_of, stage.ranks), key=lambda device: device.capacity_bytes)
            row = {
                "stage": s,
                "peak": peak,
                "parts": parts[s],
                "capacity": device.capacity_bytes,
                "device": device.name,
                "fullest": memory.peak_rank in stage.ranks,
            }
            if (key := str(row)) not in seen:
                seen.add(key)
                rows.append({"group": g, **row})
    return rows


def _folded(plan: Plan) -> list[dict[str, Any]]:
    """Return the groups to draw, runs of groups that differ only in their ranks once with their number."""
    out: list[dict[str, Any]] = []
    for group in plan.groups:
        drawn = _group(group)
        shape = [{k: v for k, v in stage.items() if k != "ranks"} for stage in drawn["stages"]]
        if out and out[-1]["shape"] == shape and out[-1]["share"] == group.share:
            out[-1]["count"] += 1
            continue
        out.append({**drawn, "shape": shape, "count": 1})
    return [{k: v for k, v in group.items() if k != "shape"} for group in out]


def _group(group: Group) -> dict[str, Any]:
    return {
        "share": group.share,
        "microBatch": group.micro_batch,
        "microBatches": group.num_micro_batches,
        "schedule": group.schedule,
        "stages": [
            {
                "ranks": spans(stage.ranks),
                "layers": [list(span) for span in stage.layers],
                "tp": stage.tp,
                "cp": stage.cp,
                "dp": stage.inner_dp,
                "ep": stage.ep,
                "recompute": stage.recompute,
            }
            for stage in group.stages
        ],
    }


def _drawn(timeline: Timeline) -> dict[str, Any]:
    """Return the timeline in compact form: per track, tasks as [gap, length, name, part, micro-batch, chunk].

    Gap and length are in units of `tick` seconds; gap counts from the end of the task before. Of a very
    long step, the first and the last tasks are kept, and `hidden` is the span between.
    """
    events = [event for event in timeline.events if event.end_s > event.start_s]
    events, hidden = _ends_of(events)
    tick = timeline.step_time_s / 1e6 or 1e-9
    names: dict[str, int] = {}
    parts: dict[str, int] = {}
    tracks: dict[tuple[int, int, int, str], list[list[int]]] = {}
    clock: dict[tuple[int, int, int, str], int] = {}
    for event in sorted(events, key=lambda e: (e.group, e.stage, e.rank, _stream_order(e.stream), e.start_s)):
        track = (event.group, event.stage, event.rank, event.stream)
        start, end = round(event.start_s / tick), round(event.end_s / tick)
        row = [start - clock.get(track, 0), end - start, names.setdefault(event.name, len(names))]
        row += [parts.setdefault(event.part, len(parts)), event.micro_batch, event.chunk]
        tracks.setdefault(track, []).append(row)
        clock[track] = end
    return {
        "step": timeline.step_time_s,
        "tick": tick,
        "names": list(names),
        "parts": list(parts),
        "tracks": [
            {"group": g, "stage": s, "rank": r, "stream": name, "tasks": rows}
            for (g, s, r, name), rows in tracks.items()
        ],
        "hidden": hidden,
    }


def _stream_order(stream: str) -> tuple[int, str]:
    """Put compute first, then what shares its time, then transfers, then the rest."""
    named = next((i for i, name in enumerate(_STREAMS) if stream.startswith(name)), len(_STREAMS))
    return named, stream


def _ends_of(events: list[Event]) -> tuple[list[Event], dict[str, Any] | None]:
    """Return at most `MAX_DRAWN` events, the first and last of the step, and what lies between."""
    if len(events) <= MAX_DRAWN:
        return events, None
    ordered = sorted(events, key=lambda e: e.start_s)
    half = MAX_DRAWN // 2
    left_out = ordered[half:-half]
    span = {"from": left_out[0].start_s, "to": ordered[-half].start_s, "count": len(left_out)}
    return ordered[:half] + ordered[-half:], span
