"""Commands on modules that are traced: classic networks and a user's own."""

import json
import sys
from functools import partial

import pytest

import foreshard
from foreshard.api import trace
from foreshard.errors import SpecError
from foreshard.report.trace import trace_object

pytest.importorskip("torch")

NET = """
import torch
from torch import nn

def net():
    layers = [nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)]
    return nn.Sequential(*layers), torch.empty(1, 3, 32, 32)

def with_loss():
    module, image = net()
    return module, image, lambda out: out.float().logsumexp(-1).mean()

def bare():
    return net()[0]

def encoder():
    layer = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True)
    return nn.TransformerEncoder(layer, 2), torch.empty(1, 32, 64)

def one_layer():
    return nn.Linear(9, 9), torch.empty(1, 9)

def wrong():
    return 3, 4
"""


@pytest.fixture
def net(tmp_path):
    path = tmp_path / "net.py"
    path.write_text(NET)
    return path


def test_learned_costs_of_a_module_are_refused_rather_than_ignored(shell, net):
    answer = shell("predict", f"{net}:net", "1x4xa40", "--costs", "learned")
    assert answer.code == 2
    assert "--costs" in answer.err and "priced by formulas" in answer.err


@pytest.mark.parametrize("factory", ["net", "with_loss"])
def test_predict_takes_a_module_with_example_inputs(shell, net, factory):
    answer = shell("predict", f"{net}:{factory}", "1x4xrtx-3090", "--micro-batch", "32", "--json")
    assert answer.code == 0
    assert answer.json["model"] == factory and answer.json["costs"] == "formula"
    low, high = answer.json["step_time_interval_s"]
    assert low < answer.json["step_time_s"] < high
    assert sum(answer.json["time_breakdown_s"].values()) == pytest.approx(answer.json["step_time_s"])


def test_tensor_parallelism_of_a_module_or_why_there_is_none(shell, net, tmp_path):
    made = shell("predict", f"{net}:encoder", "1x8xh100-sxm", "--tp", "2", "--pp", "2", "--json")
    assert made.code == 0 and made.json["time_breakdown_s"]["tensor_comm"] > 0
    assert any(text.startswith("tensor parallelism: 12 parameters") for text in made.json["assumptions"])
    (tmp_path / "plan.json").write_text(json.dumps(made.json["plan"]))
    again = shell("predict", f"{net}:encoder", "1x8xh100-sxm", "--plan", tmp_path / "plan.json", "--json")
    assert again.json["step_time_s"] == made.json["step_time_s"]
    called = foreshard.predict(f"{net}:encoder", "1x8xh100-sxm", tp=2, pp=2)
    assert called.step_time_s == made.json["step_time_s"]
    planned = shell(
        *("plan", f"{net}:encoder", "1x2xh100-sxm", "--global-batch", "4", "--max-tp", "1"),
        *("--budget-s", "1", "--json"),
    )
    degrees = {
        stage["tp"]
        for each in planned.json["plans"]
        for group in each["plan"]["groups"]
        for stage in group["stages"]
    }
    assert planned.code == 0 and degrees == {1}
    refused = shell("predict", f"{net}:one_layer", "1x2xh100-sxm", "--tp", "2")
    assert refused.code == 2 and "weight (9 is no multiple of 2)" in refused.err
    assert shell("predict", f"{net}:one_layer", "1x2xh100-sxm").code == 0


def test_images_are_counted_as_samples(shell):
    text = shell("predict", "resnet18", "1x2xa100-sxm-40gb").out
    assert "Cost of 1M samples" in text and " samples/s" in text and "tokens" not in text


