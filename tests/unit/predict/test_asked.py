"""What a prediction is asked for: words that are unknown lead to those that are known."""

from __future__ import annotations

import pytest

from foreshard import api
from foreshard.errors import SpecError
from foreshard.predict.measured.costs import load_costs


def test_an_unknown_cost_source_leads_to_the_file_of_calibrate():
    model, cluster = api.load_model("gpt2"), api.load_cluster("1x1xh100-sxm")
    with pytest.raises(SpecError, match="or the file that foreshard calibrate writes"):
        api.predict(model, cluster, costs="guess")


@pytest.mark.parametrize(
    ("text", "said"), [("{}", "missing key 'kind'"), ("", "the file is empty"), ("[]", "calibrate")]
)
def test_what_are_no_measured_costs_names_file_and_way_out(tmp_path, text, said):
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(SpecError, match=said) as caught:
        load_costs(str(path))
    assert caught.value.file == str(path) and caught.value.rule and "calibrate" in caught.value.fix


def test_flows_need_the_tasks_of_the_graph_engine():
    model, cluster = api.load_model("gpt2"), api.load_cluster("1x2xh100-sxm")
    with pytest.raises(SpecError, match="no tasks") as caught:
        api.predict(model, cluster, network="flow", engine="analytical")
    assert caught.value.key == "--network" and "--engine graph" in caught.value.fix


def test_an_unknown_network_leads_to_those_there_are():
    with pytest.raises(SpecError, match="network") as caught:
        api.predict(api.load_model("gpt2"), api.load_cluster("1x2xh100-sxm"), network="packets")
    assert caught.value.key == "--network"


def test_a_shared_network_is_told_for_each_class_of_transfers():
    model, cluster = api.load_model("llama3-8b"), api.load_cluster("2x8xh100-sxm")
    made = api.predict(model, cluster, network="flow", tp=2, pp=2, global_batch=16).to_dict()
    assert made["network"] == "flow"
    told = {one["collective"]: one for one in made["collectives"]}
    assert {"tensor_comm", "gradient_reduce", "parameter_gather", "pipeline_comm"} == set(told)
    for one in told.values():
        assert one["difference"] == pytest.approx(one["flow_s"] / one["closed_form_s"] - 1.0)
        assert one["busiest"]["resource"].startswith("rank ") and 0.0 < one["busiest"]["utilisation"] < 1.0
    assert api.predict(model, cluster, tp=2, pp=2, global_batch=16).to_dict()["collectives"] == []
