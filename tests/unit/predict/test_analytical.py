"""The closed form against arithmetic on its own stage times, and batches against single plans."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from foreshard import api
from foreshard.catalog.frameworks import load_framework
from foreshard.catalog.training import TrainingConstants
from foreshard.predict.analytical.engine import step_times
from foreshard.predict.analytical.stage import stage_times
from foreshard.predict.batch import PlannedRun, build_batch, with_constants

CONSTANTS = replace(TrainingConstants(), jitter=0.0)


def case_of(cluster="2x8xh100-sxm", model="llama3-8b", framework="megatron-core", **choices):
    model, cluster = api.load_model(model), api.load_cluster(cluster)
    plan = api.make_plan(model, cluster, **({"seq_len": 4096, "framework": framework} | choices))
    return PlannedRun(model=model, cluster=cluster, plan=plan, framework=load_framework(framework))


def times_of(*cases, constants=CONSTANTS):
    return step_times(build_batch(cases, constants))


def parts_of(case, constants=CONSTANTS):
    times = times_of(case, constants=constants)
    return {name: float(value[0]) for name, value in times.parts.items()}


def test_one_stage_takes_its_micro_batches():
    case = case_of("1x1xh100-sxm", global_batch=3)
    stage = stage_times(build_batch([case], CONSTANTS))
    busy = float(times_of(case).total[0]) - parts_of(case)["optimizer"]
    assert busy == pytest.approx(3 * stage.total.item(), rel=1e-12)


def test_bubble_is_one_passage_of_the_other_stages():
    case = case_of(pp=4, tp=4, global_batch=16)
    batch = build_batch([case], CONSTANTS)
    stage = stage_times(batch)
    passage = (stage.total * batch.multiplicity).sum() - stage.total.max()
    assert parts_of(case)["bubble"] == pytest.approx(passage, rel=1e-12)


def test_virtual_stages_divide_the_bubble():
    plain, cut = (parts_of(case_of(pp=4, tp=4, vpp=vpp, global_batch=16)) for vpp in (1, 4))
    assert cut["bubble"] < 0.35 * plain["bubble"]
    assert cut["compute"] == pytest.approx(plain["compute"], rel=1e-9)


def test_zero_bubble_fills_with_weight_gradients():
    bubble = {
        s: parts_of(case_of(pp=4, tp=4, schedule=s, global_batch=16))["bubble"] for s in ("1f1b", "zb-h1")
    }
    assert 0.0 < bubble["zb-h1"] < 0.5 * bubble["1f1b"]


def test_full_recompute_repeats_the_forward():
    batches = [
        build_batch([case_of("1x1xh100-sxm", recompute=r, global_batch=1)], CONSTANTS)
        for r in ("none", "full")
    ]
    none, full = (stage_times(batch) for batch in batches)
    layers = none.parts["compute"].item()
    assert 0.25 * layers < full.parts["recompute"].item() < 0.4 * layers
    assert none.parts["recompute"].item() == 0.0


def test_collectives_appear_with_their_degrees():
    single = parts_of(case_of("1x1xh100-sxm", global_batch=1))
    assert (
        single["tensor_comm"]
        == single["context_comm"]
        == single["data_comm"]
        == single["pipeline_comm"]
        == 0.0
    )
    assert parts_of(case_of(tp=8, global_batch=2))["tensor_comm"] > 0.0
    assert parts_of(case_of(global_batch=16))["data_comm"] > 0.0
    assert parts_of(case_of(pp=2, tp=8, global_batch=2))["pipeline_comm"] > 0.0
    assert parts_of(case_of(model="mixtral-8x7b", ep=8, global_batch=16))["expert_comm"] > 0.0


def test_jitter_is_the_only_straggler():
    case = case_of("16x8xh100-sxm", tp=8, global_batch=16)
    jittery = times_of(case, constants=replace(CONSTANTS, jitter=0.01))
    plain = float(times_of(case).total[0])
    assert float(jittery.total[0]) == pytest.approx(plain * (1.0 + 0.01 * 4.0), rel=1e-12)


def test_a_batch_prices_each_plan_as_alone():
    cases = [
        case_of(tp=2, pp=4, global_batch=64),
        case_of(tp=8, pp=2, vpp=2, global_batch=8),
        case_of("4x8xa100-sxm-80gb", framework="composer", zero=3, global_batch=128),
        case_of(model="mixtral-8x7b", ep=4, tp=2, global_batch=32),
    ]
    together = times_of(*cases).total
    alone = np.array([times_of(case).total[0] for case in cases])
    assert together == pytest.approx(alone, rel=1e-12)


def test_with_constants_prices_anew():
    batch = build_batch([case_of(tp=2, global_batch=16)], CONSTANTS)
    slow = replace(CONSTANTS, gemm_derate=2.0 * CONSTANTS.gemm_derate)
    again = step_times(with_constants(batch, slow)).total
    assert again == pytest.approx(step_times(build_batch([case_of(tp=2, global_batch=16)], slow)).total)
    assert again[0] > 1.3 * step_times(batch).total[0]