def test_a_network_by_name_and_a_plan_of_it(shell, tmp_path):
    first = shell("predict", "ResNet18", "1x2xrtx-3090", "--micro-batch", "16", "--dtype", "fp16", "--json")
    assert first.code == 0 and first.json["model"] == "resnet18"
    out = tmp_path / "plan.json"
    planned = shell(
        *("plan", "resnet18", "1x1xa100-sxm-40gb+1x1xrtx-3090", "--global-batch", "64"),
        *("--budget-s", "2", "-o", out, "--json"),
    )
    assert planned.code == 0 and planned.json["gap"] >= 0
    again = shell("predict", "resnet18", "1x1xa100-sxm-40gb+1x1xrtx-3090", "--plan", out, "--json")
    assert again.code == 0


@pytest.mark.parametrize(
    ("more", "key"),
    [
        (("--seq", "128"), "--seq"),
        (("--pp", "9"), "--pp"),
        (("--dtype", "fp8"), "--dtype"),
        (("--bursts",), "--bursts"),
        (("--bursts", "--other-jobs", "jobs.toml"), "--other-jobs"),
    ],
)
def test_what_a_traced_module_does_not_take_is_named(shell, net, more, key):
    answer = shell("predict", f"{net}:net", "1x4xrtx-3090", *more, "--json")
    assert answer.code == 2
    assert answer.json["error"]["key"] == key


@pytest.mark.parametrize(("factory", "words"), [("bare", "example inputs"), ("wrong", "example inputs")])
def test_a_factory_that_returns_something_else_is_told_what_to_return(shell, net, factory, words):
    answer = shell("predict", f"{net}:{factory}", "1x4xrtx-3090", "--json")
    assert answer.code == 2
    error = answer.json["error"]
    assert words in f"{error['rule']} {error.get('fix')}"


def test_explain_lists_what_was_assumed_of_a_traced_module(shell, net):
    """The screen points to it."""
    words = ("predict", f"{net}:net", "1x2xrtx-3090", "--micro-batch", "4", "--dtype", "fp16")
    assert "assumptions (--explain)" in shell(*words).out
    explained = shell(*words, "--explain").out
    assert "Assumptions" in explained and "8 samples of a step" in explained and "tokens" not in explained


def test_python_takes_what_is_traced_by_its_name(shell, net):
    """As the commands do: a module of a file, here; networks go the same way."""
    where, factory = "1x2xrtx-3090", f"{net}:net"
    made = foreshard.predict(factory, where, micro_batch=4, dtype="fp16")
    answer = shell("predict", factory, where, "--micro-batch", "4", "--dtype", "fp16", "--json")
    assert made.step_time_s == answer.json["step_time_s"]
    planned = foreshard.plan(factory, where, global_batch=8, dtype="fp16", budget_s=2)
    assert planned.plans[0].prediction.step_time_s <= made.step_time_s
    for asked, key in (({"seq": 8}, "--seq"), ({"objective": "cost"}, "--objective"), ({}, "--global-batch")):
        batch = {} if key == "--global-batch" else {"global_batch": 8}
        with pytest.raises(SpecError) as refused:
            foreshard.plan(factory, where, **asked, **batch)
        assert refused.value.key == key


def test_a_plan_says_how_a_module_is_traced_and_excludes_degrees(shell, net, tmp_path):
    """The precision of a plan is the module's; V100 has no other than fp16."""
    factory, where, out = f"{net}:one_layer", "1x2xv100-sxm-32gb", tmp_path / "plan.json"
    made = shell("predict", factory, where, "--micro-batch", "8", "--dtype", "fp16", "--json")
    out.write_text(json.dumps(made.json["plan"]))
    again = shell("predict", factory, where, "--plan", out, "--json")
    assert again.code == 0 and again.json["step_time_s"] == made.json["step_time_s"]
    assert foreshard.predict(factory, where, str(out)).step_time_s == made.json["step_time_s"]
    for flags, choices in (
        (("--tp", "2", "--micro-batch", "64"), {"tp": 2, "micro_batch": 64}),
        (("--dtype", "bf16"), {"dtype": "bf16"}),
    ):
        with pytest.raises(SpecError, match=r"a plan and .* together") as caught:
            foreshard.predict(factory, where, str(out), **choices)
        with pytest.raises(SpecError) as of_catalog:
            foreshard.predict("gpt2", where, str(out), **choices)
        assert str(caught.value) == str(of_catalog.value)
        refused = shell("predict", factory, where, "--plan", out, *flags, "--json")
        assert refused.code == 2 and refused.json["error"]["what"] == caught.value.what


