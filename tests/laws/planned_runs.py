"""Runs that are valid, drawn at random, and the same run on other hardware or other ranks."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from hypothesis import assume
from hypothesis import strategies as st

from foreshard import api
from foreshard.errors import SpecError
from foreshard.spec.plan import Plan

MODELS = ("llama3-8b", "mixtral-8x7b", "gpt3-13b")
CLUSTERS = ("1x8xh100-sxm", "2x8xh100-sxm", "2x8xa100-sxm-80gb", "4x8xh100-sxm@400Gb/s")
FRAMEWORKS = (
    "megatron-core",
    "megatron-lm@2021",
    "megatron-bridge@26.06",
    "composer",
    "megatron-deepspeed@2022",
)


@cache
def model_of(name):
    return api.load_model(name)


@cache
def cluster_of(name):
    return api.load_cluster(name)


@st.composite
def runs(
    draw,
    models=MODELS,
    frameworks=FRAMEWORKS,
    zeros=(0, 1, 2, 3),
    clusters=CLUSTERS,
    dense=False,
    seqs=(1024, 4096),
):
    """Names of a model and a cluster, and flags that make a valid plan on them."""
    names = draw(st.sampled_from(models)), draw(st.sampled_from(clusters))
    model, cluster = model_of(names[0]), cluster_of(names[1])
    tp, pp = draw(st.sampled_from([1, 2, 4, 8])), draw(st.sampled_from([1, 2, 4]))
    assume(cluster.num_devices % (tp * pp) == 0)
    dp = cluster.num_devices // (tp * pp)
    vpp = draw(st.sampled_from([1, 2])) if pp > 1 else 1
    rounds = draw(st.integers(1, 6))
    micro_batch = draw(st.sampled_from([1, 2]))
    choices = {
        "tp": tp,
        "pp": pp,
        "vpp": vpp,
        "micro_batch": micro_batch,
        "global_batch": micro_batch * dp * rounds * (pp if vpp > 1 else 1),
        "seq_len": draw(st.sampled_from(seqs)),
        "zero": draw(st.sampled_from(zeros)),
        "recompute": draw(st.sampled_from(["none", "selective", "full"])),
        "framework": draw(st.sampled_from(frameworks)),
        "schedule": "interleaved" if vpp > 1 else draw(st.sampled_from(["1f1b", "gpipe", "zb-h1"])),
    }
    has_experts = any(block.num_experts for block, _ in model.block_kinds())
    if has_experts and not dense:
        choices["ep"] = draw(st.sampled_from([e for e in (1, 2, 4, 8) if (tp * dp) % e == 0]))
    try:
        api.make_plan(model, cluster, **choices)
    except SpecError:
        assume(False)
    return *names, choices


def built(run):
    """Return the model, the cluster, the plan and its flags."""
    model, cluster, choices = model_of(run[0]), cluster_of(run[1]), run[2]
    return model, cluster, api.make_plan(model, cluster, **choices), choices


def faster(cluster, **factors):
    """Return the cluster with rates multiplied: nic, link, flops, memory."""
    nodes = []
    for group in cluster.nodes:
        device = group.device
        device = replace(
            device,
            link_bytes_per_s=device.link_bytes_per_s * factors.get("link", 1.0),
            pcie_bytes_per_s=device.pcie_bytes_per_s * factors.get("link", 1.0),
            memory_bytes_per_s=device.memory_bytes_per_s * factors.get("memory", 1.0),
            # The same watts per FLOP/s: what a chip cannot power, it does not compute faster.
            peak_flops_per_s={k: v * factors.get("flops", 1.0) for k, v in device.peak_flops_per_s.items()},
            tdp_w=device.tdp_w * factors.get("flops", 1.0),
        )
        nic = group.nic_bytes_per_s * factors.get("nic", 1.0)
        nodes.append(replace(group, device=device, nic_bytes_per_s=nic))
    return replace(cluster, nodes=tuple(nodes))


def relabelled(plan: Plan, new) -> Plan:
    groups = [
        replace(
            group,
            stages=tuple(replace(s, ranks=tuple(new(r) for r in s.ranks)) for s in group.stages),
        )
        for group in plan.groups
    ]
    return replace(plan, groups=tuple(groups))
