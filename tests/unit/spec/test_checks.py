"""Each rule that joins plan, model and cluster: broken alone, by what the message says."""

import json
from dataclasses import replace

import pytest

from foreshard import api
from foreshard.catalog.clusters import load_cluster
from foreshard.catalog.models import load_model
from foreshard.errors import SpecError
from foreshard.spec.checks import check_plan
from foreshard.spec.plan import Group, Plan, Stage

# ruff: noqa: E501  the sentences a user reads stay whole

CLUSTER = load_cluster("1x8xh100-sxm")
DENSE, EXPERTS = load_model("llama3-8b"), load_model("mixtral-8x7b")
LAST = DENSE.num_layers + 2


def stage(ranks=range(4), layers=((0, LAST // 2),), **options):
    return Stage(ranks=tuple(ranks), layers=tuple(layers), **options)


def good(**changes):
    """A valid plan of one group and two stages on 8 ranks."""
    stages = changes.pop("stages", None) or (stage(), stage(range(4, 8), ((LAST // 2, LAST),)))
    group = {"share": 16, "micro_batch": 4, "stages": stages} | changes.pop("group", {})
    return Plan(**({"global_batch": 16, "seq_len": 4096, "groups": (Group(**group),)} | changes))


def both(**options):
    """Two stages with the same options."""
    return stage(**options), stage(range(4, 8), ((LAST // 2, LAST),), **options)


def test_the_plan_that_the_cases_break_is_valid():
    check_plan(good(), DENSE, CLUSTER)
    check_plan(good(stages=both(ep=2, etp=2)), EXPERTS, CLUSTER)
    check_plan(good(stages=both(rank_shares=(2, 1, 1, 0))), DENSE, CLUSTER)


def test_idle_ranks_and_stages_of_different_size_are_allowed():
    plan = good(stages=(stage(range(2), tp=2), stage((4, 5, 6), ((LAST // 2, LAST),))))
    check_plan(plan, DENSE, CLUSTER)


def test_two_groups_with_uneven_shares_and_cuts_are_allowed():
    whole = Group(share=5, stages=(stage(range(2), ((0, LAST),)),), micro_batch=2)
    cut = Group(share=11, stages=(stage((2,), ((0, 3),)), stage((3,), ((3, LAST),))), micro_batch=3)
    check_plan(Plan(global_batch=16, seq_len=4096, groups=(whole, cut)), DENSE, CLUSTER)


# plan, model, key with flags, key in a file, what and rule and fix
CASES = {
    "rank missing": (
        good(stages=(stage(), stage(range(5, 9), ((LAST // 2, LAST),)))),
        DENSE,
        "groups[0].stages[1].ranks",
        None,
        "rank 8 is used, the cluster has 8 devices. Ranks go from 0 to 7. Name ranks below 8",
    ),
    "rank twice": (
        good(stages=(stage(), stage(range(3, 7), ((LAST // 2, LAST),)))),
        DENSE,
        "groups[0].stages[1].ranks",
        None,
        "rank 3 is used twice, first in groups[0].stages[0]. Every rank is at most in one place. Leave rank 3",
    ),
    "rank twice in one stage": (
        good(stages=(stage((0, 0)), stage((4, 5), ((LAST // 2, LAST),)))),
        DENSE,
        "groups[0].stages[0].ranks",
        None,
        "rank 0 is used twice",
    ),
    "samples": (
        good(global_batch=17),
        DENSE,
        "groups.share",
        None,
        "shares sum to 16, the global batch is 17. Every sample is taken once per step. Make the shares sum",
    ),
    "rank shares of another sum": (
        good(stages=both(rank_shares=(1, 1, 1, 2))),
        DENSE,
        "groups[0].stages[0].rank_shares",
        None,
        "[1, 1, 1, 2] does not split micro_batch 4 over 4 ranks. rank_shares has one entry per inner",
    ),
    "rank shares of another length": (
        good(stages=both(tp=2, rank_shares=(1, 1, 2))),
        DENSE,
        "groups[0].stages[0].rank_shares",
        None,
        "over 2 ranks",
    ),
    "layers uncovered": (
        good(stages=(stage(layers=((0, 3),)), stage(range(4, 8), ((5, LAST),)))),
        DENSE,
        "groups[0].stages[1].layers",
        None,
        "layers 3 to 4 are not covered. Stages cover every layer in order, chunk by chunk, each exactly once. "
        "Start the interval at 3",
    ),
    "layer twice": (
        good(stages=(stage(layers=((0, 3),)), stage(range(4, 8), ((2, LAST),)))),
        DENSE,
        "groups[0].stages[1].layers",
        None,
        "layer 2 is assigned twice or out of order",
    ),
    "layers end early": (
        good(stages=(stage(layers=((0, 3),)), stage(range(4, 8), ((3, LAST - 1),)))),
        DENSE,
        "groups[0].stages.layers",
        None,
        "layers end at 33, llama3-8b has layers 0 to 33 (embedding, 32 blocks, head). ",
    ),
    "layers end late": (
        good(stages=(stage(layers=((0, 3),)), stage(range(4, 8), ((3, LAST + 2),)))),
        DENSE,
        "groups[0].stages.layers",
        None,
        "End the last interval at 34",
    ),
    "tensor ranks": (
        good(stages=(stage(range(3), tp=2), stage(range(4, 8), ((LAST // 2, LAST),)))),
        DENSE,
        "--tp",
        "groups[0].stages[0].tp",
        "tp 2 x cp 1 does not divide 3 ranks. len(ranks) = tp x cp x inner dp. Choose tp x cp that divides 3",
    ),
    "expert ranks": (
        good(stages=both(ep=3)),
        EXPERTS,
        "--ep",
        "groups[0].stages[0].ep",
        "ep 3 x etp 1 does not divide 4 ranks. etp x ep divides tp x cp x inner dp. Choose ep x etp",
    ),
    "shards": (
        good(stages=both(shard_size=3)),
        DENSE,
        "--shard-size",
        "groups[0].stages[0].shard_size",
        "shard_size 3 does not divide 4 ranks. Shard groups divide the data-parallel ranks, inner dp x cp. "
        "Use a divisor of 4",
    ),
    "shards of nothing": (
        good(stages=both(shard_size=2, zero=0)),
        DENSE,
        "--shard-size",
        "groups[0].stages[0].shard_size",
        "shard_size 2 at zero 0. At zero 0 every rank keeps all states. Leave it out",
    ),
    "no shards": (
        good(stages=both(shard_size=0)),
        DENSE,
        "--shard-size",
        "groups[0].stages[0].shard_size",
        "0 is not a valid shard_size",
    ),
    "heads": (
        good(stages=(stage(range(3), tp=3), stage((4, 5, 6), ((LAST // 2, LAST),), tp=3)), seq_len=4096),
        DENSE,
        "--tp",
        "groups[0].stages[0].tp",
        "tp 3 does not divide 32 attention heads. tp divides the number of attention heads. Use a divisor of 32",
    ),
    "feed-forward": (
        good(stages=both(tp=4)),
        replace(DENSE, blocks=(replace(DENSE.blocks[0], ffn=14338),) * 32),
        "--tp",
        "groups[0].stages[0].tp",
        "tp 4 does not divide 14338 feed-forward channels",
    ),
    "experts": (
        good(stages=both(ep=4)),
        replace(EXPERTS, blocks=(replace(EXPERTS.blocks[0], num_experts=6),) * 32),
        "--ep",
        "groups[0].stages[0].ep",
        "ep 4 does not divide 6 experts. ep divides the number of experts. Use a divisor of 6",
    ),
    "expert channels": (
        good(stages=both(etp=4)),
        replace(EXPERTS, blocks=(replace(EXPERTS.blocks[0], expert_ffn=6),) * 32),
        "--etp",
        "groups[0].stages[0].etp",
        "etp 4 does not divide 6 channels of an expert",
    ),
    "ep of a dense model": (
        good(stages=both(ep=2)),
        DENSE,
        "--ep",
        "groups[0].stages[0].ep",
        "ep 2 for llama3-8b, which has no experts. ep > 1 needs a mixture-of-experts model. Leave out ep",
    ),
    "etp of a dense model": (
        good(stages=both(etp=2)),
        DENSE,
        "--etp",
        "groups[0].stages[0].etp",
        "which has no experts",
    ),
    "experts recomputed in a dense model": (
        good(stages=both(recompute="selective:moe+moe_act")),
        DENSE,
        "--recompute",
        "groups[0].stages[0].recompute",
        "for llama3-8b, which has none of that",
    ),
    "chunks differ": (
        good(
            stages=(stage(layers=((0, 3), (6, 9))), stage(range(4, 8), ((3, 6),))),
            group={"schedule": "interleaved"},
        ),
        replace(DENSE, blocks=DENSE.blocks[:7]),
        "groups[0].stages.layers",
        None,
        "stages of one group differ in virtual stages. Every stage of a group has the same number",
    ),
    "chunks without interleaving": (
        good(stages=(stage(layers=((0, 3), (6, 9))), stage(range(4, 8), ((3, 6), (9, LAST))))),
        DENSE,
        "--schedule",
        "groups[0].schedule",
        "2 virtual stages with schedule 1f1b. Only the interleaved schedule has virtual stages, "
        "and zbv and dualpipev have two. Use interleaved",
    ),
    "interleaved micro-batches": (
        good(
            stages=(stage(layers=((0, 3), (6, 9))), stage(range(4, 8), ((3, 6), (9, LAST)))),
            group={"schedule": "interleaved", "share": 12},
            global_batch=12,
        ),
        DENSE,
        "--global-batch",
        "groups[0].share",
        "3 micro-batches on 2 interleaved stages. Interleaving takes micro-batches in groups of pp, so pp divides "
        "their number. Use 2 or 4 micro-batches, or vpp 1",
    ),
    "dualpipe in halves": (
        good(global_batch=15, group={"schedule": "dualpipe", "share": 15, "micro_batch": 1}),
        DENSE,
        "--global-batch",
        "groups[0].share",
        "15 micro-batches on 2 stages under dualpipe. dualpipe takes even numbers of stages and of micro-batches",
    ),
    "zbv without second intervals": (
        good(group={"schedule": "zbv"}),
        DENSE,
        "--schedule",
        "groups[0].schedule",
        "1 virtual stage with schedule zbv",
    ),
    "schedule unknown": (
        good(group={"schedule": "pipedream"}),
        DENSE,
        "--schedule",
        "groups[0].schedule",
        "Must be one of gpipe",
    ),
    "precision": (
        good(precision="nvfp4"),
        DENSE,
        "--dtype",
        "precision",
        "h100-sxm has no nvfp4. Devices compute matrix products of the precision in hardware. Use one of: fp32",
    ),
    "precision unknown": (good(precision="int8"), DENSE, "--dtype", "precision", "Must be one of fp32"),
    "optimizer unknown": (good(optimizer="lamb"), DENSE, "--optimizer", "optimizer", "Must be one of adamw"),
    "zero": (good(stages=both(zero=4)), DENSE, "--zero", "groups[0].stages[0].zero", "from 0 to 3"),
    "offload": (
        good(stages=both(offload="ssd")),
        DENSE,
        "--offload",
        "groups[0].stages[0].offload",
        "one of none",
    ),
    "recompute": (
        good(stages=both(recompute="all")),
        DENSE,
        "--recompute",
        "groups[0].stages[0].recompute",
        "Must be none",
    ),
    "micro-batch": (
        good(group={"micro_batch": 0}),
        DENSE,
        "--micro-batch",
        "groups[0].micro_batch",
        "0 is not",
    ),
    "sequence over cp": (
        good(stages=both(cp=4), seq_len=4098),
        DENSE,
        "--seq",
        "seq_len",
        "sequence 4098 does not divide over cp 4. Sequences divide over cp, times tp with sp. Use a multiple of 4",
    ),
    "sequence over tp": (
        good(stages=both(tp=4), group={"sp": True}, seq_len=4098),
        DENSE,
        "--seq",
        "seq_len",
        "sequence 4098 does not divide over cp 1 x tp 4",
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("file", [None, "plan.json"])
def test_each_rule_names_what_rule_and_fix(name, file):
    plan, model, flag, key, words = CASES[name]
    with pytest.raises(SpecError) as caught:
        check_plan(plan, model, CLUSTER, file=file)
    error = caught.value
    assert error.exit_code == 2 and error.file == file
    assert error.key == (flag if file is None or key is None else key)
    assert words in str(error) and error.rule and error.value is not None
    json.dumps(error.to_dict(), allow_nan=False)


def test_one_vendor():
    mixed = load_cluster("1x4xh100-sxm+1x4xmi300x")
    with pytest.raises(
        SpecError, match=r"devices of amd and nvidia in one plan\. No collective library joins"
    ):
        check_plan(good(), DENSE, mixed)
    only = good(stages=(stage(range(4), ((0, LAST),)),))
    check_plan(only, DENSE, mixed)


@pytest.mark.parametrize(("device", "dtype"), [("a100-sxm-80gb", "fp8"), ("v100-sxm-16gb", "bf16")])
def test_a_dtype_that_the_device_lacks(device, dtype):
    with pytest.raises(SpecError, match=f"{device} has no {dtype}.*Use one of: fp32"):
        check_plan(good(precision=dtype), DENSE, load_cluster(f"1x8x{device}"))


BAD_REQUESTS = [
    ({"tokens": float("nan")}, "--tokens"),
    ({"tokens": float("inf")}, "--tokens"),
    ({"tokens": 0}, "--tokens"),
    ({"tokens": -1.0}, "--tokens"),
    ({"usd_per_device_hour": -1.0}, "--usd-per-device-hour"),
    ({"usd_per_device_hour": float("nan")}, "--usd-per-device-hour"),
    ({"observed_step_s": float("inf")}, "--observed-step-s"),
    ({"observed_step_s": 0.0}, "--observed-step-s"),
    ({"observed_step_s": True}, "--observed-step-s"),
    ({"observed_step_s": "fast"}, "--observed-step-s"),
    ({"engine": "quantum"}, "--engine"),
    ({"costs": "table"}, "--costs"),
    ({"fidelity": "calibrated"}, "--fidelity"),
    ({"framework": "megatrn"}, "framework"),
    ({"framework": "megatron-bridge@1"}, "framework"),
    ({"pp": 2, "global_batch": 2**31 - 16}, "--engine"),
    ({"cp": 8, "seq_len": 8191}, "--seq"),
]


@pytest.mark.parametrize(("choices", "key"), BAD_REQUESTS, ids=str)
def test_what_predict_refuses(choices, key):
    with pytest.raises(SpecError) as caught:
        api.predict(DENSE, CLUSTER, **choices)
    assert caught.value.exit_code == 2 and caught.value.key == key
    json.dumps(caught.value.to_dict(), allow_nan=False)


def test_a_device_that_costs_nothing_is_no_error():
    assert api.predict(DENSE, CLUSTER, usd_per_device_hour=0).cost.usd_per_step == 0.0
