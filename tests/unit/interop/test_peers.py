"""What other tools are given of a run, what is refused for them, and how a checkout is loaded."""

from dataclasses import replace

import pytest

from foreshard import api
from foreshard.errors import SpecError
from foreshard.interop.peers import PEERS, calculon, llm_analysis, load_peer, simumax
from foreshard.interop.peers.one_replica import one_replica
from foreshard.validation.predictors import RefusedRun, RunInputs

FAKE = """
class System:
    def __init__(self, cfg):
        self.cfg = cfg
"""
FAKE_LLM = """
class Llm:
    class Error(Exception):
        pass
    class Application:
        def __init__(self, cfg):
            self.cfg = cfg
    class Execution:
        @staticmethod
        def from_json(cfg):
            return cfg
    def __init__(self, app, log):
        self.app = app
    def compile(self, system, execution):
        if execution["batch_size"] == 8:
            raise Llm.Error("Mem tier1 needs 90 GiB")
        inside = system.cfg["networks"][0]["size"]
        self.seconds = self.app.cfg["num_blocks"] * execution["tensor_par"] * inside
    def run(self, system):
        pass
    def get_total_time(self):
        return self.seconds
    def get_mem_tier1_cap_req(self):
        return 5.0
"""


def inputs(model="gpt-22b", cluster="2x8xa100-sxm-80gb@200Gb/s", **choices):
    request = api.request(model, cluster, **({"tp": 8, "pp": 2, "global_batch": 16} | choices))
    plan = request.to_plan()
    return RunInputs(model=request.trained, cluster=request.cluster, plan=plan, framework=request.framework)


def calculon_words(run):
    found = one_replica(run)
    return calculon.application(run, found), calculon.execution(run, found)


def test_calculon_gets_the_run_in_its_words():
    application, execution = calculon_words(inputs(recompute="selective:core_attn", micro_batch=4))
    assert application == {
        "hidden": 6144,
        "feedforward": 24576,
        "seq_size": 2048,
        "attn_heads": 64,
        "attn_size": 96,
        "num_blocks": 48,
    }
    asked = {
        "num_procs": 16,
        "tensor_par": 8,
        "pipeline_par": 2,
        "data_par": 1,
        "tensor_par_net": 0,
        "pipeline_par_net": 1,
        "microbatch_size": 4,
        "batch_size": 16,
        "activation_recompute": "attn_only",
        "tensor_par_comm_type": "rs_ag",
        "optimizer_sharding": False,
    }
    assert {key: execution[key] for key in asked} == asked


def test_a_gated_mlp_keeps_its_weights():
    run = inputs("llama2-7b", tp=2, pp=1)
    application, _ = calculon_words(run)
    assert 2 * application["feedforward"] == 3 * run.model.blocks[0].ffn


def test_calculon_gets_the_network_and_node_of_the_cluster():
    system = {"networks": [{"size": 8}, {"bandwidth": 25}]}
    found = one_replica(inputs(cluster="4x4xa100-sxm-80gb@200Gb/s", tp=4, pp=4))
    made = calculon.system_of({"a100-sxm-80gb": system}, found)
    assert made["networks"] == [{"size": 4}, {"bandwidth": pytest.approx(200e9 / 8 / 4 / 1e9)}]
    assert system["networks"][0]["size"] == 8, "its own file is left as it is"


@pytest.mark.parametrize(
    ("model", "choices", "what"),
    [
        ("llama3-8b", {}, "grouped-query"),
        ("mixtral-8x7b", {"ep": 1}, "experts"),
        ("gpt-22b", {"tp": 1, "pp": 1, "zero": 3}, "ZeRO"),
        ("gpt-22b", {"tp": 4, "cp": 2}, "context"),
        ("gpt-22b", {"recompute": "every-2"}, "recompute every-2"),
        ("gpt-22b", {"schedule": "zb-h1"}, "schedule zb-h1"),
        ("gpt-22b", {"offload": "optimizer"}, "offload"),
        ("gpt-22b", {"precision": "fp32"}, "precision fp32"),
    ],
)
def test_calculon_refuses_what_it_cannot_express(model, choices, what):
    with pytest.raises(RefusedRun, match=what):
        calculon_words(inputs(model, **choices))


def test_llm_analysis_gets_the_run_in_its_words():
    run = inputs("mixtral-8x7b", "2x8xh100-sxm", tp=2, pp=1, ep=8)
    found = one_replica(run)
    sizes = llm_analysis.model_sizes(run, found)
    assert sizes["moe_num_experts"] == 8 and sizes["moe_top_k"] == 2 and sizes["num_key_value_heads"] == 8
    assert sizes["ffn_embed_dim"] == 14336 and sizes["mlp_gated_linear_units"] is True
    assert llm_analysis.parallel_sizes(found) == {
        "tp_size": 2,
        "pp_size": 1,
        "dp_size": 8,
        "rdp_size": 1,
        "ep_size": 8,
        "sp_size": 2,
    }
    plain = llm_analysis.parallel_sizes(one_replica(inputs(tp=4, pp=1, zero=0, sp=False)))
    assert (plain["dp_size"], plain["rdp_size"], plain["sp_size"]) == (1, 4, 1)


