"""A plan on some devices of a cluster takes what it takes on a cluster of those devices alone."""

import numpy as np
import pytest

from foreshard import api
from foreshard.catalog.frameworks import load_framework
from foreshard.catalog.offers import offers_of
from foreshard.errors import ForeshardError
from foreshard.spec.degrees import plan_from_degrees

MODELS = ("llama3-8b", "gpt2-xl", "mixtral-8x7b", "qwen3-0.6b")
DEVICES = ("h100", "a100-80gb", "v100", "rtx-4090", "mi300x", "h100-pcie", "gaudi3")
FRAMEWORKS = ("megatron-core", "deepspeed", "torchtitan", "megatron-fsdp", "nemo", "maxtext")


@pytest.mark.parametrize(
    ("sizes", "part", "whole"),
    [
        ((1, 2, 4), "1x{}x{}", "1x8x{}"),
        ((8, 16), "{}x8x{}@200Gb/s", "4x8x{}@200Gb/s"),
        ((8, 16), "{}x8x{}@200Gb/s", "4x8x{}@200Gb/s+1x8xv100@200Gb/s"),
    ],
    ids=("of a node", "of the nodes", "of one kind"),
)
def test_the_rest_of_the_cluster_changes_nothing(sizes, part, whole):
    draw, checked = np.random.default_rng(3), 0
    while checked < 20:
        few, device, framework, name = (
            draw.choice(values).item() for values in (sizes, DEVICES, FRAMEWORKS, MODELS)
        )
        model, offers = api.load_model(name), offers_of(load_framework(framework))
        stated = {
            "tp": draw.choice((1, 2, 4)).item(),
            "pp": draw.choice((1, 2, 4)).item(),
            "zero": draw.choice(offers.zero).item(),
            "offload": draw.choice(("none", "none", "optimizer", "activations")).item(),
        }
        try:
            plan = plan_from_degrees(
                model.num_layers, few, global_batch=16, seq_len=512, framework=framework, **stated
            )
            alone = api.load_cluster(part.format(few if few < 8 else few // 8, device))
            among = api.load_cluster(whole.format(device))
            for engine in ("analytical", "graph"):
                first, second = (api.predict(model, on, plan, engine=engine) for on in (alone, among))
                assert first.step_time_s == pytest.approx(second.step_time_s, rel=1e-9), (
                    plan,
                    device,
                    engine,
                )
                assert first.memory.peak_bytes == second.memory.peak_bytes
                assert first.memory.host_peak_bytes == second.memory.host_peak_bytes
        except ForeshardError:
            continue
        checked += 1


def test_scores_are_kept_where_attention_runs_as_separate_kernels_alone():
    """A V100 beside an H100: of two equal stages that of the V100 keeps the scores of all its heads."""
    model = api.load_model("llama3-8b")
    plan = plan_from_degrees(
        model.num_layers, 2, global_batch=4, seq_len=1024, framework="megatron-core", pp=2, precision="fp16"
    )
    mixed = api.predict(model, "1x1xh100-sxm+1x1xv100-sxm@100Gb/s", plan).memory.per_stage_peak_bytes[0]
    flash = api.predict(model, "2x1xh100-sxm@100Gb/s", plan).memory.per_stage_peak_bytes[0]
    unfused = api.predict(model, "2x1xv100-sxm@100Gb/s", plan).memory.per_stage_peak_bytes[0]
    assert mixed[0] == flash[0] and flash[0] < unfused[0]
    assert mixed[1] == unfused[1] and flash[1] < unfused[1]
