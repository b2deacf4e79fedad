"""Whatever is typed, the answer is an answer or exit 2 with a reason: never exit 1, never a traceback."""

import json
import string

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from foreshard.cli.program import run

pytestmark = pytest.mark.usefixtures("stand_in")
FUZZ = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
# Arguments of a process hold no NUL; a leading dash makes an option of it, which another test covers.
words = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=40)
near_miss = st.text(string.digits + "x+@-.hG/s ", max_size=24)
numbers = st.one_of(
    st.integers().map(str),
    st.floats().map(str),
    st.sampled_from(["1e999", "-0", "0x8", "1_0", "٣", "½", "", " 4", "+4"]),
)


def fails_well(args, capsys):
    code = run([args[0], "--json", *args[1:]])
    out, err = capsys.readouterr()
    assert code in (0, 2, 3), err
    assert "Traceback" not in err
    if code == 2:
        error = json.loads(out)["error"]
        assert error["code"] == 2 and error["what"]
        assert err.startswith("foreshard: ")


@FUZZ
@given(model=words, cluster=st.one_of(words, near_miss))
def test_models_and_clusters(model, cluster, capsys):
    fails_well(["predict", "--", model, "1x8xh100-sxm"], capsys)
    fails_well(["predict", "--", "llama3-8b", cluster], capsys)


@FUZZ
@given(
    flag=st.sampled_from(
        ["--tp", "--zero", "--seq", "--global-batch", "--tokens", "--usd-per-device-hour", "--shard-size"]
    ),
    value=st.one_of(numbers, words),
)
def test_numbers(flag, value, capsys):
    fails_well(["predict", "llama3-8b", "1x8xh100-sxm", f"{flag}={value}"], capsys)


@FUZZ
@given(
    flag=st.sampled_from(["--recompute", "--schedule", "--dtype", "--framework", "--costs", "--plan"]),
    value=words,
)
def test_words(flag, value, capsys):
    fails_well(["predict", "llama3-8b", "1x8xh100-sxm", f"{flag}={value}"], capsys)


@FUZZ
@given(
    key=st.one_of(words, st.sampled_from(["tp", "device", "nic", "nodes", "recompute", "sp"])), value=words
)
def test_changes(key, value, capsys):
    fails_well(["whatif", "llama3-8b", "1x8xh100-sxm", "--change", f"{key}={value}"], capsys)


@FUZZ
@given(
    text=st.one_of(words, st.tuples(st.sampled_from(["tp", "seq", "predict", "json"]), words).map(" = ".join))
)
def test_config_files(text, capsys, tmp_path):
    path = tmp_path / "c.toml"
    path.write_text(text, encoding="utf-8")
    fails_well(["predict", "llama3-8b", "1x8xh100-sxm", "--config", str(path)], capsys)


def test_binary_deep_and_large_configs(capsys, tmp_path):
    for content in (b"\xff\xfe\x00", b"a = " + b"[" * 100_000, b"#" * 10_000_000, b"tp = 2\0"):
        path = tmp_path / "c.toml"
        path.write_bytes(content)
        fails_well(["predict", "llama3-8b", "1x8xh100-sxm", "--config", str(path)], capsys)
    fails_well(["predict", "llama3-8b", "1x8xh100-sxm", "--config", str(tmp_path)], capsys)