def test_several_precisions_are_refused_rather_than_all_but_one_left_out(shell, net):
    factory, where = f"{net}:one_layer", "1x2xrtx-3090"
    answer = shell("plan", factory, where, "--global-batch", "8", "--dtype", "bf16,fp32", "--json")
    assert answer.code == 2
    for given in ("bf16,fp32", ["bf16", "fp32"], ("bf16", "fp32")):
        with pytest.raises(SpecError, match="no trace in bf16,fp32") as caught:
            foreshard.plan(factory, where, global_batch=8, dtype=given)
        error = answer.json["error"]
        assert all(getattr(caught.value, name) == error[name] for name in ("what", "rule", "fix"))


@pytest.mark.parametrize("stated", ["two", 0, True, 2.0])
def test_degrees_of_a_traced_module_are_whole_numbers(net, stated):
    factory, where = f"{net}:one_layer", "1x2xrtx-3090"
    with pytest.raises(SpecError, match="Must be a whole number from 1") as caught:
        foreshard.plan(factory, where, global_batch=8, max_tp=stated)
    assert caught.value.key == "--max-tp"
    with pytest.raises(SpecError, match="Must be a whole number from 1"):
        foreshard.predict(factory, where, tp=stated)


def test_degrees_may_be_a_text_as_for_other_models(net):
    assert foreshard.plan(f"{net}:one_layer", "1x2xrtx-3090", global_batch=8, max_tp="2", budget_s=2).plans


AMOUNTS = [("tokens", value) for value in ("abc", -1, 0, True, float("nan"))]
AMOUNTS += [("observed_step_s", value) for value in ("abc", 0, float("inf"))]
PRICES = [("usd_per_device_hour", value) for value in ("abc", -1.0, float("nan"))]
BUDGETS = [("budget_s", "abc"), ("budget_s", 0), ("top", 0), ("top", "abc")]


@pytest.mark.parametrize("ask", ["predict", "plan"])
def test_amounts_of_a_traced_module_are_refused_as_those_of_other_models(net, ask):
    """Python took any number for tokens and prices, and stopped at a text with an error of its own."""
    for name, value in (*PRICES, *(AMOUNTS if ask == "predict" else BUDGETS)):
        said = []
        for model in (f"{net}:one_layer", "gpt2"):
            with pytest.raises(SpecError) as error:
                getattr(foreshard, ask)(model, "1x2xa40", global_batch=8, **{name: value})
            said.append(str(error.value))
        assert said[0] == said[1], (name, value)


@pytest.mark.parametrize("value", [False, 0, (), "none"])
def test_a_name_that_is_no_option_is_refused_whatever_it_says(net, value):
    factory, where = f"{net}:one_layer", "1x2xrtx-3090"
    for ask in (foreshard.predict, partial(foreshard.plan, global_batch=8)):
        with pytest.raises(SpecError, match="--foo is not taken for a traced module"):
            ask(factory, where, foo=value)
    with pytest.raises(SpecError, match="--vpp is not taken"):
        foreshard.predict(factory, where, vpp=0)
    off = foreshard.predict(factory, where, sp=False, offload="none")
    assert off.step_time_s == foreshard.predict(factory, where).step_time_s


def test_verbs_that_take_no_traced_module_name_those_that_do(shell, net):
    where = "1x2xrtx-3090"
    for model in (f"{net}:one_layer", f"{net}:with_loss", "resnet18"):
        for ask in (foreshard.make_plan,):
            with pytest.raises(SpecError, match=r"traced.*predict, .*CLUSTER and export") as caught:
                ask(model, where)
            assert "tuple" not in str(caught.value)
        answer = shell("comm", "buckets", model, where, "--json")
        assert answer.code == 2 and answer.json["error"]["what"] == caught.value.what


