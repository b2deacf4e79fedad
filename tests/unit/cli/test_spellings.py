"""Ordinary spellings of amounts, counts and words are read; others are refused with what to write."""

import click
import pytest

from foreshard.cli.options.values import Amount, BucketSize, Count, FrameworkLabel, Level, Word
from foreshard.cli.program import _usage_error, program
from foreshard.errors import SpecError
from foreshard.spec.adapters import adapters_of
from foreshard.spec.plan import OFFLOADS, OPTIMIZERS, PRECISIONS, SCHEDULES, check_recompute
from foreshard.spec.scenario import ranks_of

HOURS = Amount(dimension="s", unit="h")
TOKENS = Amount(dimension="tokens")
DOLLARS = Amount(dimension="usd", unit="USD")


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (Amount(), "15,000,000", 15e6),
        (Amount(), "15_000", 15e3),
        (Amount(dimension="s"), "350 ms", 0.35),
        (HOURS, "12", 12.0),
        (HOURS, "3 days", 72.0),
        (HOURS, "90 min", 1.5),
        (DOLLARS, "$1,500", 1500.0),
        (DOLLARS, "500 USD", 500.0),
        (Amount(dimension="usd_per_h", unit="USD/h"), "2.5 USD/h", 2.5),
        (Count(), " 4,096 ", 4096),
        (Count(thousand=1024), "8k", 8192),
        (Count(thousand=1024), "128K tokens", 131072),
        (Count(thousand=1024), "0.5k", 512),
        (TOKENS, "2B", 2e9),
        (TOKENS, "1.5 trillion", 1.5e12),
        (TOKENS, "300m tokens", 3e8),
        (DOLLARS, "$10k", 1e4),
        (DOLLARS, "1M USD", 1e6),
        (HOURS, "2 weeks", 336.0),
        (HOURS, "2w", 336.0),
        (Amount(dimension="s"), "350 milliseconds", 0.35),
        (Amount(dimension="s"), "2 minutes", 120.0),
        (Amount(dimension="usd_per_h", unit="USD/h"), "$1.99/gpu/h", 1.99),
        (Amount(dimension="usd_per_h", unit="USD/h"), "$2 per hour", 2.0),
    ],
)
def test_spellings_that_are_read(kind, text, value):
    assert kind.convert(text, None, None) == pytest.approx(value)


@pytest.mark.parametrize(
    ("kind", "text", "fix"),
    [
        (Amount(dimension="tokens"), "15 fT", "Write it like 2e9 or 2B"),
        (Count(), "4k", "Write it like 4000 or 4096"),
        (HOURS, "3 fortnights", "Write it like 5 or '5 h'"),
        (HOURS, "-3 days", "Write it like 5 or '5 h'"),
        (DOLLARS, "$", "Write it like 5 or '5 USD'"),
    ],
)
def test_spellings_that_are_refused_say_what_to_write(kind, text, fix):
    with pytest.raises(click.BadParameter, match=fix):
        kind.convert(text, None, None)


def test_a_price_and_a_time_with_units_predict_as_without(shell):
    run = ("predict", "llama3-8b", "1x8xh100-sxm", "--tp", "2", "--json")
    plain = shell(*run, "--usd-per-device-hour", "2.5", "--observed-step-s", "0.35").json
    units = shell(*run, "--usd-per-device-hour", "$2.5", "--observed-step-s", "350 ms").json
    assert units["cost"] == pytest.approx(plain["cost"])
    assert units["step_time_s"] == pytest.approx(plain["step_time_s"])


@pytest.mark.parametrize("text", ["Megatron-Core", "MEGATRON_CORE", "megatron core"])
def test_a_framework_is_read_in_any_case(shell, text):
    asked = ("predict", "llama3.2-1b", "1x8xh100-sxm", "--json")
    plain, spelled = shell(*asked, "--framework", "megatron-core"), shell(*asked, "--framework", text)
    assert plain.code == spelled.code == 0
    assert plain.json["step_time_s"] == spelled.json["step_time_s"]
    assert FrameworkLabel().convert("Megatron-Bridge@26.06", None, None) == "megatron-bridge@26.06"


