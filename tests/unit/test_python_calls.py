"""What a user of Python passes: numbers of numpy, enums, paths, dicts, answers; anything else is refused."""

import inspect
import json
from enum import Enum
from pathlib import Path

import numpy as np
import pytest

import foreshard
from foreshard.errors import SpecError

CONFIG = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 16,
    "num_hidden_layers": 4,
    "vocab_size": 32000,
}
CLUSTER = {"nodes": [{"count": 1, "per_node": 8, "device": "h100-sxm"}]}


class Kind(Enum):
    BF16 = "bf16"
    DDP = "ddp"


@pytest.fixture(scope="module")
def usual():
    return foreshard.predict("llama3.2-1b", "8xh100", tp=2)


@pytest.mark.parametrize(
    "choices",
    [
        {"tp": np.int64(2)},
        {"tp": np.array(2), "micro_batch": np.int32(1)},
        {"tp": 2, "sp": np.bool_(True)},
        {"tp": 2, "dtype": Kind.BF16},
        {"tp": 2, "bf16": True},
        {"tp": 2, "fp8": False},
        {"tp": 2, "zero_stage": 1},
        {"tensor_model_parallel_size": "2", "gradient_checkpointing": False},
    ],
)
def test_values_of_other_types_mean_the_same(usual, choices):
    assert foreshard.predict("llama3.2-1b", "8xh100", **choices).step_time_s == usual.step_time_s


def test_a_plan_is_its_file_what_that_holds_or_an_answer(tmp_path, usual):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(usual.to_dict()))
    held = usual.to_dict()["plan"]
    for plan in (path, str(path), held, usual.to_dict(), usual.plan, usual):
        assert foreshard.predict("llama3.2-1b", "8xh100", plan).step_time_s == usual.step_time_s


def test_a_model_and_a_cluster_are_paths_or_what_their_files_hold(tmp_path):
    model, cluster = tmp_path / "config.json", tmp_path / "site.toml"
    model.write_text(json.dumps(CONFIG))
    cluster.write_text('[[nodes]]\ncount = 1\nper_node = 8\ndevice = "h100-sxm"\n')
    found = {
        foreshard.predict(one, on, seq=2048).step_time_s
        for one in (model, CONFIG)
        for on in (cluster, CLUSTER)
    }
    assert len(found) == 1


def test_choices_of_a_search_are_any_collection():
    request = {"global_batch": np.int64(32), "seq": 1024, "budget_s": 0.5}
    found = foreshard.plan("llama3.2-1b", "4xh100", tp=np.array([1, 2]), forbid="tp=2", **request)
    assert {stage.tp for group in found.plans[0].plan.groups for stage in group.stages} == {1}


def test_slow_ranks_and_jitter_are_read_as_on_the_command_line():
    asked = {"engine": "event", "seq": 1024, "seeds": 2, "framework": Kind.DDP}
    one, other = (
        foreshard.predict("llama3.2-1b", "8xh100", slow=slow, jitter=jitter, **asked)
        for slow, jitter in (({0: 1.5}, 0.03), ({np.int64(0): np.float32(1.5)}, "3%"))
    )
    assert one.step_time_s == other.step_time_s


@pytest.mark.parametrize(
    ("model", "cluster", "choices", "said"),
    [
        (8, "8xh100", {}, "no model: 8"),
        (None, "8xh100", {}, "no model: None"),
        ("llama3-8b", None, {}, "no cluster: None"),
        ("llama3-8b", ["h100"] * 8, {}, "no cluster"),
        ("llama3-8b", "8xh100", {"plan": 3}, "no plan: 3"),
        ("llama3-8b", "8xh100", {"tp": [2]}, "Must be a whole number"),
        ("llama3-8b", "8xh100", {"tp": float("nan")}, "Must be a whole number"),
        ("llama3-8b", "8xh100", {"lora": {"r": 16}}, "--lora"),
        ("llama3-8b", "8xh100", {"engine": "event", "slow": [1.5]}, r"\{12: 1.5\}"),
        (Path("none.json"), "8xh100", {}, "none.json: cannot read"),
    ],
)
def test_what_is_none_of_them_is_refused(model, cluster, choices, said):
    with pytest.raises(SpecError, match=said):
        foreshard.predict(model, cluster, **choices)


@pytest.mark.parametrize(
    ("written", "number"),
    [
        ({"observed_step_s": "250 ms"}, {"observed_step_s": 0.25}),
        (
            {"tokens": "2B tokens", "usd_per_device_hour": "$2.50/h"},
            {"tokens": 2e9, "price_per_gpu_hour": 2.5},
        ),
        (
            {"mtbf_h": "5 years", "restart_s": "5 min", "checkpoint_bandwidth": "10 GB/s", "tokens": "1T"},
            {"mtbf_h": 43830, "restart_s": 300, "checkpoint_bytes_per_s": 1e10, "tokens": 1e12},
        ),
    ],
)
def test_amounts_are_read_as_on_the_command_line(written, number):
    one, other = (foreshard.predict("llama3.2-1b", "8xh100", **asked) for asked in (written, number))
    first, second = ({**made.to_dict(), "predict_s": 0} for made in (one, other))
    assert first == second


@pytest.mark.parametrize(
    ("verb", "word", "ours"),
    [("predict", "price_per_hour", "--usd-per-device-hour"), ("plan", "deadline", "--max-hours")],
)
def test_words_that_are_not_taken_are_answered_with_ours(verb, word, ours):
    with pytest.raises(SpecError) as caught:
        getattr(foreshard, verb)("llama3.2-1b", "8xh100", global_batch=64, **{word: 2})
    assert caught.value.fix == f"Write {ours}"


def test_instances_to_rent_are_compared_from_python():
    asked = {"global_batch": 64, "seq": "1k", "tokens": "1B", "max_devices": 8, "budget_s": 1}
    found = foreshard.plan("gpt2", rent="lambda", **asked)
    assert {one.instance.partition("-")[0] for one in found.offers} == {"lambda"}
    assert "Rent" in repr(found) and "<table>" in found._repr_html_()
    for wrong in ({"rent": "alibaba"}, {"rent": "all", "cluster": "8xh100"}, {}):
        with pytest.raises(SpecError):
            foreshard.plan("gpt2", **asked, **wrong)


def test_a_verb_says_what_it_takes_though_a_layer_has_its_name():
    assert "cluster" in inspect.signature(foreshard.predict).parameters
