"""Plans for a tool: those that it trains as predicted."""

import pytest

from foreshard import api
from foreshard.errors import LimitError, SpecError
from foreshard.interop.exporters import TRAINERS, refusals

pytestmark = pytest.mark.usefixtures("stand_in")


@pytest.mark.parametrize("tool", [*TRAINERS, "torchtitan"])
def test_a_plan_for_a_tool_is_exported_to_it(tool):
    found = api.plan("llama3-8b", "2x4xh100-sxm", global_batch=64, seq_len=2048, to=tool, top=3)
    assert found.plans and found.gap < 0.05
    model, cluster = api.load_model("llama3-8b"), api.load_cluster("2x4xh100-sxm")
    for one in found.plans:
        api.export(one.plan, tool, model=model, cluster=cluster)


def test_a_tool_is_no_faster_than_the_whole_space_and_the_note_says_what_it_cannot_train():
    asked = {"global_batch": 24, "seq_len": 1024, "budget_s": 5}
    model, cluster = api.load_model("gpt2-xl"), api.load_cluster("1x6xa100-sxm-80gb")
    whole, ours = (api.plan(model, cluster, **asked, **more) for more in ({}, {"to": "megatron"}))
    assert ours.plans[0].prediction.step_time_s >= whole.lower_bound_step_time_s
    refused = refusals(whole.plans[0].plan, "megatron", model=model, cluster=cluster)
    assert bool(refused) == any("megatron cannot train the chosen plan" in note for note in whole.notes)
    assert not any("cannot train" in note for note in ours.notes)


def test_a_note_says_what_keeps_the_tool_from_training_an_uneven_plan():
    cluster = "1x2xh100-sxm+1x2xa100-sxm-80gb@3200Gb/s"
    found = api.plan("gpt2-xl", cluster, global_batch=24, seq_len=1024, budget_s=3)
    (note,) = [note for note in found.notes if note.startswith("megatron cannot train the chosen plan")]
    assert "foreshard run can" in note and "--to" not in note


def test_a_tool_that_trains_no_plan_of_the_model_is_said_before_the_search():
    with pytest.raises(SpecError, match="windowed attention") as caught:
        api.plan("gemma2-9b", "8xh100", global_batch=64, to="megatron")
    assert caught.value.key == "--to"
    with pytest.raises(SpecError, match="adapters"):
        api.plan("llama3-8b", "8xh100", global_batch=64, to="megatron", lora="16")
    with pytest.raises(SpecError, match="nodes that differ"):
        api.plan("llama3-8b", "1x8xh100+1x8xa100", global_batch=64, to="megatron")
    with pytest.raises(SpecError, match="megatron, torchtitan"):
        api.plan("llama3-8b", "8xh100", global_batch=64, to="slurm")


def test_where_a_tool_refuses_every_plan_that_fits_the_reasons_are_counted():
    found = api.plan("qwen3-8b", "8xh100", global_batch=64, seq_len=2048, to="torchtitan@0.2", pp=2)
    assert not found.plans and isinstance(found.infeasible, LimitError)
    assert "pp 2 of qwen3 (it pipelines Llama 3 and DeepSeek) (" in str(found.infeasible)


def test_shard_groups_that_a_framework_has_not_are_refused():
    with pytest.raises(SpecError, match="has no shard groups"):
        api.plan("llama3-8b", "8xh100", global_batch=64, framework="deepspeed", shard_size=4)


@pytest.mark.parametrize(
    ("tool", "framework"),
    [
        ("fsdp", "deepspeed"),
        ("deepspeed", "megatron-core"),
        ("torchtitan", "torchtitan@0.2"),
        ("megatron", "hf"),
    ],
)
def test_a_plan_for_a_tool_is_not_timed_as_of_another(tool, framework):
    with pytest.raises(SpecError, match=f"a plan of {framework} for {tool}") as caught:
        api.plan("llama3-8b", "8xh100", global_batch=64, to=tool, framework=framework)
    assert caught.value.key == "--framework"


def test_the_note_is_of_the_release_that_the_plan_is_of():
    asked = {"global_batch": 64, "seq_len": 2048, "pp": 2, "budget_s": 5}
    found = api.plan("qwen3-8b", "8xh100", framework="torchtitan@0.2", **asked)
    (note,) = [note for note in found.notes if "cannot train the chosen plan" in note]
    assert note.startswith("torchtitan@0.2 ") and "plan --to torchtitan@0.2" in note