def test_recompute_rules_are_read_in_any_case():
    assert check_recompute("Full") == "full"
    assert check_recompute("selective:core-attn+MLP") == "selective:core_attn+mlp"


def test_an_unknown_framework_of_a_change_is_bad_input(shell):
    answer = shell("whatif", "llama3-8b", "1x8xh100-sxm", "--tp", "2", "--change", "framework=zzz")
    assert answer.code == 2
    assert "--change framework: unknown framework 'zzz'" in answer.err
    assert "See 'foreshard schema frameworks'" in answer.err


def test_mistakes_have_a_fix(shell, tmp_path):
    config = tmp_path / "options.toml"
    config.write_text("[predcit]\ntp = 2\n")
    answer = shell("predict", "llama3-8b", "1x8xh100-sxm", "--config", config)
    assert answer.code == 2
    assert "Did you mean 'predict'?" in answer.err
    assert "See 'foreshard schema'" in shell("schema", "zzzzz").err
    with pytest.raises(SpecError) as error:
        ranks_of("0-9", 8)
    assert error.value.fix


DTYPE, OPTIMIZER, SCHEDULE = Word(*PRECISIONS), Word(*OPTIMIZERS), Word(*SCHEDULES)


@pytest.mark.parametrize(
    ("kind", "texts", "value"),
    [
        (DTYPE, ("torch.bfloat16", "bf16-mixed", "mixed bf16", "BFloat"), "bf16"),
        (DTYPE, ("16-mixed", "mixed_fp16"), "fp16"),
        (DTYPE, ("mixed fp8", "te-fp8", "FP8-hybrid"), "fp8"),
        (OPTIMIZER, ("Adam", "adamw_torch_fused", "fused_adam", "distributed_adam"), "adamw"),
        (OPTIMIZER, ("adam8bit", "adamw_bnb_8bit"), "adamw-8bit"),
        (SCHEDULE, ("Interleaved1F1B", "1f1b-interleaved"), "interleaved"),
        (SCHEDULE, ("one_f_one_b", "pipedream-flush"), "1f1b"),
        (Word(*OFFLOADS), ("off", "no"), "none"),
        (Level(), ("3", "zero3", "ZeRO-3", "stage 3", "stage_3", "FULL_SHARD"), 3),
        (Level(), ("off", "none", "zero0", "NO_SHARD"), 0),
        (FrameworkLabel(), ("megatron", "Megatron", "mcore"), "megatron-core"),
        (FrameworkLabel(), ("llm-foundry", "MosaicML"), "composer"),
    ],
)
def test_words_of_other_tools_that_mean_one_thing_are_read(kind, texts, value):
    assert {kind.convert(text, None, None) for text in texts} == {value}


@pytest.mark.parametrize(
    ("kind", "text", "fix"),
    [
        (DTYPE, "amp", "Write bf16 or fp16"),
        (DTYPE, "16", "Write bf16 or fp16"),
        (DTYPE, "nf4", "not modelled"),
        (OPTIMIZER, "dion", "Write muon"),
        (OPTIMIZER, "signsgd", "Write sgd"),
        (OPTIMIZER, "lamb", "Write adamw"),
        (SCHEDULE, "vpp", "Did you mean 'interleaved'"),
        (Word(*OFFLOADS, "cpu"), "nvme", "not modelled"),
        (Level(), "fsdp", "FULL_SHARD"),
        (BucketSize(), "25M", "Write 25MiB or 25MB"),
        (Amount(dimension="usd_per_h", unit="USD/h"), "2.5 €", "in USD"),
    ],
)
def test_words_without_one_meaning_are_refused_with_what_to_write(kind, text, fix):
    with pytest.raises(click.BadParameter, match=fix):
        kind.convert(text, None, None)


def test_a_framework_by_another_name_is_said(shell):
    answer = shell("predict", "llama3.2-1b", "1x8xh100-sxm", "--framework", "megatron", "--json")
    assert answer.code == 0 and answer.json["plan"]["framework"] == "megatron-core"
    assert "framework megatron: taken as megatron-core" in answer.err


