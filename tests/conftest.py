"""A stand-in predictor with simple, known arithmetic: what prints and draws is tested without the physics."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import settings

from foreshard.advise.request import Request
from foreshard.spec.prediction import MEMORY_PARTS, TIME_PARTS, Memory, Money, Prediction
from foreshard.spec.timeline import Event, Timeline

GIB = 2**30


def _times(plan):
    """Compute 1 s per 64 samples and rank-8ths; recompute adds a third; pp adds a bubble; tp adds comm."""
    group, stage = plan.groups[0], plan.groups[0].stages[0]
    compute = plan.global_batch * plan.seq_len / 8192 / len(plan.ranks)
    parts = dict.fromkeys(TIME_PARTS, 0.0)
    parts["compute"] = compute
    parts["recompute"] = compute / 3 if stage.recompute == "full" else 0.0
    parts["tensor_comm"] = 0.02 * compute * (stage.tp - 1)
    parts["bubble"] = compute * (len(group.stages) - 1) / max(1, group.num_micro_batches)
    parts["data_comm"] = 0.05 * (stage.zero > 1) * compute
    parts["optimizer"] = 0.0123
    return parts


def _memory(model, cluster, plan):
    stage = plan.groups[0].stages[0]
    shards = stage.tp * len(plan.groups[0].stages)
    weights = 2.0 * model.num_params / shards
    parts = dict.fromkeys(MEMORY_PARTS, 0.0)
    parts["parameters"] = weights / (stage.inner_dp if stage.zero == 3 else 1)
    parts["gradients"] = 2 * weights / (stage.inner_dp if stage.zero >= 2 else 1)
    parts["optimizer"] = 6 * weights / (stage.inner_dp if stage.zero >= 1 else 1)
    saved = 0.25 if stage.recompute == "full" else 1.0
    parts["activations"] = saved * plan.groups[0].micro_batch / stage.inner_dp * 2 * GIB
    parts["reserved"] = 1.5 * GIB
    peak = sum(parts.values())
    capacity = cluster.device_of(plan.ranks[0]).capacity_bytes
    return Memory(
        peak_bytes=peak,
        peak_allocated_bytes=peak - parts["reserved"],
        peak_reserved_bytes=peak,
        peak_rank=0,
        capacity_bytes=capacity,
        fits=peak <= capacity,
        breakdown_bytes=parts,
        per_stage_peak_bytes=tuple(
            tuple(peak * (1 - 0.05 * i) for i in range(len(group.stages))) for group in plan.groups
        ),
    )


def fake_predict(
    model,
    cluster,
    plan,
    *,
    engine="graph",
    network=None,
    costs="formula",
    calibration=None,
    fidelity="zero-shot",
    noise=None,
    host_thread=False,
    reliability=None,
    tokens=None,
    usd_per_device_hour=None,
    observed_step_s=None,
    speeds=None,
    other_jobs=(),
    bursts=False,
    timeline=False,
):
    parts = _times(plan)
    step = sum(parts.values())
    devices = len(plan.ranks)
    usd = None
    if usd_per_device_hour is not None:
        usd = usd_per_device_hour * devices * step / 3600
    return Prediction(
        step_time_s=step,
        step_time_interval_s=(0.93 * step, 1.08 * step),
        step_time_intervals_s={0.9: (0.93 * step, 1.08 * step)},
        interval=0.9,
        tokens_per_s=plan.tokens / step,
        samples_per_s=plan.global_batch / step,
        tokens_per_s_per_device=plan.tokens / step / devices,
        mfu=0.42,
        mfu_causal=0.40,
        mfu_bf16=0.42,
        hfu=0.42,
        time_breakdown_s=parts,
        memory=_memory(model, cluster, plan),
        cost=Money(
            usd_per_step=usd,
            usd_per_1b_tokens=None if usd is None else usd / plan.tokens * 1e9,
            usd_total=None if usd is None or tokens is None else usd / plan.tokens * tokens,
            price_date=None,
        ),
        energy_j_per_step=700.0 * devices * step,
        goodput=None,
        run_time_s=None if tokens is None else tokens * step / plan.tokens,
        bottleneck="compute",
        plan=plan,
        model=model.name,
        cluster=cluster.name,
        framework=plan.framework,
        engine=engine,
        costs=costs,
        fidelity=fidelity,
        evidence="stand-in for tests",
        assumptions=("every rank alike", "a <script> & a \u201cquote\u201d </script>"),
        explain={"step_time_s": "sum of its parts"},
        catalog_version="test",
        predict_s=0.001,
    )


def fake_stage_memory(request):
    """Scale the parts of the fullest stage to each stage's peak."""
    memory = _memory(request.model, request.cluster, request.to_plan())
    return tuple(
        tuple(
            {name: value * peak / memory.peak_bytes for name, value in memory.breakdown_bytes.items()}
            for peak in group
        )
        for group in memory.per_stage_peak_bytes
    )


