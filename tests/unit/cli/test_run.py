"""What `foreshard run` refuses before any rank is started."""

import errno
import json
import sys

import pytest

from foreshard.errors import ForeshardError
from foreshard.profile.address import own_address
from foreshard.runtime import launch
from foreshard.spec.plan_file import parse_plan


def plan_dict():
    stages = [{"ranks": [0], "layers": [[0, 3]]}, {"ranks": [1], "layers": [[3, 8]]}]
    plan = parse_plan(
        {
            "global_batch": 4,
            "seq_len": 8,
            "precision": "fp32",
            "groups": [
                {"share": 3, "stages": stages},
                {"share": 1, "stages": [{"ranks": [2], "layers": [[0, 8]]}]},
            ],
        }
    )
    return plan.to_dict()


def changed(*path, to):
    plan = plan_dict()
    place = plan
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = to
    return plan


def sharded(zero):
    return {"share": 4, "micro_batch": 4, "stages": [{"ranks": [0, 1], "layers": [[0, 8]], "zero": zero}]}


FIRST = ("groups", 0)
CASES = {
    "schedule": (changed(*FIRST, "schedule", to="dualpipe"), "'dualpipe' is not supported"),
    "zb-h2": (changed(*FIRST, "schedule", to="zb-h2"), "'zb-h2' is not supported"),
    "tensor parallel": (changed(*FIRST, "stages", 0, "tp", to=2), "tp 2 does not divide 1 ranks"),
    "rank twice": (changed(*FIRST, "stages", 0, "ranks", to=[1]), "rank 1 is used twice"),
    "more ranks than started": (changed(*FIRST, "stages", 0, "ranks", to=[7]), "the plan uses rank 7"),
    "layers left out": (changed(*FIRST, "stages", 1, "layers", to=[[4, 8]]), "layers 3 to 3 are not covered"),
    "layers missing at the end": (
        changed("groups", 1, "stages", 0, "layers", to=[[0, 7]]),
        "layers end at 7",
    ),
    "samples missing": (changed(*FIRST, "share", to=2), "shares sum to 3"),
    "rank shares": (changed(*FIRST, "stages", 0, "rank_shares", to=[2]), "does not split micro_batch 1"),
    "precision": (changed("precision", to="fp8"), "'fp8' is not supported"),
    "wrap": (changed("wrap", to=4), "4 is not supported"),
    "prefetch": (changed("prefetch", to=2), "2 is not supported"),
    "weights gathered early": (
        changed("comm", to={"param_gather_overlap": True}) | {"groups": [sharded(zero=1)]},
        "comm.param_gather_overlap: param_gather_overlap true is not run",
    ),
    "weights gathered late": (
        changed("comm", to={"param_gather_overlap": False}) | {"groups": [sharded(zero=3)]},
        "param_gather_overlap false is not run",
    ),
    "sums of sharded gradients": (
        changed("comm", to={"grad_overlap": True}) | {"groups": [sharded(zero=2)]},
        "grad_overlap true is not run",
    ),
    "collectives of sharded gradients": (
        changed("collectives", to="tree") | {"groups": [sharded(zero=3)]},
        "collectives: groups[0].stages[0] shards gradients",
    ),
    "offload": (changed(*FIRST, "stages", 0, "offload", to="optimizer"), "'optimizer' is not supported"),
}


@pytest.fixture
def job(tmp_path):
    path = tmp_path / "job.py"
    path.write_text("")
    return path


@pytest.mark.parametrize("name", CASES)
def test_a_plan_that_cannot_run_is_bad_input(name, shell, tmp_path, job):
    plan, said = CASES[name]
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(plan))
    told = shell("run", "--plan", file, "--local", 3, "--out", tmp_path / "run", "--json", job)
    assert told.code == 2 and told.json["error"]["code"] == 2
    assert said in told.err or said in told.out
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "words, said",
    [
        (["--local", 3, "--steps", 0], "--steps"),
        (["--local", 3, "--detect-s", 0.01], "--detect-s"),
        (["--local", 3, "--max-starts", 0], "--max-starts"),
        (["--local", 3, "--clip-norm", "nan"], "--clip-norm"),
        (["--local", 3, "--clip-norm", -1], "--clip-norm"),
        (["--local", 3, "--port", 99_999], "--port"),
        (["--local", 3, "--seed", 2**64], "--seed"),
        (["--local", 3, "--secret-file", "s"], "--secret-file with --local"),
        ([], "neither --local nor torchrun"),
    ],
)
def test_options_out_of_range_are_bad_input(words, said, shell, tmp_path, job, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(plan_dict()))
    told = shell("run", "--plan", file, *words, "--out", tmp_path / "run", job)
    assert told.code == 2 and said in told.err