def test_simumax_gets_the_run_in_its_words():
    run = inputs("mixtral-8x7b", "2x8xb200-sxm@400Gb/s", tp=2, pp=2, ep=4, recompute="full")
    found = one_replica(run)
    model, strategy = simumax.model_of(run, found), simumax.strategy_of(run, found)
    assert (model["model_type"], model["expert_num"], model["topk"], model["layer_num"]) == ("moe", 8, 2, 32)
    assert (model["kv_head_num"], model["intermediate_size"], model["use_swiglu"]) == (8, 14336, True)
    asked = {
        "world_size": 16,
        "tp_size": 2,
        "pp_size": 2,
        "ep_size": 4,
        "micro_batch_num": 4,
        "enable_sequence_parallel": True,
        "recompute_granularity": "full_block",
        "recompute_layer_num": 32,
    }
    assert {key: strategy[key] for key in asked} == asked
    system = {"num_per_node": 1, "networks": {"inter_node": {"bandwidth": {"gbps": 1}}}}
    made = simumax.system_of({"b200-sxm": system}, found)
    assert made["num_per_node"] == 8
    assert made["networks"]["inter_node"]["bandwidth"]["gbps"] == pytest.approx(50.0)


@pytest.mark.parametrize(
    ("choices", "what"),
    [
        ({"zero": 3, "tp": 1, "pp": 1}, "ZeRO"),
        ({"precision": "fp32"}, "precision fp32"),
        ({"recompute": "every-2"}, "recompute every-2"),
    ],
)
def test_simumax_refuses_what_it_cannot_express(choices, what):
    run = inputs("llama2-7b", "2x8xb200-sxm", **({"tp": 2, "pp": 2} | choices))
    with pytest.raises(RefusedRun, match=what):
        simumax.strategy_of(run, one_replica(run))


def test_devices_of_two_kinds_are_refused():
    run = inputs(cluster="1x8xa100-sxm-80gb+1x8xh100-sxm")
    with pytest.raises(RefusedRun, match="several kinds"):
        one_replica(run)


def test_a_checkout_is_loaded_and_its_errors_are_refusals(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "calculon").mkdir()
    (tmp_path / "systems").mkdir()
    (tmp_path / "calculon" / "__init__.py").write_text(FAKE)
    (tmp_path / "calculon" / "llm.py").write_text(FAKE_LLM)
    for name in calculon.SYSTEMS.values():
        (tmp_path / "systems" / f"{name}.json").write_text('{"networks": [{"size": 1}, {"bandwidth": 1}]}')
    peer = load_peer(f"calculon={tmp_path}")
    answer = peer(inputs())
    assert answer.step_time_s == 48 * 8 * 8 and answer.allocated_bytes == 5.0
    with pytest.raises(RefusedRun, match="memory"):
        peer(replace(inputs(), plan=inputs(global_batch=8).plan))
    with pytest.raises(RefusedRun, match="no system file of rtx-3090"):
        peer(inputs(cluster="2x8xrtx-3090", precision="fp16"))


FAKE_SIMUMAX = """
class Config:
    @classmethod
    def init_from_dict(cls, values):
        return values

ModelConfig = StrategyConfig = SystemConfig = Config
"""
FAKE_PERF = """
from types import SimpleNamespace
class PerfLLM:
    def configure(self, strategy_config, model_config, system_config):
        assert model_config["hidden_size"] > 4096, "too narrow"
        self.strategy = strategy_config
    def run_estimate(self):
        print("much to say")
    def analysis_cost(self):
        return SimpleNamespace(data={"all_tokens_per_iter": 640.0, "throughput_per_accelerator": 5.0})
"""


def test_simumax_is_run_from_its_checkout_without_its_prints(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "simumax" / "core").mkdir(parents=True)
    (tmp_path / "configs" / "system").mkdir(parents=True)
    for name, text in (
        ("__init__", ""),
        ("core/__init__", ""),
        ("core/config", FAKE_SIMUMAX),
        ("core/perf_llm", FAKE_PERF),
    ):
        (tmp_path / "simumax" / f"{name}.py").write_text(text)
    for name in simumax.SYSTEMS.values():
        path = tmp_path / "configs" / "system" / f"{name}.json"
        path.write_text('{"networks": {"inter_node": {"bandwidth": {"gbps": 1}}}}')
    peer = load_peer(f"simumax={tmp_path}")
    assert peer(inputs(cluster="2x8xb200-sxm")).step_time_s == pytest.approx(640.0 / (5.0 * 16))
    assert capsys.readouterr().out == ""
    with pytest.raises(RefusedRun, match="SimuMax: too narrow"):
        peer(inputs("llama2-7b", "2x8xb200-sxm", tp=2))
    with pytest.raises(RefusedRun, match="no system file of a100-sxm-80gb"):
        peer(inputs())


@pytest.mark.parametrize("text", ["calculonn=/x", "calculon", "calculon=/no/such/folder", "simai=."])
def test_a_peer_that_is_not_there_is_named(text):
    with pytest.raises(SpecError) as caught:
        load_peer(text)
    assert caught.value.key == "--peer" and (caught.value.fix or caught.value.rule)


def test_every_peer_has_its_module():
    assert set(PEERS) == {"calculon", "llm-analysis", "simumax"}
