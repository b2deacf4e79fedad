"""Intervals on devices of an architecture that nobody has measured."""

from foreshard import api
from foreshard.catalog.clusters import load_cluster
from foreshard.catalog.frameworks import frameworks
from foreshard.catalog.models import load_model
from foreshard.catalog.shipped import shipped
from foreshard.predict import predict
from foreshard.predict.interval import TRAINED, interval_evidence, points_of
from foreshard.spec.degrees import plan_from_degrees


def test_points_of_unmeasured_architectures_are_those_of_the_class_one_wider():
    points = {"dense:flash:wide:fitted": [[1.0]], "dense:flash:narrow:fitted": [[2.0]]}
    assert points_of("dense:flash:wide:datasheet", points) == [[1.0]]
    assert points_of("moe:flash:wide:datasheet", points) == []


def test_kernels_without_a_training_run_are_no_evidence_of_a_step():
    assert interval_evidence("fitted", {"hopper", "ampere"}) == "fitted"
    assert interval_evidence("fitted", {"hopper", "gaudi"}) == "unseen"
    assert interval_evidence("framework not measured", {"hopper"}) == "unseen"

    def width(device):
        model = load_model("llama3-70b")
        plan = plan_from_degrees(80, 8, tp=8, micro_batch=2, global_batch=8, seq_len=8192, precision="bf16")
        made = predict(model, load_cluster(f"1x8x{device}"), plan, engine="analytical")
        return made.step_time_interval_s[1] / made.step_time_s, made.evidence

    assert width("gaudi-2")[0] > width("a100-sxm-80gb")[0]
    assert width("gaudi-2")[1] == "architecture not measured"


def test_evidence_is_fitted_only_where_the_framework_ran_on_the_architecture():
    def made(framework, device):
        run = {"framework": framework, "tp": 2, "seq": 2048, "engine": "analytical"}
        return api.predict("llama3-8b", f"1x8x{device}", **run)

    assert made("megatron-core", "h100-sxm").evidence == "fitted"
    assert made("composer", "a100-sxm-80gb").evidence == "fitted"
    assert made("torchtitan", "h100-sxm").evidence == "framework not measured"
    assert made("composer", "b200-sxm").evidence == "framework not measured there"
    assert made("megatron-core", "t4").evidence == "architecture not measured"
    narrow, wide = (made(name, "h100-sxm") for name in ("composer", "torchtitan"))
    ratio = [one.step_time_interval_s[1] / one.step_time_s for one in (narrow, wide)]
    assert ratio[1] > ratio[0]


def test_the_shipped_pairs_are_those_of_the_fit():
    """Every constant of the fit was fitted on rows whose framework and architecture the file lists."""
    table = shipped("measured_stacks.toml")
    assert all(archs and list(archs) == sorted(set(archs)) for archs in table.values())
    assert set(table) <= {framework.name for framework in frameworks()}
    assert {arch for archs in table.values() for arch in archs} <= TRAINED
