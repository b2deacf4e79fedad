"""Plans from degree flags: which layers and ranks a stage gets, and what is refused."""

import json
from itertools import chain

import pytest

from foreshard.errors import SpecError
from foreshard.spec.degrees import block_cuts, layer_spans, plan_from_degrees


@pytest.mark.parametrize(
    ("blocks", "chunks", "cuts"),
    [
        (32, 4, [8, 8, 8, 8]),
        (126, 16, [7, *[8] * 14, 7]),  # embedding and head count as a layer each
        (31, 4, [8, 8, 8, 7]),  # the head alone does
        (33, 4, [8, 9, 8, 8]),  # the remainder goes to the middle
        (35, 4, [9, 9, 9, 8]),
        (3, 1, [3]),
        (2, 2, [1, 1]),
    ],
)
def test_block_cuts(blocks, chunks, cuts):
    assert block_cuts(blocks, chunks) == cuts


CUTS = [(b, pp, vpp) for b in range(1, 40) for pp in (1, 2, 3, 5) for vpp in (1, 2, 3) if pp * vpp <= b]


@pytest.mark.parametrize(("blocks", "pp", "vpp"), CUTS)
def test_spans_cover_every_layer_once_in_order(blocks, pp, vpp):
    spans = layer_spans(blocks, pp, vpp)
    in_order = [spans[s][c] for c in range(vpp) for s in range(pp)]
    assert list(chain(*(range(*span) for span in in_order))) == list(range(blocks + 2))
    assert max(block_cuts(blocks, pp * vpp)) - min(block_cuts(blocks, pp * vpp)) <= 1


def make(**degrees):
    return plan_from_degrees(32, 16, **({"seq_len": 1024} | degrees))


def test_tensor_ranks_are_neighbours_and_stages_follow_each_other():
    plan = make(tp=2, cp=2, pp=2)
    first, second = plan.groups[0].stages
    assert first.ranks == tuple(range(8)) and second.ranks == tuple(range(8, 16))
    assert (first.inner_dp, first.num_layers, second.num_layers) == (2, 17, 17)


def test_defaults():
    plan = make(tp=2, pp=2)
    group = plan.groups[0]
    assert plan.global_batch == 4 * 2 and group.share == 8, "global batch dp x pp"
    assert group.micro_batch == 4 and group.num_micro_batches == 2, "micro-batch 1 on each of 4 ranks"
    assert group.schedule == "1f1b" and group.sp and not make().groups[0].sp
    assert make(pp=2, vpp=2).groups[0].schedule == "interleaved"
    assert group.stages[0].zero == 1 and group.stages[0].recompute == "none" and plan.precision == "bf16"


@pytest.mark.parametrize(
    ("degrees", "global_batch", "micro_batches"),
    [
        ({"pp": 4}, 16, 4),  # dp 4 x pp 4
        ({"pp": 4, "micro_batch": 2}, 16, 2),  # the same samples in larger pieces
        ({"pp": 2, "micro_batch": 4}, 32, 1),  # never less than one micro-batch
        ({"pp": 4, "micro_batch": 3}, 24, 2),  # whole ones
        ({"pp": 4, "vpp": 2, "micro_batch": 2}, 32, 4),  # interleaving takes pp of them at a time
    ],
)
def test_an_unstated_batch_is_dp_x_pp_in_whole_micro_batches(degrees, global_batch, micro_batches):
    plan = make(**degrees)
    assert plan.global_batch == global_batch
    assert plan.groups[0].num_micro_batches == micro_batches


@pytest.mark.parametrize(
    ("degrees", "key", "words"),
    [
        ({"tp": 3}, "--tp/--pp/--cp", "does not divide 16 devices"),
        ({"tp": 32}, "--tp/--pp/--cp", "does not divide 16 devices"),
        ({"dp": 8}, "--dp", "Leave out --dp, or set it to 16"),
        ({"dp": 17}, "--dp", "the cluster has 16 devices"),
        ({"dp": 3, "tp": 5}, "--dp", "Choose degrees whose product divides 16"),
        ({"tp": 0}, "--tp", "0 is not a valid tp"),
        ({"tp": -1}, "--tp", "from 1 to 2147483648"),
        ({"tp": 2.0}, "--tp", "2.0 is not"),
        ({"tp": True}, "--tp", "True is not"),
        ({"tp": float("nan")}, "--tp", "nan is not"),
        ({"tp": 10**30}, "--tp", "is not a valid tp"),
        ({"tp": 10**6000}, "--tp", "a very long int is not"),
        ({"micro_batch": 2**40}, "--micro-batch", "1099511627776 is not"),
        ({"micro_batch": 2**31}, "--global-batch", "34359738368 is not"),
        ({"seq_len": 2**60}, "--seq", "from 1 to 67108864"),
        ({"global_batch": 17}, "--global-batch", "Use 16"),
        ({"global_batch": -16}, "--global-batch", "-16 is not"),
        ({"ep": 3}, "--ep", "does not divide tp x cp x dp = 16"),
        ({"ep": 8, "etp": 4}, "--ep", "ep 8 x etp 4"),
        ({"pp": 16, "vpp": 4}, "--pp", "Use at most 32 virtual stages"),
        ({"pp": 2, "vpp": 2, "schedule": "1f1b"}, "--schedule", "Use --schedule interleaved"),
        ({"schedule": "1f2b"}, "--schedule", "Did you mean '1f1b'?"),
        ({"precision": "bf"}, "--dtype", "Did you mean 'bf16'?"),
        ({"optimizer": "adamx"}, "--optimizer", "Did you mean 'adamw'?"),
        ({"offload": "cpu"}, "--offload", "Must be one of none"),
        ({"zero": 4}, "--zero", "from 0 to 3"),
        ({"zero": -1}, "--zero", "from 0 to 3"),
        ({"zero": "1"}, "--zero", "'1' is not"),
        ({"shard_size": 0}, "--shard-size", "0 is not"),
        ({"shard_size": -2}, "--shard-size", "-2 is not"),
        ({"recompute": "some"}, "--recompute", "Must be none, selective"),
        ({"sp": "yes"}, "--sp", "Must be true or false"),
    ],
)
def test_a_bad_flag_names_key_value_rule_and_fix(degrees, key, words):
    with pytest.raises(SpecError) as caught:
        make(**degrees)
    error = caught.value
    assert error.exit_code == 2 and error.key == key and words in str(error) and error.rule
    json.dumps(error.to_dict(), allow_nan=False)