@pytest.mark.parametrize(
    ("more", "key"),
    [
        (("--recompute", "selective"), "--recompute"),
        (("--schedule", "zb-h1", "--pp", "2"), "--schedule"),
        (("--schedule", "zb-h2", "--pp", "2"), "--schedule"),
    ],
)
def test_what_needs_less_than_a_layer_is_refused_rather_than_taken_for_another_rule(shell, net, more, key):
    """Selective was priced as full, zb-h1 as 1f1b, and zb-h2 was an internal fault."""
    answer = shell("predict", f"{net}:encoder", "1x2xrtx-3090", *more, "--json")
    assert answer.code == 2
    assert answer.json["error"]["key"] == key and "traced module" in answer.json["error"]["what"]


@pytest.mark.parametrize(
    ("change", "edited"),
    [
        ("micro-batch=64", {"micro_batch": 64}),
        ("dtype=fp16", {"precision": "fp16"}),
        ("zero=3,optimizer=sgd", {"zero": 3, "optimizer": "sgd"}),
        ("recompute=full", {"recompute": "full"}),
        ("device=a100-sxm-80gb", {"cluster": "1x4xa100-sxm-80gb"}),
        ("nodes=2", {"cluster": "2x4xa40"}),
    ],
)
def test_what_if_of_a_module_is_a_prediction_of_the_edited_input(net, change, edited):
    stated = {"micro_batch": 32, "engine": "event"}
    base, (effect,) = foreshard.whatif(f"{net}:net", "1x4xa40", change, **stated)
    fresh = foreshard.predict(f"{net}:net", **{"cluster": "1x4xa40", **stated, **edited})
    assert effect.prediction is not None and effect.gain is not None
    assert effect.prediction.step_time_s == pytest.approx(fresh.step_time_s, rel=1e-9)
    assert effect.prediction.memory.peak_bytes == pytest.approx(fresh.memory.peak_bytes, rel=1e-9)
    assert effect.gain == pytest.approx(fresh.samples_per_s / base.samples_per_s - 1.0, abs=1e-9)


def test_what_if_of_a_module_counts_samples_and_says_what_it_does_not_take(shell, net):
    place = ("whatif", f"{net}:net", "1x4xa40", "--micro-batch", "32")
    told = shell(*place, "--change", "micro-batch=64", "--change", "tp=2")
    assert told.code == 0 and "samples/s" in told.out and "tokens" not in told.out
    for change in ("framework=hf", "cp=2", "speed-expert-comm=2", "prefetch=none", "sp=on"):
        said = f"--change {change.split('=')[0]}"
        refused = shell(*place, "--change", change)
        assert refused.code == 2 and said in refused.err and "traced module" in refused.err
    kept = shell(*place, "--change", "sp=off", "--change", "lora=none", "--json")
    assert [effect["gain"] for effect in kept.json["effects"]] == [0.0, 0.0]
    stated = shell(*place, "--change", "global-batch=256")
    assert stated.code == 0 and "follows the change" not in stated.out
    assert shell(*place[:3], "--framework", "ddp", "--change", "zero=2").code == 0


def test_engines_are_compared_on_a_module(shell, net):
    told = shell("compare", f"{net}:net", "1x4xa40", "--micro-batch", "32", "--json")
    seconds = {made["engine"]: made["step_time_s"] for made in told.json["predictions"]}
    assert set(seconds) == {"graph", "event"}
    assert seconds["event"] == pytest.approx(seconds["graph"], rel=1e-3)
    told = shell("compare", f"{net}:net", "1x4xa40", "--predictor", "mine.py")
    assert told.code == 2 and told.err


def test_plans_of_images_are_priced_by_samples(shell):
    told = shell("plan", "resnet18", "1x4xa100-sxm-40gb", "--global-batch", "64", "--budget-s", "1")
    assert told.code == 0 and "samples/s" in told.out and "per 1M samples" in told.out
    assert "token" not in told.out