@pytest.mark.parametrize(
    ("texts", "rule"),
    [
        (("full activation checkpointing", "gradient_checkpointing", "full AC", "Full recompute"), "full"),
        (("off", "no", "false"), "none"),
        (("SelectiveAC", "selective activation checkpointing"), "selective:core_attn"),
        (("core_attn", "selective:core_attn"), "selective:core_attn"),
        (("every 2", "every-2"), "every-2"),
        (("full block 4", "full-block-4", "full:block:4"), "full:block:4"),
    ],
)
def test_recompute_is_read_as_other_tools_call_it(texts, rule):
    assert {check_recompute(text) for text in texts} == {rule}


@pytest.mark.parametrize(
    ("text", "fix"), [("on", "full for all.*selective"), ("half", "every-2"), ("block", "full:block:N")]
)
def test_recompute_that_leaves_something_open_is_refused(text, fix):
    with pytest.raises(SpecError, match=fix):
        check_recompute(text)


def test_targets_of_adapters_are_read_as_peft_calls_them():
    assert adapters_of("r16") == adapters_of("16:attn") == (16, ("q", "k", "v", "o"))
    assert adapters_of("8:q_proj,v_proj") == (8, ("q", "v"))
    assert adapters_of("8:all-linear") == (8, ("q", "k", "v", "o", "gate", "up", "down"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--zero3",), "--zero N"),
        (("--epochs", "1"), "--tokens"),
        (("--verbose",), "--explain"),
        (("--ulysses", "2"), "--cp"),
        (("--qlora",), "--lora RANK"),
    ],
)
def test_flags_of_other_tools_lead_to_ours(shell, words, said):
    answer = shell("predict", "llama3-8b", "1x8xh100-sxm", *words)
    assert answer.code == 2 and f"Write {said}" in answer.err


def test_flags_of_other_tools_with_our_meaning_are_taken(shell):
    run = ("predict", "llama3.2-1b", "2x8xh100-sxm", "--json")
    theirs = (
        "--tensor-parallel-size",
        "2",
        "--pp-size",
        "2",
        "--vp",
        "2",
        "--per-device-train-batch-size",
        "2",
    )
    ours = ("--tp", "2", "--pp", "2", "--vpp", "2", "--micro-batch", "2")
    assert (
        shell(*run, *theirs, "--max-seq-len", "2k").json["plan"]
        == shell(*run, *ours, "--seq", "2k").json["plan"]
    )


@pytest.mark.parametrize(
    ("words", "same"),
    [
        (("comm", "predict", "AllReduce", "1GiB"), ("comm", "predict", "all-reduce", "1GiB")),
        (("comm", "predict", "a2a", "1MiB"), ("comm", "predict", "all-to-all", "1MiB")),
    ],
)
def test_collectives_are_read_as_nccl_calls_them(shell, words, same):
    one, other = (shell(*asked, "1x8xh100", "--json").json for asked in (words, same))
    assert one["time_s"] == other["time_s"]


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (("comm", "predict", "all-reduce", "1G", "8xh100"), "Write 1GiB or 1GB"),
        (
            ("plan", "llama3-8b", "8xh100", "--global-batch", "8", "--tp", "1-4"),
            "Write --min-tp 1 --max-tp 4",
        ),
        (("plan", "llama3-8b", "8xh100", "--global-batch", "8", "--forbid", "recompute"), "recompute=full"),
        (("plan", "llama3-8b", "8xh100", "--global-batch", "8", "--max-gpus", "4"), "Write --max-devices"),
        (("plan", "llama3-8b", "8xh100", "--global-batch", "8", "--recompute", "any"), "Leave it out"),
    ],
)
def test_slips_of_other_verbs_say_what_to_write(shell, words, fix):
    answer = shell(*words)
    assert answer.code == 2 and fix in answer.err


