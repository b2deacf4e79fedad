"""Where a stranger with the README alone stumbled: what is taken now, and what the refusal says to write."""

import json
import re

import pytest

import foreshard
from foreshard.errors import SpecError

CONFIG = {
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 5504,
    "num_attention_heads": 16,
    "num_hidden_layers": 4,
    "vocab_size": 64000,
}


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text(json.dumps(CONFIG))
    return "config.json"


def test_a_configuration_here_is_not_named_after_the_folder_of_work(shell, config):
    assert shell("predict", config, "8xl40s").out.startswith("config.json on 8xl40s")
    assert shell("predict", "mine", "8xl40s").out.startswith("mine on 8xl40s")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("predict", "8xh100", "llama3-8b"), "'8xh100' is a cluster. "),
        (("predict", "llama3-8b", "0xh100"), "Did you mean '1xh100'?"),
        (("predict", "llama3-8b", "2x8xh100", "400Gb/s"), "Write '2x8xh100@400Gb/s'"),
        (("predict", "llama3-8b", "8xh100", "--tp", "2", "400", "Gb/s"), "Write '8xh100@400 Gb/s'"),
        (("predict", "llama3-8b", "8xh100", "--tp", "eight"), "Write it like 8"),
        (("predict", "llama3-8b", "8xh100", "--gbs", "4M tokens"), "samples are tokens over the length"),
        (("export", "llama3-8b", "8xh100", "--to", "megatron"), "foreshard plan llama3-8b CLUSTER"),
        (("export", "plan.json", "llama3-8b", "--to", "accelerate"), "Write fsdp or deepspeed"),
        (("export", "plan.json", "llama3-8b", "--to", "nemo"), "Write megatron"),
        (("predict", "llama3-8b", "8xh100", "--tp", "-1"), "Write it like 8"),
        (("predict", "llama3-8b", "8xh100", "--seq", "-1"), "Write it like 8192 or 8k"),
        (("predict", "llama3-8b", "8xh100", "--torch-dynamo"), "Write --compile"),
        (("predict", "llama3-8b", "8xh100", "--lr", "1e-4"), "neither time nor memory"),
        (("predict", "llama3-8b", "8xh100", "--num-layers", "32"), "the config.json of that shape"),
        (("predict", "llama3-8b", "8xh100", "tp=2"), "Write --tp 2"),
        (("predict", "llama3-8b", "8xh100", "2x8xa100"), "Write '8xh100+2x8xa100' for both"),
        (("predict", "llama3-8b", "8xh100", "--tp", "auto"), "'foreshard plan' finds the best one"),
        (("plan", "llama3-8b", "8xh100", "--global-batch", "auto"), "--to-target' finds the best one"),
        (("predict", "llama3-8b", "8xh100@NVLink"), "Leave it out: it joins devices of a node"),
        (("plan", "llama3-8b", "8xh100", "--overlap-grad-reduce"), "Write --comm grad_overlap"),
        (("import", "x.py", "llama3-8b", "8xh100", "--from", "torchtitan@0.3"), "by Python code"),
        (("predict", "llama3-8b", "8xh100", "--explain", "true"), "A switch has no value"),
        (("predict", "llama3-8b", "--cluster", "8xh100"), "CLUSTER after MODEL"),
        (("export", "config.json", "--to", "megatron"), "foreshard plan MODEL CLUSTER --global-batch N"),
    ],
)
def test_a_slip_says_what_to_write(shell, config, words, said):
    answer = shell(*words)
    assert answer.code == 2 and said in answer.err


def test_python_takes_the_names_of_flags():
    asked = {"tp": 2, "micro_batch": 2, "seq_len": 4096, "precision": "bf16"}
    flags = {"tensor_parallel": 2, "mbs": 2, "seq": 4096, "dtype": "bf16"}
    one, other = (foreshard.predict("llama3.2-1b", "8xh100", **names) for names in (asked, flags))
    assert one.plan == other.plan and one.step_time_s == other.step_time_s
    with pytest.raises(SpecError, match="seq and seq_len together"):
        foreshard.predict("llama3.2-1b", "8xh100", seq=1024, seq_len=2048)
    with pytest.raises(SpecError, match="Write muon"):
        foreshard.predict("llama3.2-1b", "8xh100", optimizer="dion")


def test_python_says_that_the_batch_is_missing():
    with pytest.raises(SpecError, match="global_batch=512"):
        foreshard.plan("llama3-8b", "8xh100")


def test_python_exports_by_names(tmp_path):
    plan = foreshard.make_plan("llama3-8b", "8xh100", tp=2, global_batch=64)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan.to_dict()))
    made = foreshard.export(str(path), "nccl", model="llama3-8b", cluster="8xh100")
    assert made.files == foreshard.export(plan, "nccl", cluster=foreshard.load_cluster("8xh100")).files


def test_a_plan_in_the_place_of_the_model_is_told_where_it_goes(shell, tmp_path):
    plan = tmp_path / "plan.json"
    made = foreshard.make_plan("llama3-8b", "8xh100", tp=2)
    plan.write_text(json.dumps(foreshard.predict("llama3-8b", "8xh100", made).to_dict()))
    found = shell("predict", str(plan), "8xh100")
    assert found.code == 2 and "is a plan, no model" in found.err and "--plan" in found.err


def test_python_takes_what_a_configuration_holds_and_levels_by_their_words():
    found = foreshard.predict(CONFIG, "8xl40s", zero="ZeRO-3", tp="2")
    assert found.plan.groups[0].stages[0].zero == 3
    assert foreshard.predict(CONFIG, "8xl40s", zero=3, tp=2).step_time_s == found.step_time_s


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("ds.json", '{"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": true}}'),
        ("job.yaml", "distributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: FULL_SHARD}\n"),
        ("start.sh", "torchrun pretrain_gpt.py --num-layers 32 --micro-batch-size 1\n"),
        (
            "train.toml",
            '[model]\nname = "llama3"\nflavor = "8B"\n[parallelism]\ntensor_parallel_degree = 2\n',
        ),
    ],
)
def test_the_tool_of_a_configuration_is_known_by_its_words(tmp_path, shell, name, text):
    path = tmp_path / name
    path.write_text(text)
    answer = shell("predict", "llama3-8b", "8xh100", "--plan", path)
    tool = re.search(rf"foreshard import {path} MODEL CLUSTER --from (\w+)", answer.err)[1]
    own, known = (
        shell("import", path, "llama3-8b", "8xh100", "--json", *of) for of in ((), ("--from", tool))
    )
    assert answer.code == 2 and own.json == known.json


def test_a_file_of_no_tool_is_told_so(tmp_path, shell):
    (tmp_path / "notes.txt").write_text("tp = 2\n")
    answer = shell("import", tmp_path / "notes.txt", "llama3-8b", "8xh100")
    assert answer.code == 2 and "Name the one that reads it: --from TOOL" in answer.err


@pytest.mark.parametrize(("batch", "said"), [(4_194_304, "write --global-batch 512"), (512, "")])
def test_a_batch_in_tokens_is_told_that_it_counts_samples(shell, batch, said):
    answer = shell("predict", "llama3-8b", "1x8xh100-sxm", "--tp", "8", "--gbs", str(batch), "--seq", "8192")
    assert said in answer.err and ("a step of" in answer.err) == bool(said)
