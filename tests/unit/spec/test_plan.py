"""The plan file: what it says, what it refuses and how it says so."""

import json

import pytest

from foreshard.errors import SpecError
from foreshard.spec.plan import check_recompute
from foreshard.spec.plan_file import MAX_FILE_BYTES, load_plan, parse_plan


def plan_data():
    """The smallest plan file with every level: two groups, the second of two stages."""
    return {
        "global_batch": 12,
        "seq_len": 128,
        "defaults": {"micro_batch": 2, "zero": 2, "recompute": "selective"},
        "groups": [
            {"share": 8, "stages": [{"ranks": [0, 1], "layers": [[0, 4]], "tp": 2}]},
            {
                "share": 4,
                "micro_batch": 1,
                "zero": 0,
                "stages": [
                    {"ranks": [2], "layers": [[0, 2]], "zero": 3},
                    {"ranks": [3], "layers": [[2, 4]], "recompute": "full"},
                ],
            },
        ],
    }


def test_stage_overrides_group_overrides_defaults():
    plan = parse_plan(plan_data())
    first, second = plan.groups
    assert (first.micro_batch, second.micro_batch) == (2, 1)
    assert [stage.zero for group in plan.groups for stage in group.stages] == [2, 3, 0]
    assert [stage.recompute for stage in second.stages] == ["selective:core_attn", "full"]


def test_counts_of_a_plan():
    plan = parse_plan(plan_data())
    assert plan.ranks == (0, 1, 2, 3) and plan.tokens == 12 * 128
    assert plan.groups[0].num_micro_batches == 4 and plan.groups[1].num_chunks == 1
    assert plan.groups[0].stages[0].inner_dp == 1 and plan.groups[0].stages[0].num_layers == 4


def test_a_short_last_micro_batch_counts_as_one():
    data = plan_data()
    data["groups"][0]["micro_batch"] = 3
    assert parse_plan(data).groups[0].num_micro_batches == 3


def changed(path, value):
    """The plan data with the value at a path, written like groups.0.share, replaced."""
    data = plan_data()
    *parents, last = path.split(".")
    place = data
    for name in parents:
        place = place[int(name)] if name.isdecimal() else place.setdefault(name, {})
    place[int(last) if last.isdecimal() else last] = value
    return data


STAGE = "groups.0.stages.0"
STAGE_KEY = "groups[0].stages[0]"


@pytest.mark.parametrize(
    ("path", "value", "key", "words"),
    [
        ("global_batch", 0, "global_batch", "0 is not valid. Must be a whole number from 1 to"),
        ("global_batch", 2**31 + 1, "global_batch", "whole number"),
        ("global_batch", True, "global_batch", "true is not valid"),
        ("global_batch", 4.0, "global_batch", "4.0 is not valid"),
        ("seq_len", -1, "seq_len", "-1 is not valid"),
        ("seq_len", 2**60, "seq_len", "from 1 to 67108864"),
        ("schema_version", 2, "schema_version", "Must be 1"),
        ("schema_version", True, "schema_version", "true"),
        ("precision", "bf-16", "precision", "Did you mean 'bf16'?"),
        ("optimizer", ["adamw"], "optimizer", "Must be one of adamw"),
        ("framework", 3, "framework", "Must be a string"),
        ("defaults", [], "defaults", "Must be a table (in JSON an object)"),
        ("defaults.tp", 2, "defaults.tp", "unknown key 'tp'"),
        ("comm.overlap", True, "comm.overlap", "unknown key 'overlap'"),
        ("comm.grad_overlap", 1, "comm.grad_overlap", "Must be true or false"),
        ("groups", [], "groups", "Must be a list that is not empty"),
        ("groups", "x", "groups", "Must be a list"),
        ("groups.0", 1, "groups[0]", "Must be a table (in JSON an object)"),
        ("groups.0.share", -8, "groups[0].share", "-8"),
        ("groups.0.sp", "yes", "groups[0].sp", "Must be true or false"),
        ("groups.0.shares", 3, "groups[0].shares", "Did you mean 'share'?"),
        ("groups.0.schedule", "1f1B", "groups[0].schedule", "Did you mean '1f1b'?"),
        ("groups.0.micro_batch", None, "groups[0].micro_batch", "null is not valid"),
        ("groups.0.stages", {}, "groups[0].stages", "Must be a list"),
        (f"{STAGE}.ranks", [0, -1], f"{STAGE_KEY}.ranks[1]", "-1 is not valid"),
        (f"{STAGE}.ranks", [], f"{STAGE_KEY}.ranks", "not empty"),
        (f"{STAGE}.layers", [[0, 4, 5]], f"{STAGE_KEY}.layers[0]", "half-open intervals"),
        (f"{STAGE}.layers", [[4, 4]], f"{STAGE_KEY}.layers[0]", "at least one layer"),
        ("defaults.zero", 5, "defaults.zero", "from 0 to 3"),
        ("defaults.sp", "on", "defaults.sp", "true or false"),
        (f"{STAGE}.tp", 10**30, f"{STAGE_KEY}.tp", "whole number"),
        (f"{STAGE}.zero", 4, f"{STAGE_KEY}.zero", "from 0 to 3"),
        (f"{STAGE}.shard_size", 0, f"{STAGE_KEY}.shard_size", "0 is not valid"),
        (f"{STAGE}.offload", "cpu", f"{STAGE_KEY}.offload", "Must be one of none"),
        (f"{STAGE}.rank_shares", [1.5], f"{STAGE_KEY}.rank_shares[0]", "1.5 is not valid"),
        (f"{STAGE}.recompute", "selective:mpl", f"{STAGE_KEY}.recompute", "Known modules: core_attn"),
        (f"{STAGE}.schedule", "1f1b", f"{STAGE_KEY}.schedule", "unknown key 'schedule'"),
    ],
)
def test_a_bad_value_names_key_value_and_rule(path, value, key, words):
    with pytest.raises(SpecError) as caught:
        parse_plan(changed(path, value), file="p.json")
    error = caught.value
    assert error.exit_code == 2 and error.file == "p.json" and error.key == key
    assert words in str(error)
    json.dumps(error.to_dict(), allow_nan=False)