def test_changes_and_objectives_are_read_in_other_words(shell):
    run = ("whatif", "llama3.2-1b", "1x8xh100", "--seq", "2048", "--tp", "2", "--json")
    theirs = shell(*run, "--change", "gbs=64", "--change", "zero=stage3", "--change", "tensor_parallel=4")
    ours = shell(*run, "--change", "global-batch=64", "--change", "zero=3", "--change", "tp=4")
    gains = [[change["gain"] for change in answer.json["effects"]] for answer in (theirs, ours)]
    assert len(gains[0]) == 3 and gains[0] == gains[1]
    assert Word("time", "cost", "energy").convert("cheapest", None, None) == "cost"


@pytest.mark.parametrize("words", ["--foo", "--dtpye bf16", "--json=3", "one two three", "--dtype"])
def test_every_refusal_of_a_word_has_a_rule_and_a_fix(words):
    with pytest.raises(click.UsageError) as caught:
        program.main(["predict", *words.split()], standalone_mode=False)
    said = _usage_error(caught.value)
    assert said.rule and said.fix and said.exit_code == 2


def test_a_switch_with_a_value_is_to_be_written_alone():
    with pytest.raises(click.ClickException) as caught:
        program.main(["run", "--resume=yes", "job.py"], standalone_mode=False)
    assert _usage_error(caught.value).fix == "Write --resume alone"


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("--bf16 True -tp 2", "--dtype bf16 --tp 2"),
        ("--fp16 --gradient_checkpointing", "--dtype fp16 --recompute full"),
        ("--recompute-activations --use-distributed-optimizer", "--recompute selective --zero 1"),
        (
            "--recompute-granularity full --recompute-method block --recompute-num-layers 4",
            "--recompute full:block:4",
        ),
        ("--overlap-grad-reduce --no-overlap-param-gather", "--grad-overlap --no-param-gather-overlap"),
        (
            "--zero_stage 3 --ctx 4k --framework hf --torch-compile",
            "--zero 3 --seq 4k --framework hf --compile",
        ),
        ("--num-virtual-stages-per-pipeline-rank 2 --pp 2", "--vpp 2 --pp 2"),
        ("--parallelism.tensor_parallel_degree 2 --training.seq_len 4096", "--tp 2 --seq 4096"),
        ("--tp 2 --sequence_parallel=false", "--tp 2 --no-sp"),
        ("--local_batch_size 2 --mixed_precision fp16", "--micro-batch 2 --dtype fp16"),
        ("--pp 2 --pipeline_parallel_schedule GPipe", "--pp 2 --schedule gpipe"),
        ("--cpu-offload --framework deepspeed", "--offload cpu --framework deepspeed"),
    ],
)
def test_switches_of_other_tools_are_ours(shell, theirs, ours):
    run = ("predict", "llama3.2-1b", "8xh100", "--json")
    assert shell(*run, *theirs.split()).json["plan"] == shell(*run, *ours.split()).json["plan"]


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        ("--gradient-checkpointing=false", "Write --recompute full"),
        ("--recompute-num-layers 1", "Write --recompute full:uniform:N or full:block:N"),
        ("--hsdp", "Write --shard-size"),
        ("--deepspeed", "Write --framework deepspeed"),
        ("--sharding FULL_SHARD", "Write --zero 3"),
        ("-m llama3-8b", "Write MODEL first"),
        ("--bucket_cap_mb 25", "Write --buckets SIZE, as 25MiB"),
        ("--buckets 25", "Write it like 25MiB"),
        ("--train_batch_size 32", "Write --global-batch (samples of a step)"),
        ("--fsdp-sharding-strategy 1", "Write --zero 3 for FULL_SHARD"),
        ("--region us-east-1", "Write --prices FILE"),
    ],
)
def test_words_of_other_tools_without_one_meaning_are_told_what_to_write(shell, words, fix):
    answer = shell("predict", "llama3.2-1b", "8xh100", *words.split())
    assert answer.code == 2
    assert fix in answer.err


@pytest.mark.parametrize(
    ("verb", "ours"), [("estimate", "predict"), ("optimize", "plan"), ("gpus", "devices")]
)
def test_a_verb_of_another_word_is_told_what_does_it(shell, verb, ours):
    answer = shell(verb, "llama3-8b", "8xh100")
    assert answer.code == 2 and f"Did you mean {ours!r}?" in answer.err