def test_a_diagnosis_of_a_module_sums_to_its_step_and_its_changes_are_predictions(shell, net):
    place = ("whatif", f"{net}:net", "1x4xa40", "--micro-batch", "4096", "--dtype", "fp32")
    told = shell(*place, "--json")
    assert told.code == 0
    base, found = told.json["base"], told.json["diagnosis"]
    assert found["critical_path_s"] == pytest.approx(base["step_time_s"], rel=1e-9)
    assert sum(place["seconds"] for place in found["critical_path"]) == pytest.approx(
        base["step_time_s"], rel=1e-9
    )
    parts = {name: 0.0 for place in found["critical_path"] for name in place["parts_s"]}
    for place_on_path in found["critical_path"]:
        for name, seconds in place_on_path["parts_s"].items():
            parts[name] += seconds
    assert {name: value for name, value in parts.items() if value > 0} == pytest.approx(
        {name: value for name, value in base["time_breakdown_s"].items() if value > 0}, rel=1e-6
    )
    helps = {one["change"]: one for one in found["helps"]}
    assert "speed-memory-bound=2" in helps and "dtype=bf16" in helps
    for change, one in helps.items():
        (effect,) = shell(*place, "--change", change, "--json").json["effects"]
        assert one["gain"] == pytest.approx(effect["gain"], rel=1e-9)
        assert one["most"] is None or one["most"] >= one["gain"]
    screen = shell(*place).out
    assert "forward and backward of stage 0" in screen and "samples/s" in screen and "tokens" not in screen


def test_speeds_of_all_parts_of_a_module_divide_its_step(net):
    """Whatever a pipeline's tasks are: all of them half as long, so is the step."""
    stated = {"micro_batch": 8, "global_batch": 64, "pp": 2, "tp": 2}
    base, (effect,) = foreshard.whatif(
        f"{net}:encoder",
        "1x8xa40",
        ",".join(f"speed-{part}=2" for part in TIMED),
        **stated,
    )
    assert effect.prediction is not None
    assert effect.prediction.step_time_s == pytest.approx(base.step_time_s / 2, rel=1e-9)


TIMED = ("compute", "recompute", "tensor-comm", "pipeline-comm", "data-comm", "optimizer", "host")


@pytest.mark.parametrize("degrees", [{}, {"pp": 2}, {"zero": 3}, {"tp": 2, "dtype": "fp16"}])
def test_a_module_has_a_timeline_whose_events_fill_its_step(net, degrees):
    prediction, timeline = foreshard.predict_timeline(
        f"{net}:encoder", "1x4xa40", micro_batch=8, global_batch=64, **degrees
    )
    assert timeline is not None and timeline.step_time_s == prediction.step_time_s
    assert max(event.end_s for event in timeline.events) == pytest.approx(prediction.step_time_s, rel=1e-9)
    stages = prediction.plan.groups[0].stages
    assert {event.rank for event in timeline.events} == {stage.ranks[0] for stage in stages}
    compute = sum(e.end_s - e.start_s for e in timeline.events if e.part == "compute" and e.stage == 0)
    assert compute == pytest.approx(
        prediction.time_breakdown_s["compute"], rel=0.1 if len(stages) > 1 else 1e-6
    )


@pytest.mark.parametrize("ratio", [0.5, 2.0])
@pytest.mark.parametrize("noise", [{}, {"engine": "event", "jitter": 0.05}])
def test_a_measured_step_leaves_the_timeline_as_predicted(net, ratio, noise):
    """It drew half of the step as waiting for stragglers, or tasks after the end of the step."""
    where, stated = (f"{net}:encoder", "1x4xa40"), {"micro_batch": 8, "global_batch": 64, **noise}
    plain, drawn = foreshard.predict_timeline(*where, **stated)
    seen, again = foreshard.predict_timeline(*where, **stated, observed_step_s=ratio * plain.step_time_s)
    assert seen.step_time_s == ratio * plain.step_time_s
    assert again == drawn and drawn.step_time_s == plain.step_time_s
    assert any("a timeline is drawn as predicted" in line for line in seen.assumptions)
    said = trace_object(seen, again)["otherData"]
    assert float(said["drawn_step_time_s"]) * ratio == float(said["step_time_s"])