@pytest.mark.parametrize(
    ("path", "key"),
    [
        ("global_batch", "global_batch"),
        ("groups.0.share", "groups[0].share"),
        (f"{STAGE}.layers", f"{STAGE_KEY}.layers"),
    ],
)
def test_a_missing_key_is_named(path, key):
    data = plan_data()
    *parents, last = path.split(".")
    place = data
    for name in parents:
        place = place[int(name)] if name.isdecimal() else place[name]
    del place[last]
    with pytest.raises(SpecError, match=f"missing key '{last}'") as caught:
        parse_plan(data)
    assert caught.value.key == key


BAD_RULES = ["every-" + "9" * 5000, "full:uniform:" + "9" * 5000, "every-0", "full:block:", "every-\u0663"]


@pytest.mark.parametrize("value", [*BAD_RULES, "none:1", "", None, ["full"], "selective:mlp+"])
def test_bad_recompute_rules(value):
    with pytest.raises(SpecError, match="Must be none, selective"):
        check_recompute(value)


def test_recompute_has_one_normal_form():
    assert check_recompute("selective") == check_recompute("selective:core_attn") == "selective:core_attn"
    assert check_recompute("selective:mlp+moe+mlp") == "selective:mlp+moe"
    assert check_recompute("full:uniform:2") == "full:uniform:2"


def written(tmp_path, data):
    path = tmp_path / "plan.json"
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return str(path)


@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_a_file_reads_as_its_data_with_or_without_a_byte_order_mark(tmp_path, mark):
    assert load_plan(written(tmp_path, mark + json.dumps(plan_data()))) == parse_plan(plan_data())


TEXT = json.dumps(plan_data())
BAD_FILES = {
    "truncated": (TEXT[: len(TEXT) // 2], "check for a truncated file"),
    "empty": ("", "the file is empty"),
    "null": ("null", "Must be a table"),
    "nan": (TEXT.replace("12,", "NaN,"), "NaN is not a JSON number"),
    "infinity": (TEXT.replace("12,", "-Infinity,"), "-Infinity is not a JSON number"),
    "overflow": (TEXT.replace("12,", "1e999,"), "inf is not valid"),
    "huge": (TEXT.replace("12,", "9" * 100 + ","), "is not valid"),
    "thousands of digits": (TEXT.replace("12,", "9" * 10_000 + ","), "not valid JSON"),
    "key twice": (TEXT.replace('"seq_len"', '"global_batch"'), "'global_batch' appears twice"),
    "deep": ("[" * 100_000, "not valid JSON"),
    "less deep": ('{"global_batch":' + "[" * 800 + "]" * 800 + ',"seq_len":1,"groups":[1]}', "is not valid"),
    "utf-16": (TEXT.encode("utf-16"), "byte 0 is not UTF-8"),
    "lone surrogate": ('{"\\ud800": 1}', "unknown key"),
    "long key": ('{"' + "k" * 100_000 + '": 1}', "unknown key"),
    "large": (b" " * (MAX_FILE_BYTES + 1), "at most 8.00 MiB"),
    "10 MB of noise": (b"\xff" * 10_000_000, "at most 8.00 MiB"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_the_users_error(tmp_path, name):
    data, words = BAD_FILES[name]
    path = written(tmp_path, data)
    with pytest.raises(SpecError) as caught:
        load_plan(path)
    error = caught.value
    assert words in str(error) and error.file == path and len(str(error)) < 600
    json.dumps(error.to_dict(), allow_nan=False)


@pytest.mark.parametrize("path", ["/no/such/plan.json", "/", "a\0b", "x" * 5000])
def test_what_cannot_be_read_is_the_users_error(path):
    with pytest.raises(SpecError, match="cannot read the file"):
        load_plan(path)
