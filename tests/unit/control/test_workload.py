"""The job of a scenario: seconds and bytes are the predictor's, rates and prices the cluster's."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from foreshard.catalog.clusters import load_cluster
from foreshard.catalog.models import load_model
from foreshard.control.nominal import predicted_chain
from foreshard.errors import SpecError
from foreshard.planner.request import checked_request
from foreshard.predict import predict
from foreshard.simulate.workload import cluster_of, model_of, workload
from foreshard.spec.plan import Group, Plan, Stage
from foreshard.spec.scenario import Scenario

TWO_RACKS = {
    "nodes": [
        {
            "count": 1,
            "device": "a100-sxm-80gb",
            "per_node": 2,
            "nic": "100 Gb/s",
            "rack": "a",
            "usd_per_h": 4.0,
        },
        {"count": 2, "device": "h100-sxm", "per_node": 1, "nic": "200 Gb/s", "rack": "b", "usd_per_h": 5.0},
    ],
    "links": [{"between": ["a", "b"], "bandwidth": "10 Gb/s", "latency": "1 ms"}],
}
SCENARIO = Scenario(
    model="gpt2-medium", cluster=TWO_RACKS, global_batch=64, seq_len=1024, egress_usd_per_gb=0.02
)


def work_of(scenario=SCENARIO):
    return workload(scenario, load_model(scenario.model), cluster_of(scenario))


def test_layers_take_what_the_engine_says():
    """Twelve equal blocks take twelve times one, a micro-batch of four no more per sample than of one."""
    work = work_of()
    blocks = work.chain.layer_s[0, 1:-1]
    assert blocks == pytest.approx(blocks[0]) and len(blocks) == 24
    assert work.chain.layer_s[2].sum() < work.chain.layer_s[0].sum()
    wider = work_of(replace(SCENARIO, micro_batch=4))
    assert (wider.chain.layer_s.sum(1) <= work.chain.layer_s.sum(1)).all()


def test_bytes_are_those_of_the_memory_model():
    work, model = work_of(), load_model("gpt2-medium")
    # Megatron-core keeps 2 bytes of weights, 4 of gradients and 12 of fp32 weights and moments a parameter.
    block = model.blocks[0].num_params
    assert work.chain.sync_bytes[1] == pytest.approx(4 * block)
    assert work.chain.state_bytes[1] == pytest.approx(18 * block)
    assert work.chain.boundary_bytes[0] == 2 * 2 * model.hidden * 1024


SMALL = (
    ("gpt2-medium", "v100-sxm-16gb", "fp16", 1, 1024),
    ("gpt-neo-1.3b", "a100-sxm-80gb", "bf16", 4, 2048),
    ("llama3.2-1b", "a100-sxm-40gb", "bf16", 1, 512),
    ("llama3-8b", "h200-sxm", "bf16", 1, 4096),
    ("bert-large", "l4", "bf16", 8, 512),
)


@pytest.mark.parametrize(
    ("model", "device", "precision", "micro_batch", "seq_len", "stages"),
    [
        *((*case, stages) for case in SMALL for stages in (1, 2, 3)),
        ("llama3-70b", "h200-sxm", "bf16", 1, 2048, 16),  # no device holds much of it
    ],
)
def test_a_stage_that_the_chain_has_room_for_fits_as_predicted(
    model, device, precision, micro_batch, seq_len, stages
):
    """What is left of a device by the chain is never more than by the prediction of the same plan."""
    known, cluster = load_model(model), load_cluster(f"{stages}x1x{device}@100Gb/s")
    asked = checked_request(known, cluster, global_batch=64, seq_len=seq_len, precision=precision)
    chain = predicted_chain(asked, micro_batch)
    ends = np.linspace(0, chain.num_layers, stages + 1).astype(int).tolist()
    group = Group(
        share=64,
        micro_batch=micro_batch,
        stages=tuple(Stage(ranks=(i,), layers=(cut,)) for i, cut in enumerate(pairwise(ends))),
    )
    plan = Plan(global_batch=64, seq_len=seq_len, groups=(group,), precision=precision)
    peaks = predict(known, cluster, plan).memory.per_stage_peak_bytes[0]
    for i, (start, stop) in enumerate(pairwise(ends)):
        states = chain.before_state[stop] - chain.before_state[start]
        saved = (stages - i) * micro_batch * (chain.before_saved[stop] - chain.before_saved[start])
        left_by_chain = chain.memory_bytes[i] - states - saved
        left = cluster.device_of(i).capacity_bytes - peaks[i]
        assert left_by_chain <= left + 0.02 * peaks[i]
        assert left_by_chain >= left - 0.35 * peaks[i]


def test_rates_delays_prices_and_egress_are_those_of_the_links():
    state, link_of = work_of().state, work_of().link_of
    assert state.usd_per_h.tolist() == [2.0, 2.0, 5.0, 5.0]
    assert state.bandwidth_bytes_per_s[0, 1] == 300e9
    assert state.bandwidth_bytes_per_s[0, 2] == 1.25e9 and state.bandwidth_bytes_per_s[2, 3] == 25e9
    assert state.latency_s[0, 2] > 1e-3 > state.latency_s[2, 3]
    assert state.usd_per_byte[0, 2] == pytest.approx(0.02e-9) and state.usd_per_byte[2, 3] == 0.0
    assert (link_of >= 0).sum() == 8


def test_factors_make_a_state():
    work = work_of()
    link, available = np.array([0.5]), np.array([True, True, False, True])
    state = work.at(
        speed=np.full(4, 0.5), price=np.full(4, 2.0), link=link, carbon=np.ones(4), available=available
    )
    assert state.bandwidth_bytes_per_s[0, 2] == 0.625e9 and state.bandwidth_bytes_per_s[0, 1] == 300e9
    assert state.usd_per_h.tolist() == [4.0, 4.0, 10.0, 10.0] and not state.available[2]


def test_devices_without_price_or_precision_are_refused():
    with pytest.raises(SpecError, match="has no fp8"):
        work_of(replace(SCENARIO, precision="fp8"))
    bare = {"nodes": [{"count": 1, "device": "rtx-3090", "per_node": 2}]}
    with pytest.raises(SpecError, match="no price"):
        work_of(replace(SCENARIO, cluster=bare))
    own = {"nodes": TWO_RACKS["nodes"], "devices": [{"name": "x", "base": "h100-sxm"}]}
    with pytest.raises(SpecError, match="devices of one's own"):
        work_of(replace(SCENARIO, cluster=own))


@pytest.mark.parametrize(("key", "load"), [("model", model_of), ("cluster", cluster_of)])
def test_an_unknown_name_is_said_to_stand_in_the_scenario(key, load):
    with pytest.raises(SpecError, match=f"^s.toml: {key}: .*nosuch"):
        load(replace(SCENARIO, file="s.toml", **{key: "nosuch"}))
