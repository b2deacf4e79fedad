"""Profiles of a small chain of layers, and costs fitted to profiles made up by formula."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from foreshard.errors import SpecError
from foreshard.lab.lab import Lab
from foreshard.planner.measured.prices import work_bound_s
from foreshard.predict.measured.costs import load_costs
from foreshard.profile.calibration import _STUDENT_T_95, calibrate, fitted_links, floor_and_rate
from foreshard.profile.layer_times import profile_layers
from foreshard.profile.link_times import counts_of, pairs_of
from foreshard.profile.profile_file import load_profile
from foreshard.runtime.engine.executor import through

CPU = torch.device("cpu")


def job():
    widths = (6, 5, 4)
    return SimpleNamespace(
        path="made.py",
        num_layers=2,
        tied=(),
        dataset=[torch.ones(6) * i for i in range(3)],
        collate=torch.stack,
        inputs=lambda batch: batch,
        optimizer=lambda p: torch.optim.AdamW(p),
        layer=lambda i: nn.Sequential(nn.Linear(widths[i], widths[i + 1]), nn.Tanh()),
        loss=lambda output, batch: (output.sum(), batch.shape[0] * 7),
    )


def measured(tmp_path, samples, out="profile.json", told=None):
    seen = [] if told is None else told
    return profile_layers(
        job(), samples=samples, repeats=2, out=tmp_path / out, device=CPU, through=through, tell=seen.append
    )


def test_layers_may_change_what_they_are_given(tmp_path):
    changing, made = job(), job().layer
    changing.layer = lambda i: nn.Sequential(nn.ReLU(inplace=True) if i else nn.Identity(), made(i))
    told = {"device": CPU, "through": through, "tell": lambda text: None}
    assert profile_layers(changing, samples=(1,), repeats=1, out=tmp_path / "profile.json", **told)["passes"]


def test_a_profile_holds_what_the_layers_are(tmp_path):
    made = measured(tmp_path, (1, 4))
    assert [row["parameter_bytes"] for row in made["bytes"]] == [4 * (6 * 5 + 5), 4 * (5 * 4 + 4)]
    assert [row["state_bytes"] for row in made["optimizer"]] == [
        2 * 140 + 2 * 4,
        2 * 96 + 2 * 4,
    ]  # two moments, a step
    four = made["passes"]["4"]
    assert four["boundary_bytes"] == [4 * 4 * 5, 4 * 4 * 4]
    assert four["saved_bytes"][0] == 4 * 4 * (6 + 5)  # input of the linear, output of the tanh
    assert four["rounds"] == [1, 1], "each size comes up twice"
    assert np.array(four["forward"]).shape == (2, 2, 2) and np.array(four["forward"]).min() > 0
    assert made["tokens_per_sample"] == 7


def test_an_unfinished_profile_is_continued_and_another_is_not(tmp_path):
    first = measured(tmp_path, (1,))
    told = []
    both = measured(tmp_path, (1, 2), told=told)
    assert all(text.startswith("timing 2 samples") for text in told)
    assert both["passes"]["1"] == json.loads(json.dumps(first["passes"]["1"]))
    file = tmp_path / "profile.json"
    data = json.loads(file.read_text())
    file.write_text(json.dumps(data | {"complete": True}))
    assert measured(tmp_path, (1,))["passes"]["1"] != first["passes"]["1"]
    begun = json.dumps(data | {"fingerprint": data["fingerprint"] | {"cores": -1}})
    file.write_text(begun)
    with pytest.raises(SpecError, match="unfinished profile with cores -1") as caught:
        measured(tmp_path, (1,))
    assert caught.value.key == "fingerprint.cores" and "-o" in caught.value.fix
    assert file.read_text() == begun


@pytest.mark.parametrize("text", ["{", "[]", '{"kind": "measured costs"}'])
def test_no_other_file_is_overwritten(tmp_path, text):
    (tmp_path / "profile.json").write_text(text)
    with pytest.raises(SpecError):
        measured(tmp_path, (1,))
    assert (tmp_path / "profile.json").read_text() == text


def made_up(lines=((1e-3, 2e-3), (0.0, 5e-3)), noise=(1.0,), job="j", device="cpu", **more):
    """Return a profile whose wall times lie on lines (fixed, per sample); processor time is half of it."""

    def rows(part, size):
        return [[[n * part * (a + b * size) / 2, n * part * (a + b * size)] for a, b in lines] for n in noise]

    passes = {
        str(size): {
            "forward": rows(1, size),
            "backward": rows(2, size),
            "backward_input": rows(1, size),
            "saved_bytes": [8.0 * size] * 2,
            "boundary_bytes": [4.0 * size] * 2,
        }
        for size in (1, 2, 4, 8)
    }
    told = {"job": job, "layers": 2, "device": device, "processor": "p", "accelerator": ""}
    return {
        "schema_version": 1,
        "kind": "profile",
        "complete": True,
        "date": "2026-01-01",
        "fingerprint": told,
        "passes": passes,
        "bytes": [{"parameter_bytes": 4.0, "frozen_bytes": 0.0}] * 2,
        "tokens_per_sample": 3.0,
        "tied": [],
        "optimizer": [{"seconds": [[1e-4, 2e-4]], "state_bytes": 8.0}] * 2,
    } | more


def lab_of(device):
    rate = {"bandwidth_bytes_per_s": 1e9, "latency_s": 1e-5}
    return Lab(clock="cpu", slow=(1.0,), devices=(device,), **rate).cluster()


def test_lines_are_found_again_by_clock():
    for clock, part in (("wall", 1.0), ("cpu", 0.5)):
        made = calibrate(made_up(), clock=clock)
        assert made["layers"][0]["forward_s"] == pytest.approx([1e-3 * part, 2e-3 * part])
        assert made["layers"][1]["backward_s"] == pytest.approx([0.0, 1e-2 * part])
        assert made["layers"][0]["optimizer_s"] == pytest.approx(2e-4 * part)
        assert made["layers"][0]["relative_error"] == pytest.approx(0, abs=1e-9)
    assert made["layers"][0]["saved_bytes_per_sample"] == 8 and made["devices"] == {"here": 1.0}


def test_no_line_has_a_part_below_zero():
    bent = made_up(lines=((0.0, 1e-3), (0.0, 1e-3)))
    for size in ("4", "8"):
        bent["passes"][size]["forward"] = [
            [[2 * c, 2 * w] for c, w in one] for one in bent["passes"][size]["forward"]
        ]
    made = calibrate(bent)
    assert min(made["layers"][0]["forward_s"]) >= 0
    assert made["layers"][0]["relative_error"] > 0.05


def test_the_interval_is_how_passes_spread():
    assert calibrate(made_up(noise=(1.0, 1.0, 1.0)))["spread"] == pytest.approx([1.0, 1.0])
    low, high = calibrate(made_up(noise=np.linspace(0.8, 1.2, 21)))["spread"]
    assert (low, high) == pytest.approx((0.82, 1.18))


def test_the_interval_covers_a_round_of_another_day():
    """Of machines whose speed changes from round to round, nine of ten further rounds lie inside."""
    rng, inside = np.random.default_rng(0), 0
    for _ in range(400):
        speeds = rng.normal(0.0, 0.05, 6)
        noise = np.exp(np.repeat(speeds[:5], 3) + rng.normal(0.0, 0.01, 15))
        made = made_up(noise=noise.tolist())
        for passes in made["passes"].values():
            passes["rounds"] = [3] * 5
        low, high = calibrate(made)["spread"]
        further = np.exp(speeds[5] + rng.normal(0.0, 0.01) - np.log(np.median(noise)))
        inside += low <= further <= high
    assert 0.86 <= inside / 400 <= 0.96


def test_quantiles_of_student():
    stats = pytest.importorskip("scipy.stats")
    assert stats.t.ppf(0.95, range(1, 11)).tolist() == pytest.approx(_STUDENT_T_95, abs=6e-4)


def test_a_size_that_was_timed_is_priced_as_it_was(tmp_path):
    """Large micro-batches take less a sample than the line says, and a step of one is what a pass took."""
    made = made_up()
    for size, less in (("2", 1.2), ("8", 0.8)):
        for phase in ("forward", "backward"):
            timed = made["passes"][size][phase]
            made["passes"][size][phase] = [[[c * less, w * less] for c, w in one] for one in timed]
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(calibrate(made)))
    found = load_costs(str(path))
    for size, less in ((1, 1.0), (2, 1.2), (4, 1.0), (8, 0.8)):
        lines = [(1e-3 + 2e-3 * size) * less, (5e-3 * size) * less]
        assert found.work_s("here", (0, 2), "forward_s", size) == pytest.approx(sum(lines))
        assert found.work_s("here", (1, 2), "backward_s", size) == pytest.approx(2 * lines[1])
    at = found.work_s("here", (0, 2), "forward_s", np.array([0, 3, 8]))
    assert at == pytest.approx(
        [0.0, sum(found.work_s("here", (0, 2), "forward_s", n) for n in (2, 4)) / 2, at[2]]
    )
    bound = work_bound_s(found, lab_of("here"), (1, 2, 4, 8, 16), 8)
    each_s = [
        sum(found.work_s("here", (0, 2), name, n) for name in ("forward_s", "backward_s")) / n
        for n in range(1, 17)
    ]
    assert bound == pytest.approx(8 * min(each_s), rel=1e-3) and bound <= 8 * min(each_s) * (1 + 1e-9)
    data = json.loads(path.read_text())
    for wrong in ({"timed_sizes": [2, 1, 4, 8]}, {"timed_forward_s": [1.0]}):
        path.write_text(json.dumps(data | {"layers": [data["layers"][0] | wrong, data["layers"][1]]}))
        with pytest.raises(SpecError, match="timed") as caught:
            load_costs(str(path))
        assert caught.value.key.startswith("layers.timed")


def test_devices_of_their_own_have_tables_and_names_have_factors():
    made = calibrate(
        made_up(), slow={"a": 1.0, "half": 2.0}, others={"b": made_up(lines=((1e-3, 1e-3),) * 2)}
    )
    assert made["devices"] == {"a": 1.0, "half": 2.0, "b": 1.0}
    assert made["tables"]["b"][1]["forward_s"] == pytest.approx([1e-3, 1e-3])


def test_a_profile_of_one_gpu_is_not_taken_for_another():
    made = made_up(device="cuda")
    made["fingerprint"]["accelerator"] = "NVIDIA H100 80GB HBM3"
    assert calibrate(made, slow={"h100-sxm": 1.0, "rtx-3090": 4.0})["devices"]["rtx-3090"] == 4.0
    assert calibrate(made, slow={"left": 1.0})["devices"] == {"left": 1.0}  # a lab's name
    with pytest.raises(SpecError, match="a profile of h100-sxm") as caught:
        calibrate(made, slow={"rtx-3090": 1.0})
    assert "--device rtx-3090=F" in caught.value.fix
    with pytest.raises(SpecError, match="a profile of h100-sxm"):
        calibrate(made_up(), others={"rtx-3090": made})
    with pytest.raises(SpecError, match="a profile of a processor") as caught:
        calibrate(made_up(), slow={"rtx-3090": 1.0})
    assert caught.value.value == "rtx-3090" and caught.value.rule == "The profile was made on p"


@pytest.mark.parametrize(("other", "clock"), [({"job": "k"}, "wall"), ({"device": "cuda"}, "cpu")])
def test_what_does_not_belong_together_is_refused(other, clock):
    with pytest.raises(SpecError):
        calibrate(made_up(), clock=clock, others={"b": made_up(**other)})


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", json.dumps({"kind": "profile", "schema_version": 1, "fingerprint": {"a": 1}})]
)
def test_what_is_no_finished_profile_is_refused(tmp_path, text):
    file = tmp_path / "p.json"
    file.write_text(text)
    with pytest.raises(SpecError):
        load_profile(str(file))
    with pytest.raises(SpecError):
        load_profile(str(tmp_path / "absent.json"))


@pytest.mark.parametrize(("floor_s", "rate"), [(1e-3, 1e9), (1e-5, 1e8), (0.0, 1e7)])
def test_a_floor_and_a_rate_are_found_again(floor_s, rate):
    sizes = [8, 1024, 2**14, 2**17, 2**20, 2**23]
    timed = [(h, s * h, [h * max(floor_s, s / rate)] * 3) for h in (1.0, 3.0) for s in sizes]
    found_s, found_rate, error = floor_and_rate(timed)
    assert found_rate == pytest.approx(rate) and error == pytest.approx(0, abs=1e-9)
    if floor_s:
        assert found_s == pytest.approx(floor_s)


def test_one_wild_time_does_not_bend_the_fit():
    sizes = [8, 1024, 2**14, 2**17, 2**20, 2**23]
    timed = [(1.0, s, [max(1e-4, s / 1e9)] * 2) for s in sizes] + [(1.0, 64, [1e-1] * 2)]
    floor_s, rate, _ = floor_and_rate(timed)
    assert floor_s == pytest.approx(1e-4) and rate == pytest.approx(1e9)


def test_links_within_and_across_hosts_are_fitted_apart():
    def rows(apart, rate, ranks):
        return [
            {"ranks": ranks, "apart": apart, "bytes": s, "seconds": [max(1e-4, s / rate)]}
            for s in (8, 2**20, 2**24)
        ]

    links = {
        "messages": rows(False, 1e10, [0, 1]) + rows(True, 1e9, [0, 2]),
        "sums": rows(True, 1e9, [0, 1, 2]),
    }
    made = fitted_links(links)
    assert made["within"]["bytes_per_s"] == pytest.approx(1e10)
    assert made["across"]["bytes_per_s"] == pytest.approx(1e9)
    assert made["across"]["ring_bytes_per_s"] == pytest.approx(4 / 3 * 1e9)
    assert fitted_links(None) is None


def test_pairs_and_counts():
    assert pairs_of(3) == [[0, 1], [0, 2], [1, 2]] and len(pairs_of(9)) == 9
    assert counts_of(1) == [] and counts_of(2) == [2] and counts_of(6) == [2, 4, 6]


def set_at(data, key, value):
    *path, last = [int(part) if part.isdecimal() and part != "1" else part for part in key.split("/")]
    for part in path:
        data = data[part]
    if value is None:
        del data[last]
    else:
        data[last] = value


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("passes", None, "passes: missing key"),
        ("passes", {}, "passes"),
        ("passes", {"many": {}}, "passes"),
        ("passes/1/forward", [[[0.1, 0.1]]], "passes.1.forward"),
        ("passes/1/backward_input", "x", "passes.1.backward_input"),
        ("passes/1/saved_bytes", [1.0, -1.0], "passes.1.saved_bytes"),
        ("bytes", [], "bytes"),
        ("bytes/0/parameter_bytes", float("inf"), "bytes[0].parameter_bytes"),
        ("bytes/0/frozen_bytes", "7", "bytes[0].frozen_bytes"),
        ("optimizer/0/seconds", [], "optimizer[0].seconds"),
        ("optimizer/0/state_bytes", None, "optimizer[0].state_bytes: missing key"),
        ("tokens_per_sample", -3, "tokens_per_sample"),
        ("fingerprint/layers", 3, "passes.1.saved_bytes"),
        ("fingerprint/job", None, "fingerprint.job"),
        ("date", 5, "date"),
        ("links", {"messages": []}, "links.launch_s"),
        ("tensor", {"2": {}}, "tensor.2.sums"),
        ("tied", 7, "tied"),
        ("tied", [{"layers": [0, 9], "bytes": 8.0}], "tied[0].layers"),
        ("passes/1/backward", [], "passes.1.backward"),
        ("passes/1/rounds", [9], "passes.1.rounds"),
        ("fingerprint/precision", ["fp32"], "fingerprint.precision"),
    ],
)
def test_a_profile_that_is_not_whole_names_the_key(tmp_path, key, value, named):
    data = json.loads(json.dumps(measured(tmp_path, (1,)))) | {"complete": True}
    file = tmp_path / "bad.json"
    file.write_text(json.dumps(data))
    assert load_profile(str(file)) == data
    set_at(data, key, value)
    file.write_text(json.dumps(data).replace("Infinity", "1e999"))
    with pytest.raises(SpecError) as caught:
        load_profile(str(file))
    assert str(caught.value).startswith(f"{file}: {named}") and caught.value.fix and caught.value.rule
