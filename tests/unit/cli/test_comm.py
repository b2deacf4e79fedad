"""`foreshard comm`: the contract of its verbs."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

CONTRACT = {
    "schema_version",
    "time_s",
    "time_interval_s",
    "time_intervals_s",
    "evidence",
    "algbw_bytes_per_s",
    "busbw_bytes_per_s",
    "algorithm",
    "protocol",
    "runner_up",
    "margin",
}


def test_the_object_of_a_prediction(shell):
    answer = shell("comm", "predict", "all-reduce", "1GiB", "8x8xh100-sxm", "--json")
    found = answer.json
    assert answer.code == 0 and set(found) >= CONTRACT and found["schema_version"] == 1
    assert (found["algorithm"], found["protocol"], found["runner_up"]) == (
        "NVLSTree",
        "Simple",
        "Ring/Simple",
    )
    assert found["algbw_bytes_per_s"] == pytest.approx(2**30 / found["time_s"])
    assert found["busbw_bytes_per_s"] == pytest.approx(found["algbw_bytes_per_s"] * 2 * 63 / 64)
    low, high = found["time_interval_s"]
    assert low < found["time_s"] < high and found["time_intervals_s"]["0.9"] == [low, high]
    assert len(found["candidates"]) == 21 and 0 < found["margin"] < 1


def test_the_time_is_that_of_the_closed_form(shell):
    from foreshard.api import load_cluster
    from foreshard.comm.collectives import all_gather_s
    from foreshard.comm.fabric import fabric_of

    found = shell(
        "comm", "predict", "all-gather", "16MiB", "1x8xa100-sxm-80gb", "--ranks", "4", "--json"
    ).json
    fabric = fabric_of(load_cluster("1x8xa100-sxm-80gb").nodes[0])
    assert found["time_s"] == pytest.approx(float(all_gather_s(2**24, 4, 1, fabric)))
    assert found["num_ranks"] == 4


def test_the_screen_explains_the_choice(shell):
    text = shell("comm", "predict", "all-reduce", "64KiB", "1x8xh100-sxm").out
    assert "all-reduce of 64 KiB over 8 ranks" in text
    assert "NCCL sees 1 node of 8 ranks over NVLink: 12 x 30 GB/s rings" in text
    assert "ahead of Tree/LL" in text and "picked" in text and "PAT serves all-gather" in text


@pytest.mark.parametrize("collective", ["reduce-scatter", "broadcast", "all-to-all", "send"])
def test_every_collective_has_a_time(shell, collective):
    found = shell("comm", "predict", collective, "1MiB", "2x8xh100-sxm", "--json").json
    assert 0 < found["time_s"] < 1e-2 and found["algorithm"]


@pytest.mark.parametrize(
    ("words", "key", "cause"),
    [
        (("all-reduce", "0", "8x8xh100-sxm"), "SIZE", "Must be a number of bytes"),
        (("all-reduce", "1Gb", "8x8xh100-sxm"), "SIZE", "Must be a number of bytes"),
        (("all-reduce", "nan", "8x8xh100-sxm"), "SIZE", "Must be a number of bytes"),
        (("all-reduce", "1GiB", "8x8xh100-sxm", "--ranks", "1"), "--ranks", "from 2"),
        (("all-reduce", "1GiB", "1x1xh100-sxm"), "--ranks", "at least two ranks"),
        (("all-reduce", "1GiB", "8x8xh100-sxm", "--ranks", "65"), "--ranks", "65 ranks on 64 devices"),
        (("all-dance", "1GiB", "8x8xh100-sxm"), "COLLECTIVE", "Must be one of all-reduce"),
        (("all-reduce", "1GiB", "8x8xh100-sxm", "--library", "rccl"), "--library", "RCCL on these devices"),
        (("all-reduce", "1GiB", "8x8xh100-sxm", "--library", "nccl@x"), "--library", "unknown library"),
    ],
)
def test_bad_input_ends_with_2_and_its_cause(shell, words, key, cause):
    answer = shell("comm", "predict", *words, "--json")
    assert answer.code == 2 and answer.json["error"]["key"] == key and cause in answer.err


def test_an_unknown_verb_of_the_group(shell):
    answer = shell("comm", "predikt")
    assert answer.code == 2 and "Did you mean 'predict'?" in answer.err
    assert "See foreshard comm --help" in shell("comm", "zzz").err


def test_old_releases_are_slower_and_say_that_their_constants_are_not_shipped(shell):
    words = ("comm", "predict", "all-reduce", "64KiB", "1x8xa100-sxm-80gb", "--json", "--library")
    new, old = shell(*words, "nccl").json, shell(*words, "nccl@2.8").json
    assert old["time_s"] > new["time_s"]
    assert any("NCCL 2.8 are not shipped" in note for note in old["notes"])


def test_other_devices_have_a_time_and_no_choice(shell):
    found = shell("comm", "predict", "all-reduce", "1MiB", "1x8xmi355x", "--json").json
    assert found["time_s"] > 0 and found["algorithm"] is None and "NVIDIA" in found["notes"][-1]
    assert found["library"] is None


def test_the_pick_on_mi300x_is_labelled_as_rccl_s(shell):
    words = ("comm", "predict", "all-reduce", "1MiB", "1x8xmi300x")
    found = shell(*words, "--library", "rccl", "--json").json
    assert (found["library"], found["algorithm"]) == ("RCCL", "Ring") and "none is fitted" in found["notes"][
        -1
    ]
    assert "RCCL picks" in shell(*words).out and "RCCL's estimates" in shell(*words).out


def test_a_config_file_has_a_table_of_the_verb(shell, tmp_path):
    config = tmp_path / "c.toml"
    config.write_text("[comm.predict]\nranks = 4\n")
    words = ("comm", "predict", "all-reduce", "1MiB", "1x8xh100-sxm", "--config", config, "--json")
    assert shell(*words).json["num_ranks"] == 4
    config.write_text("[comm.predikt]\nranks = 4\n")
    assert "Did you mean 'predict'?" in shell(*words).err
    config.write_text("[comm.predict]\nrank = 4\n")
    assert shell(*words).json["error"]["key"] == "comm.predict.rank"
    config.write_text("[comm]\nranks = 4\n")
    assert shell(*words).code == 2
    config.write_text("comm = 4\n")
    assert shell(*words).code == 2


def test_the_schema_of_the_config_has_the_verbs_of_the_group(shell):
    assert "ranks" in shell("schema", "config", "--json").json["keys"]["comm.predict"]


BERT = ("comm", "buckets", "bert-large", "2x8xa100-sxm-40gb@100Gb/s", "--micro-batch", "4")


def test_buckets_say_which_size_to_set_and_what_it_saves(shell):
    found = shell(*BERT, "--json").json
    assert found["schema_version"] == 1 and found["dp"] == 16
    assert (
        found["saved_s"] == pytest.approx(found["default_exposed_s"] - found["exposed_s"])
        and found["saved_s"] > 0
    )
    assert sum(bucket["bytes"] for bucket in found["buckets"]) == found["gradient_bytes"]
    assert found["optimum"]["exposed_s"] <= found["exposed_s"] <= found["default_exposed_s"]
    assert sum(found["optimum"]["bucket_cap_mb_list"]) * 2**20 == pytest.approx(found["gradient_bytes"])
    assert {"ddp", "mg-wfbp", "horovod", "optimum"} <= {one["rule"] for one in found["rules"]}
    text = shell(*BERT).out
    assert f"bucket_cap_mb     {found['bucket_cap_mb']}" in text and "ddp, default" in text


def test_smaller_gradients_take_less(shell):
    wide, narrow = shell(*BERT, "--json").json, shell(*BERT, "--gradients", "bf16", "--json").json
    assert narrow["gradient_bytes"] * 2 == wide["gradient_bytes"]
    assert narrow["default_exposed_s"] < wide["default_exposed_s"]


def test_a_run_too_large_for_whole_replicas_says_so(shell):
    found = shell("comm", "buckets", "llama3-8b", "1x8xh100-sxm", "--json").json
    assert "does not fit" in found["notes"][-1]


UNITS = ("comm", "buckets", "llama3-8b", "4x8xh100-sxm@400Gb/s", "--zero", "3", "--seq", "4096")


def test_units_of_fsdp_are_compared_as_steps(shell):
    asked = ("--prefetch", "1,2", "--wrap", "1,4,model")
    found = shell(*UNITS, *asked, "--json").json
    assert len(found["choices"]) == 5
    best = found["best"]
    for choice in found["choices"]:
        assert not choice["fits"] or best["step_time_s"] <= choice["step_time_s"] * (1 + 1e-4)
    words = ("--zero", "3", "--framework", "torchtitan", "--seq", "4096")
    units = ("--prefetch", str(best["prefetch"]), "--wrap", str(best["wrap"]))
    step = shell("predict", "llama3-8b", "4x8xh100-sxm@400Gb/s", *words, *units, "--json").json
    assert step["step_time_s"] == best["step_time_s"]
    assert step["memory"]["peak_bytes"] == best["peak_bytes"]
    said = shell(*UNITS, *asked).out
    assert "set_modules_to_forward_prefetch" in said and "best" in said


def test_screens_and_comparisons_take_units_that_closed_forms_do_not_know(shell):
    words = ("gpt2", "1x8xa100-sxm-40gb", "--zero", "3", "--framework", "hf", "--wrap", "4")
    for verb in ("predict", "compare"):
        answer = shell(verb, *words)
        assert answer.code == 0, answer.err
    assert shell("predict", *words, "--engine", "analytical").code == 2


def test_units_that_do_not_fit_exit_3(shell):
    answer = shell("comm", "buckets", "llama3-8b", "1x2xrtx-3090", "--zero", "3", "--wrap", "1", "--json")
    assert answer.code == 3 and answer.json["best"] is None and "No choice fits" in answer.json["notes"][0]


@pytest.mark.parametrize(
    "words",
    [
        ("--prefetch", "2"),
        ("--zero", "1"),
        ("--zero", "3", "--gradients", "bf16"),
        ("--zero", "3", "--framework", "ddp"),
        ("--zero", "3", "--tp", "8"),
        ("--zero", "3", "--wrap", "0"),
        ("--zero", "3", "--prefetch", "1,,2"),
    ],
)
def test_units_and_buckets_are_not_mixed(shell, words):
    assert shell("comm", "buckets", "gpt2", "1x8xh100-sxm", *words).code == 2


def test_one_replica_has_no_buckets(shell):
    answer = shell("comm", "buckets", "gpt2", "1x1xh100-sxm", "--json")
    assert answer.code == 2 and answer.json["error"]["key"] == "--dp"
    assert shell("comm", "buckets", "gpt2", "1x8xh100-sxm", "--tp", "8").code == 2


NCCL_TESTS = """\
# Collective test starting: all_reduce_perf
#  Rank  0 Group  0 Pid  11 on  a device  0 [0000:07:00] NVIDIA H100 80GB HBM3
#  Rank  1 Group  0 Pid  11 on  a device  1 [0000:0b:00] NVIDIA H100 80GB HBM3
#  size  count  type  redop  root  time  algbw  busbw #wrong  time  algbw  busbw #wrong
  1048576  262144  float  sum  -1  20.40  51.28  51.28  0  24.90  42.11  42.11  0