def test_missing_files_are_bad_input(shell, tmp_path, job):
    file = tmp_path / "plan.json"
    assert shell("run", "--plan", file, "--local", 3, job).code == 2
    file.write_text(json.dumps(plan_dict()))
    told = shell("run", "--plan", file, "--local", 3, tmp_path / "no.py")
    assert told.code == 2 and "no such file" in told.err


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EFBIG])
def test_a_disk_without_room_is_named(number, shell, tmp_path, job, monkeypatch):
    """The system names no file where a write fails."""

    def full(path):
        raise OSError(number, "no room")

    monkeypatch.setattr(launch, "make_secret", full)
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(plan_dict()))
    told = shell("run", "--plan", file, "--local", 3, "--out", tmp_path / "run", job)
    assert told.code == 1 and f"{tmp_path / 'run'}: cannot write: no room" in told.err


def test_a_folder_with_a_run_is_not_written_over(shell, tmp_path, job):
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(plan_dict()))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "supervisor.json").write_text("{}")
    told = shell("run", "--plan", file, "--local", 3, "--out", tmp_path / "run", job)
    assert told.code == 2 and "--resume" in told.err


def test_a_file_where_the_folder_belongs_is_bad_input(shell, tmp_path, job):
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(plan_dict()))
    for out in (job, job / "run"):
        told = shell("run", "--plan", file, "--local", 3, "--out", out, job)
        assert told.code == 2 and f"{out}: cannot write: Not a directory" in told.err


@pytest.mark.skipif(sys.platform != "linux", reason="where nobody may make a folder, root neither")
def test_a_folder_that_cannot_be_made_is_bad_input(shell, tmp_path, job):
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(plan_dict()))
    told = shell("run", "--plan", file, "--local", 3, "--out", "/proc/run", job)
    assert told.code == 2 and "/proc/run: --out: cannot write" in told.err


def test_a_policy_nearly_right_is_told_the_right_one(shell, tmp_path, job):
    told = shell("run", "--plan", "plan.json", "--policy", "lyapunv", job)
    assert told.code == 2 and "Did you mean 'lyapunov'?" in told.err


def test_a_lab_that_is_no_text_is_bad_input(shell, tmp_path, job):
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(plan_dict()))
    (tmp_path / "lab.toml").write_bytes(b"\x89\xff")
    told = shell("run", "--plan", file, "--local", 3, "--lab", tmp_path / "lab.toml", job)
    assert told.code == 2 and "lab.toml: byte 0 is not UTF-8" in told.err


def test_a_resume_without_a_checkpoint_is_said(shell, tmp_path, job):
    file = tmp_path / "plan.json"
    told = shell("run", "--plan", file, "--local", 3, "--out", tmp_path / "run", "--resume", job)
    assert "no checkpoint in" in told.err and told.code == 2  # and there is no plan either


def test_an_address_of_another_host_is_bad_input(shell, tmp_path, job):
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(plan_dict()))
    told = shell(
        "run", "--plan", file, "--local", 3, "--out", tmp_path / "run", "--interface", "192.0.2.1", job
    )
    assert told.code == 2 and "cannot listen on 192.0.2.1" in told.err


def test_hosts_without_a_common_secret_are_bad_input(shell, tmp_path, job, monkeypatch):
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "4"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(plan_dict()))
    told = shell("run", "--plan", file, "--out", tmp_path / "run", job)
    assert told.code == 2 and "no shared secret" in told.err


@pytest.mark.parametrize(
    ("told_ranks", "said"),
    [
        ({"RANK": "0", "WORLD_SIZE": "abc"}, "WORLD_SIZE: not a number: 'abc'"),
        ({"RANK": "0", "WORLD_SIZE": "-4"}, "WORLD_SIZE: not a number: '-4'"),
        ({"RANK": "0"}, "WORLD_SIZE: not set"),
        ({"RANK": "0", "WORLD_SIZE": "4", "MASTER_PORT": ""}, "MASTER_PORT: not a number: ''"),
    ],
)
def test_an_environment_that_torchrun_did_not_make_is_bad_input(
    shell, tmp_path, job, monkeypatch, told_ranks, said
):
    for name, value in told_ranks.items():
        monkeypatch.setenv(name, value)
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(plan_dict()))
    told = shell("run", "--plan", file, "--out", tmp_path / "run", job)
    assert told.code == 2 and said in told.err and "--local" in told.err