@pytest.mark.parametrize("micro_batch", [64, 3_000_000])
def test_changes_of_a_module_whose_ranks_differ_are_tried(net, tmp_path, micro_batch):
    """They were tried by the graph engine with the noise that it refuses."""
    where, stated = (f"{net}:net", "1x2xa40"), {"micro_batch": micro_batch, "engine": "event", "jitter": 0.05}
    plain = foreshard.predict(*where, micro_batch=micro_batch)
    made = foreshard.report(str(tmp_path / "page.html"), *where, **stated)
    assert made.memory.fits == (micro_batch == 64) and made.step_time_s > plain.step_time_s
    advice = foreshard.advise(*where, **stated) if made.memory.fits else ()
    assert bool(advice) == made.memory.fits
    for effect in advice:
        assert effect.prediction is not None and effect.prediction.step_time_distribution is not None
        gain = effect.prediction.tokens_per_s / made.tokens_per_s - 1
        assert effect.gain == pytest.approx(gain, rel=1e-9)


def test_a_module_takes_prices_and_a_report(shell, net, tmp_path):
    page, trace, prices = tmp_path / "page.html", tmp_path / "trace.json.gz", tmp_path / "prices.toml"
    prices.write_text('date = "2026-11"\n[[prices]]\ndevice = "a40"\nusd_per_device_h = 3.6\n')
    place = (f"{net}:net", "1x2xa40", "--prices", prices)
    made = shell("predict", *place, "--report", page, "--trace", trace, "--tokens", "3600", "--json")
    assert made.code == 0 and trace.stat().st_size
    step_s, cost = made.json["step_time_s"], made.json["cost"]
    assert cost["usd_per_step"] == pytest.approx(7.2 * step_s / 3600, rel=1e-9)
    assert cost["usd_total"] == pytest.approx(cost["usd_per_step"] * 3600 / 2, rel=1e-9)
    assert cost["price_date"] == "2026-11"
    text = page.read_text()
    assert "samples" in text and '"timeline"' in text
    moved = shell("whatif", *place, "--change", "nodes=2", "--json").json["effects"][0]["prediction"]
    assert moved["cost"]["usd_per_step"] == pytest.approx(14.4 * moved["step_time_s"] / 3600, rel=1e-9)
    stated = shell("predict", f"{net}:net", "1x2xa40", "--usd-per-device-hour", "1.8", "--json").json
    assert stated["cost"]["usd_per_step"] == pytest.approx(3.6 * stated["step_time_s"] / 3600, rel=1e-9)
    planned = shell("plan", *place, "--global-batch", "8", "--top", "1", "--json").json["plans"][0][
        "prediction"
    ]
    assert planned["cost"]["usd_per_step"] == pytest.approx(7.2 * planned["step_time_s"] / 3600, rel=1e-9)


def test_a_module_that_does_not_fit_is_told_the_nearest_change_that_does(shell, net):
    place = ("predict", f"{net}:net", "1x2xa40", "--micro-batch", "3000000")
    answer = shell(*place, "--json")
    assert answer.code == 3
    found = answer.json["infeasible"]
    assert (
        found["binding"] == "memory" and found["nearest_peak_bytes"] < answer.json["memory"]["capacity_bytes"]
    )
    name, _, value = found["nearest_change"].partition("=")
    again = shell(*place, f"--{name}", value, "--json")
    assert again.code == 0 and again.json["memory"]["fits"]