def fake_timeline(plan, step_time_s):
    """1F1B of forwards (1) and backwards (2), transfers of 0.1, by direct simulation of ready times."""
    group = plan.groups[0]
    stages, batches = len(group.stages), group.num_micro_batches
    done: dict[tuple[str, int, int], float] = {}
    rows, clock, position = [], [0.0] * stages, [0] * stages
    orders = []
    for stage in range(stages):
        warm = min(batches, stages - stage - 1)
        order = [("forward", i) for i in range(warm)]
        for i in range(batches - warm):
            order += [("forward", warm + i), ("backward", i)]
        orders.append(order + [("backward", i) for i in range(batches - warm, batches)])
    while any(position[s] < len(orders[s]) for s in range(stages)):
        for stage in range(stages):
            while position[stage] < len(orders[stage]):
                op, micro = orders[stage][position[stage]]
                step = 1 if op == "forward" else -1
                before = stage - step
                needs = (op, before, micro) if 0 <= before < stages else ("forward", stage, micro)
                if op == "forward" and not 0 <= before < stages:
                    ready = 0.0
                elif needs in done:
                    ready = done[needs] + (0.1 if before != stage and 0 <= before < stages else 0.0)
                else:
                    break
                start = max(clock[stage], ready)
                end = start + (1.0 if op == "forward" else 2.0)
                rows.append((stage, "compute", op, "compute", start, end, micro))
                if 0 <= stage + step < stages:
                    rows.append((stage, f"send_{op}", f"send_{op}", "pipeline_comm", end, end + 0.1, micro))
                done[op, stage, micro] = clock[stage] = end
                position[stage] += 1
    last = max(clock)
    rows += [(s, "data", "gradient_reduce", "data_comm", clock[s], clock[s] + 0.5, -1) for s in range(stages)]
    rows += [(s, "compute", "optimizer", "optimizer", last + 0.5, last + 1, -1) for s in range(stages)]
    scale = step_time_s / (last + 1)
    events = tuple(
        Event(
            rank=group.stages[s].ranks[0],
            group=0,
            stage=s,
            stream=stream,
            name=name,
            part=part,
            start_s=a * scale,
            end_s=b * scale,
            micro_batch=micro,
            chunk=0 if micro >= 0 else -1,
        )
        for s, stream, name, part, a, b, micro in sorted(rows, key=lambda row: row[4])
    )
    return Timeline(events=events, step_time_s=step_time_s)


@pytest.fixture
def fake():
    """Return the stand-in: `predict(model, cluster, plan, **)`, `timeline(plan, step_s)`."""
    return SimpleNamespace(predict=fake_predict, timeline=fake_timeline)


@pytest.fixture
def stand_in(monkeypatch):
    """Put the stand-in where the product looks for its predictor."""
    import foreshard.predict as place

    def timed(model, cluster, plan, **asked):
        prediction = fake_predict(model, cluster, plan, **asked)
        return prediction, fake_timeline(plan, prediction.step_time_s)

    monkeypatch.setattr(Request, "stage_memory", fake_stage_memory)
    monkeypatch.setitem(place.__dict__, "predict", fake_predict)
    monkeypatch.setitem(place.__dict__, "predict_timeline", timed)


@pytest.fixture
def answered(fake, stand_in):
    """Return (request, prediction, timeline) of llama3-8b on two 8-device nodes, tp 2, pp 4."""
    from foreshard import api

    asked = api.request(
        api.load_model("llama3-8b"), api.load_cluster("2x8xh100-sxm"), tp=2, pp=4, global_batch=32
    )
    plan = asked.to_plan()
    prediction = fake.predict(asked.model, asked.cluster, plan, usd_per_device_hour=2.0, tokens=1e12)
    return asked, prediction, fake.timeline(plan, prediction.step_time_s)


LONG = {
    "test_fsdp2_memory",
    "test_readme",
    "test_choices",
    "test_settings",
    "test_one_space",
    "test_search",
    "test_mixed",
    "test_rental",
    "test_closed_form_laws",
    "test_shared_network_laws",
    "test_stale_forecasts",
    "test_guarantee",
    "test_simulated_run",
    "test_exactness",
    "test_tensor",
    "test_tensor_lost",
    "test_kept",
    "test_replan",
    "test_exported",
    "test_adaptive_run",
    "test_two_hosts",
}


def pytest_collection_modifyitems(items):
    """Begin the files that take longest: begun last, one of them leaves the other process idle."""
    items.sort(key=lambda item: item.path.stem not in LONG)


# The same examples on every machine and in every run.
settings.register_profile("fixed", derandomize=True, deadline=None)  # the machine may be busy
settings.load_profile("fixed")