@pytest.mark.parametrize(
    ("master", "said"),
    [("127.0.0.1", "127.0.0.1 is a loopback address"), ("nowhere", "no route to nowhere: not known")],
)
def test_hosts_that_cannot_meet_are_bad_input(shell, tmp_path, job, monkeypatch, master, said):
    def towards(host):
        if host == "nowhere":
            raise OSError(0, "not known")
        return own_address(host)

    monkeypatch.setattr(launch, "own_address", towards)
    told_ranks = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": master}
    for name, value in (told_ranks | {"FORESHARD_SECRET": "of this test only"}).items():
        monkeypatch.setenv(name, value)
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(plan_dict()))
    told = shell("run", "--plan", file, "--out", tmp_path / "run", job)
    assert told.code == 2 and said in told.err and "--interface" in told.err
    assert not (tmp_path / "run" / "supervisor.json").exists()


@pytest.fixture
def launched(shell, tmp_path, job, monkeypatch):
    """Return a function of words that gives what the run is started with, or what is said instead."""
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps(plan_dict()))
    given = {}

    def take(*names, **options):
        given.update(options)
        raise ForeshardError("not started here")

    monkeypatch.setattr(launch, "launch", take)

    def call(*words):
        given.clear()
        ended = shell("run", "--plan", plan, "--local", 3, "--out", tmp_path / "out", *words, job)
        return dict(given), ended

    return call


NUMBERS = {"7": 7, " 7": 7, "+7": 7, "7.0": 7, "7e3": 7000, "1_000": 1000, "12,000": 12000}
SECONDS = {"5": 5.0, "5s": 5.0, "5 s": 5.0, "5000 ms": 5.0, "2 min": 120.0, "1h": 3600.0, "1e1": 10.0}
NAMES = {
    "--dtype": {"bfloat16": "bf16", "BF16": "bf16", "float32": "fp32", "half": "fp16", "double": "fp64"},
    "--device": {"gpu": "cuda", "GPU": "cuda", "CPU": "cpu"},
    "--policy": {"Static": "static"},
}
COUNTS = ("--steps", "--seed", "--checkpoint-every", "--eval-every", "--keep", "--threads", "--max-starts")


def test_numbers_times_and_words_are_read_as_people_write_them(launched):
    ways = (
        {option: NUMBERS for option in COUNTS}
        | dict.fromkeys(("--detect-s", "--progress-s"), SECONDS)
        | NAMES
    )
    for option, meanings in ways.items():
        for text, meant in meanings.items():
            given, ended = launched(option, text)
            assert given.get(option[2:].replace("-", "_")) == meant, (option, text, ended.err)


@pytest.mark.parametrize(
    "words",
    [
        ("--steps", "10k"),
        ("--steps", "1,00"),
        ("--steps", "7.5"),
        ("--steps", "1e99"),
        ("--steps", "nan"),
        ("--steps", "٣"),
        ("--local", "0"),
        ("--local", "-1"),
        ("--local", "99999"),
        ("--detect-s", "5 parsecs"),
        ("--detect-s", "5 GB"),
        ("--progress-s", "1 ms"),
        ("--device", "xpu"),
        ("--out", ""),
        ("--trace", ""),
        ("--trace", "."),
        ("--trace", f"{__file__}/trace.json"),
        ("--cluster", "nonsense"),
        ("--model", "nonsense"),
    ],
    ids=" ".join,
)
def test_what_cannot_be_meant_is_refused_before_a_rank_is_started(launched, words):
    given, ended = launched(*words)
    assert not given and ended.code == 2 and words[0] in ended.err + "--out --trace"


def test_ranks_that_the_plan_leaves_idle_are_said(launched):
    assert "idle" not in launched()[1].err
    assert "rank 3 is idle: the plan trains on 3 of the 4 ranks" in launched("--local", "4")[1].err
    assert "ranks 3, 4 are idle" in launched("--local", "5")[1].err


def test_options_that_nothing_reads_are_said(launched):
    _, ended = launched("--cluster", "1x4xa100-sxm-80gb", "--model", "gpt2")
    assert "--cluster is of no use" in ended.err and "--model is of no use" in ended.err