@pytest.mark.slow
def test_a_plan_of_a_module_is_drawn_and_searched_again_on_other_hardware(shell, net, tmp_path):
    page = tmp_path / "plan.html"
    place = ("plan", f"{net}:net", "1x2xa40", "--global-batch", "4096", "--top", "1")
    made = shell(*place, "--report", page, "--explain", "--json")
    assert made.code == 0 and "samples/s" in page.read_text()
    more = next(gain for gain in made.json["explain"] if "node more" in gain["change"])
    wider = shell("plan", f"{net}:net", "2x2xa40", "--global-batch", "4096", "--top", "1", "--json").json
    assert more["step_time_s"] == pytest.approx(wider["plans"][0]["prediction"]["step_time_s"], rel=1e-3)
    assert "samples/s" in shell(*place, "--explain").out


def test_a_measured_step_corrects_a_module_and_what_is_asked_of_it(net):
    where, stated = (f"{net}:net", "1x4xa40"), {"micro_batch": 4096}
    plain = foreshard.predict(*where, **stated)
    seen = foreshard.predict(*where, **stated, observed_step_s=2 * plain.step_time_s)
    assert seen.step_time_s == 2 * plain.step_time_s and seen.fidelity == "calibrated"
    assert sum(seen.time_breakdown_s.values()) == pytest.approx(seen.step_time_s)
    widths = [high / low for low, high in (plain.step_time_interval_s, seen.step_time_interval_s)]
    assert widths[1] < widths[0]
    assert any(line.startswith("one measured step") for line in seen.assumptions)
    asked = {"changes": "micro-batch=64", **stated}
    _, (before,) = foreshard.whatif(*where, **asked)
    _, (after,) = foreshard.whatif(*where, **asked, observed_step_s=2 * plain.step_time_s)
    assert after.gain == pytest.approx(before.gain, rel=1e-9)
    with pytest.raises(SpecError, match="observed-step-s"):
        foreshard.predict(*where, observed_step_s=-1.0)


def test_a_module_may_be_of_several_files_beside_its_factory(shell, tmp_path):
    """Only what lies in the working directory was found, and of two files of one name the first."""
    for folder, width in (("one", 8), ("two", 16)):
        package = tmp_path / folder / "parts"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("")
        (package / "block.py").write_text(
            f"from torch import nn\ndef block():\n    return nn.Linear(4, {width})\n"
        )
        (tmp_path / folder / "sizes.py").write_text("from parts.block import block\n")
        text = "import torch\nfrom sizes import block\ndef net():\n    return block(), torch.empty(1, 4)\n"
        (tmp_path / folder / "net.py").write_text(text)
        module = trace(f"{tmp_path / folder / 'net.py'}:net", precision="fp32")
        assert sum(layer.parameters for layer in module.layers) == 5 * width
    missing = tmp_path / "missing.py"
    missing.write_text("import nowhere_to_be_found\n")
    assert "beside the file" in shell("predict", f"{missing}:net", "1x1xa40").err


LATE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, WIDTH)

    def forward(self, x):
        from late_parts.made import act
        return act(self.layer(x))

def net():
    from late_parts import made
    return Net(), torch.empty(1, 4)
"""


def test_a_module_may_import_what_lies_beside_its_file_as_it_runs(tmp_path):
    """The folder was forgotten before the trace; of two packages of one name each is taken for its own."""
    before = list(sys.path)
    for folder, width, act in (("one", 8, "relu"), ("two", 16, "sigmoid"), ("one", 8, "relu")):
        package = tmp_path / folder / "late_parts"
        package.mkdir(parents=True, exist_ok=True)
        (package / "__init__.py").write_text("")
        (package / "made.py").write_text(f"import torch\ndef act(x):\n    return torch.{act}(x)\n")
        (tmp_path / folder / "net.py").write_text(LATE.replace("WIDTH", str(width)))
        module = trace(f"{tmp_path / folder / 'net.py'}:net", precision="fp32", degrees=[2])
        names = {operation.name for layer in module.layers for operation in layer.forward}
        assert (
            any(act in name for name in names)
            and sum(layer.parameters for layer in module.layers) == 5 * width
        )
        assert sys.path == before and not any(name.startswith("late_parts") for name in sys.modules)