"""


def test_import_reads_nccl_tests_and_predicts_them(shell, tmp_path):
    log = tmp_path / "a.log"
    log.write_text(NCCL_TESTS)
    found = shell("comm", "import", log, "1x8xh100-sxm", "--json").json
    predicted = shell("comm", "predict", "all-reduce", "1MiB", "1x8xh100-sxm", "--ranks", "2", "--json").json
    assert found["rows"][0]["predicted_s"] == predicted["time_s"] and found["median_error"] < 1
    assert found["collective"] == "all-reduce" and found["rows"][0]["time_s"] == pytest.approx(20.4e-6)
    assert "1.00 MiB" in shell("comm", "import", log).out


def test_import_wants_to_know_the_collective_it_predicts(shell, tmp_path):
    log = tmp_path / "a.log"
    log.write_text(NCCL_TESTS.split("\n", 1)[1])
    answer = shell("comm", "import", log, "1x8xh100-sxm", "--json")
    assert answer.code == 2 and answer.json["error"]["key"] == "--collective"
    assert shell("comm", "import", log, "1x8xh100-sxm", "--collective", "all-reduce").code == 0
    assert shell("comm", "import", tmp_path / "none.log").code == 2


SECOND_SIZE = "  4194304  1048576  float  sum  -1  40.80  102.8  102.8  0  40.9  102.5  102.5  0\n"


def test_predict_takes_measured_times_where_they_cover_it(shell, tmp_path):
    """From nccl-tests and from a table alike; the size in the middle of two is their geometric mean."""
    log, csv = tmp_path / "a.log", tmp_path / "a.csv"
    log.write_text(NCCL_TESTS + SECOND_SIZE)
    rows = ("h100-sxm,bf16,0.0204,all_reduce,2,1048576", "h100-sxm,bf16,0.0408,all_reduce,2,4194304")
    csv.write_text("\n".join(["device,dtype,latency_ms,op,ranks,bytes", *rows]) + "\n")
    call = ("comm", "predict", "all-reduce")
    for file in (log, csv):
        for size, time_s in (("1MiB", 20.4e-6), ("2MiB", 20.4e-6 * 2**0.5), ("4MiB", 40.8e-6)):
            found = shell(*call, size, "1x8xh100-sxm", "--ranks", "2", "--costs", file, "--json").json
            assert found["time_s"] == pytest.approx(time_s, rel=1e-9)
            assert (found["evidence"], found["time_interval_s"]) == ("table", None)
        for size, cluster, ranks in (
            ("8MiB", "1x8xh100-sxm", "2"),
            ("1MiB", "1x8xh100-sxm", "4"),
            ("1MiB", "1x8xa100-sxm-80gb", "2"),
        ):
            other = (*call, size, cluster, "--ranks", ranks, "--json")
            formula, found = shell(*other).json, shell(*other, "--costs", file).json
            assert found["time_s"] == formula["time_s"] and found["evidence"] == formula["evidence"]
            assert "does not cover" in found["notes"][0]
    assert "measured" in shell(*call, "2MiB", "1x8xh100-sxm", "--ranks", "2", "--costs", log).out


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("all_reduce", "broadcast", "broadcast"),
        ("Pid  11 on  a device  1", "Pid  11 on  b device  1", "several hosts"),
        ("  1048576  262144", "  0  0", "no size"),
        ("#  size", "#  none", "header"),
    ],
)
def test_measured_times_that_are_no_table_are_refused(shell, tmp_path, old, new, what):
    log = tmp_path / "a.log"
    log.write_text(NCCL_TESTS.replace(old, new))
    call = ("comm", "predict", "all-reduce", "1MiB", "1x8xh100-sxm", "--costs")
    answer = shell(*call, log, "--json")
    assert answer.code == 2 and answer.json["error"]["file"] == str(log)
    assert what in str(answer.json["error"]) and shell(*call, tmp_path / "none.csv").code == 2


@pytest.mark.parametrize(
    ("asked", "ran"), [("all-gather", "reduce-scatter"), ("reduce-scatter", "all-gather")]
)
def test_a_gather_answered_by_a_measured_scatter_says_so(shell, tmp_path, asked, ran):
    """The two move as many bytes; the same collective needs no such note, from a log or a table."""
    log, csv = tmp_path / "a.log", tmp_path / "a.csv"
    log.write_text(NCCL_TESTS.replace("all_reduce", ran.replace("-", "_")))
    csv.write_text("device,dtype,latency_ms,op,ranks,bytes\nh100-sxm,bf16,0.0204,all_gather,2,1048576\n")
    tail = ("1MiB", "1x8xh100-sxm", "--ranks", "2", "--json", "--costs")
    for collective, file, measured in (
        (asked, log, ran),
        (ran, log, ran),
        ("all-gather", csv, "all-gather"),
        ("reduce-scatter", csv, "all-gather"),
    ):
        found = shell("comm", "predict", collective, *tail, file).json
        assert found["evidence"] == "table" and found["time_s"] == pytest.approx(20.4e-6)
        said = [note for note in found["notes"] if f"What was measured is {measured}" in note]
        assert len(said) == (measured != collective), found["notes"]


def test_a_log_that_does_not_name_its_collective_is_of_the_one_that_is_asked_for(shell, tmp_path):
    log = tmp_path / "a.log"
    log.write_text(NCCL_TESTS.split("\n", 1)[1])
    tail = ("1MiB", "1x8xh100-sxm", "--ranks", "2", "--json", "--costs", log)
    for collective in ("all-reduce", "reduce-scatter", "all-to-all"):
        found = shell("comm", "predict", collective, *tail).json
        assert found["evidence"] == "table" and found["time_s"] == pytest.approx(20.4e-6)
        assert any("does not say which collective ran" in note for note in found["notes"])
    refused = shell("comm", "predict", "broadcast", *tail)
    assert refused.code == 2 and refused.json["error"]["value"] == "broadcast"


OWN_DEVICE = """
name = "one of a kind"
[[devices]]
name = "Some Device X"
base = "a100-sxm-80gb"
[[nodes]]
count = 1
device = "Some Device X"
per_node = 8
"""


def test_measured_times_of_an_unknown_device_are_nobody_else_s(shell, tmp_path):
    """They are refused for a device of the catalog, and taken for that of a cluster file of the same name."""
    log, own = tmp_path / "a.log", tmp_path / "own.toml"
    log.write_text(NCCL_TESTS.replace("NVIDIA H100 80GB HBM3", "Some Device X"))
    own.write_text(OWN_DEVICE)
    call = ("comm", "predict", "all-reduce", "1MiB")
    answer = shell(*call, "8xa100-sxm-80gb", "--ranks", "2", "--costs", log, "--json")
    error = answer.json["error"]
    assert answer.code == 2 and error["file"] == str(log) and error["value"] == "Some Device X"
    assert "unknown device" in error["what"] and error["rule"] and "cluster file" in error["fix"]
    found = shell(*call, own, "--ranks", "2", "--costs", log, "--json").json
    assert found["evidence"] == "table" and found["time_s"] == pytest.approx(20.4e-6)


words = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(size=st.one_of(words, st.integers().map(str), st.floats().map(str)), ranks=words, library=words)
def test_whatever_is_typed_ends_with_an_answer_or_2(shell, size, ranks, library):
    call = ("comm", "predict", "--json")
    cluster = "1x8xh100-sxm"
    for end in (
        ("--", "all-reduce", size, cluster),
        (f"--ranks={ranks}", "all-reduce", "1KiB", cluster),
        (f"--library={library}", "all-reduce", "1KiB", cluster),
    ):
        answer = shell(*call, *end)
        assert answer.code in (0, 2) and answer.json["schema_version"] == 1
