import pytest

pytestmark = pytest.mark.usefixtures("stand_in")

RUN = ("whatif", "llama3-8b", "2x8xh100-sxm", "--json")


def changes(*texts):
    return [part for text in texts for part in ("--change", text)]


def test_effects_come_best_first_and_carry_their_predictions(shell):
    answer = shell(*RUN, *changes("tp=4", "nodes=4", "recompute=full"))
    gains = [one["gain"] for one in answer.json["effects"]]
    assert answer.code == 0 and gains == sorted(gains, reverse=True)
    assert answer.json["effects"][0]["change"] == "nodes=4"
    assert answer.json["effects"][0]["prediction"]["plan"]["global_batch"] == 32


def test_changes_joined_by_a_comma_happen_together(shell):
    plan = shell(*RUN, *changes("tp=4,pp=2")).json["effects"][0]["prediction"]["plan"]
    assert len(plan["groups"][0]["stages"]) == 2 and plan["groups"][0]["stages"][0]["tp"] == 4


def test_hardware_changes(shell):
    effects = shell(*RUN, *changes("device=a100-sxm-80gb", "nic=100 Gb/s")).json["effects"]
    assert {one["prediction"]["cluster"] for one in effects} == {
        "2x8xh100-sxm with device a100-sxm-80gb",
        "2x8xh100-sxm with nic 100 Gb/s",
    }


def test_a_change_that_cannot_run_is_an_answer_not_a_failure(shell):
    answer = shell(*RUN, *changes("tp=3", "tp=2"))
    assert answer.code == 0
    last = answer.json["effects"][-1]
    assert last["change"] == "tp=3" and last["prediction"] is None and "does not divide" in last["error"]


@pytest.mark.parametrize(
    ("change", "fix"),
    [
        ("tpp=2", ""),
        ("tp", "tp=VALUE"),
        ("tp=two", ""),
        ("=", "tp=4"),
        ("zero=4", ""),
        ("device=h10", ""),
        ("sp=maybe", ""),
        ("nic=100", ""),
        ("network=400Gbps", "nic="),
        ("gpus=16", "nodes="),
    ],
)
def test_an_unknown_key_or_value_exits_2(shell, change, fix):
    answer = shell(*RUN, *changes(change))
    assert answer.code == 2 and fix in answer.json["error"]["fix"]


def test_words_of_other_tools_name_the_same_change(shell):
    effects = shell(*RUN, *changes("device=h200-sxm", "GPU=H200", "zero=3", "zero=FULL_SHARD")).json[
        "effects"
    ]
    steps = {effect["change"]: effect["prediction"]["step_time_s"] for effect in effects}
    assert steps["device=h200-sxm"] == steps["GPU=H200"] and steps["zero=3"] == steps["zero=FULL_SHARD"]


def test_without_changes_it_diagnoses(shell):
    answer = shell(*RUN)
    assert answer.code == 0 and answer.json["effects"] == [] and "diagnosis" in answer.json


def test_a_batch_that_follows_the_change_is_said(shell):
    told = shell("whatif", "llama3-8b", "2x8xh100-sxm", *changes("nodes=4", "zero=2"))
    assert "The global batch follows the change: 16 now, nodes=4 32." in told.out
    kept = shell("whatif", "llama3-8b", "2x8xh100-sxm", "--global-batch", "64", *changes("nodes=4"))
    assert "follows the change" not in kept.out
