"""`foreshard comm jobs`: the object, jobs of plans, drawn jobs, and what is refused."""

import json

import pytest

TRACE = """
name = "two on a leaf"
cluster = "4x1xa100-pcie-40gb@80Gb/s"

[[jobs]]
name = "first"
ranks = [0, 1]
iterations = 12
phases = [{ compute = "20 ms", collective = "all-reduce", size = "200 MB" }]

[[jobs]]
name = "second"
ranks = [2, 3]
arrival = "1 s"
iterations = 6
phases = [
  { compute = "10 ms", transfers = [{ source = 2, target = 3, size = "50 MB" }], overlaps = true },
  { compute = "10 ms" },
]
"""


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "jobs.toml"
    path.write_text(TRACE)
    return path


def test_the_object(shell, trace):
    answer = shell("comm", "jobs", trace, "--json")
    found = answer.json
    assert answer.code == 0 and found["schema_version"] == 1 and found["num_jobs"] == 2, answer.err
    bound = found["bound"]["job_iteration_s"]
    # 200 MB each way of a ring of two at 10 GB/s; 50 MB beside 10 ms of computation
    assert bound == pytest.approx([0.02 + 0.02, 0.02], rel=1e-3)
    for own in found["policies"].values():  # the two share no link
        assert own["job_iteration_s"] == pytest.approx(bound, rel=1e-3)
        assert own["cut"] == pytest.approx(0.0, abs=1e-3)
        assert own["makespan_s"] == pytest.approx(1.12, rel=1e-2)


def test_the_screen(shell, trace):
    text = shell("comm", "jobs", trace, "--policy", "priorities").out
    assert "two on a leaf: 2 jobs on 4 devices" in text and "no contention" in text
    assert "fair-share" in text and "priorities" in text and "mltcp" not in text


def test_json_files_are_read(shell, trace, tmp_path):
    import tomllib

    path = tmp_path / "jobs.json"
    path.write_text(json.dumps(tomllib.loads(TRACE)))
    both = [shell("comm", "jobs", one, "--policy", "mltcp", "--json").json for one in (trace, path)]
    assert both[0] == both[1]


def test_a_plan_is_a_job(shell, tmp_path):
    """Alone on its nodes, the job of a plan iterates as the plan is predicted."""
    cluster = "2x8xa100-sxm-40gb@400Gb/s"
    words = ("bert-large", cluster, "--micro-batch", "8", "--zero", "0", "--framework", "ddp")
    prediction = shell("predict", *words, "--json")
    assert prediction.code == 0, prediction.err
    (tmp_path / "plan.json").write_text(json.dumps(prediction.json["plan"]))
    path = tmp_path / "jobs.toml"
    path.write_text(
        f'cluster = "{cluster}"\nrates = "fitted"\n'
        '[[jobs]]\nname = "bert"\nmodel = "bert-large"\nplan = "plan.json"\niterations = 3\n'
    )
    found = shell("comm", "jobs", path, "--policy", "fair-share", "--json")
    assert found.code == 0, found.err
    step_s = prediction.json["step_time_s"]
    alone_s = found.json["policies"]["fair-share"]["mean_iteration_s"]
    exposed_s = prediction.json["time_breakdown_s"]["data_comm"]
    assert step_s - exposed_s <= alone_s <= step_s  # rounds of a ring have no latency here
    assert alone_s == pytest.approx(step_s, rel=0.15)
    assert found.json["jobs"][0]["ranks"] == list(range(16))


@pytest.mark.parametrize(
    ("flags", "cause"),
    [
        (("--pp", "2"), "2 stages"),
        (("--tp", "16"), "across nodes"),
        (("--tp", "8", "--nodes", "1"), "one replica"),
    ],
)
def test_plans_whose_traffic_is_not_modelled_are_refused(shell, tmp_path, flags, cause):
    cluster = "2x8xa100-sxm-40gb@400Gb/s"
    if "--nodes" in flags:
        cluster, flags = "1x8xa100-sxm-40gb", flags[:2]
    prediction = shell("predict", "llama3.2-1b", cluster, *flags, "--seq", "2048", "--json")
    assert prediction.json is not None, prediction.err
    (tmp_path / "plan.json").write_text(json.dumps(prediction.json["plan"]))
    path = tmp_path / "jobs.toml"
    path.write_text(
        f'cluster = "{cluster}"\n'
        '[[jobs]]\nname = "llama"\nmodel = "llama3.2-1b"\nplan = "plan.json"\niterations = 3\n'
    )
    answer = shell("comm", "jobs", path)
    assert answer.code == 2 and cause in answer.err, answer.err


def test_draws_have_a_distribution(shell, tmp_path):
    path = tmp_path / "draw.toml"
    path.write_text(
        'cluster = "8x1xa100-pcie-40gb@50Gb/s"\n[draw]\njobs = 3\nkinds = 1\ncompute = ["50 ms", "60 ms"]\n'
        'communication = [0.3, 0.4]\nranks = [2, 3]\niterations = [4, 6]\nmean_gap = "10 ms"\n'
    )
    words = ("comm", "jobs", path, "--policy", "mltcp", "--seeds", "3")
    found = shell(*words, "--json").json
    assert len(found["policies"]["mltcp"]["cut_by_seed"]) == 3 and "jobs" not in found
    assert "3 draws" in shell(*words).out


def test_the_shipped_jobs_gain_a_tenth_by_rotations_and_by_priorities(shell):
    pytest.importorskip("numba")
    found = shell("comm", "jobs", "--policy", "rotations,priorities,mltcp", "--json").json
    assert found["policies"]["rotations"]["cut"] >= 0.10
    assert found["policies"]["priorities"]["cut"] >= 0.10
    for own in found["policies"].values():
        assert own["mean_iteration_s"] >= found["bound"]["mean_iteration_s"]
    assert found["bound"]["mean_slowdown"] == pytest.approx(1.0)


PHASES = 'phases = [{ compute = "20 ms", collective = "all-reduce", size = "200 MB" }]'


@pytest.mark.parametrize(
    ("old", "new", "key", "cause"),
    [
        ("ranks = [0, 1]", "ranks = [0, 4]", "jobs[0].ranks", "Ranks are 0 to 3"),
        ("ranks = [0, 1]", "ranks = [1, 1]", "jobs[0].ranks", "each once"),
        ("ranks = [0, 1]\n", "", "jobs[0]", "has no ranks"),
        ("iterations = 12", "iterations = 0", "jobs[0].iterations", "from 1"),
        (PHASES, "", "jobs[0]", "has no phases"),
        (PHASES, 'phases = [{ compute = "0 s" }]', "jobs[0].phases", "does nothing"),
        ('"all-reduce"', '"all-dance"', "jobs[0].phases[0].collective", "Must be one of"),
        (', size = "200 MB"', "", "jobs[0].phases[0].size", "without a size"),
        (', collective = "all-reduce"', "", "jobs[0].phases[0].size", "a size alone"),
        ('size = "200 MB"', 'size = "200 MB", algorithm = "nvls"', "jobs[0].phases[0].algorithm", "switches"),
        ('size = "200 MB"', 'size = "200 MB", ranks = [0, 2]', "jobs[0].phases[0].ranks", "of the job"),
        ('"200 MB"', "200", "jobs[0].phases[0].size", "no unit"),
        ("target = 3", "target = 1", "jobs[1].phases[0].transfers", "between ranks of the job"),
        ('name = "second"', 'name = "first"', "jobs[1].name", "Names of jobs differ"),
        ('"4x1xa100', '"4x1xa1000', "cluster", "a100"),
        ("arrival =", "arival =", "jobs[1].arival", "arrival"),
        ('name = "first"', 'name = "first"\nmodel = "gpt2"', "jobs[0]", "a model and a plan"),
    ],
)
def test_bad_files_end_with_2_and_their_cause(shell, tmp_path, old, new, key, cause):
    assert old in TRACE
    path = tmp_path / "jobs.toml"
    path.write_text(TRACE.replace(old, new))
    answer = shell("comm", "jobs", path, "--json")
    error = answer.json["error"]
    assert answer.code == 2 and error["key"] == key and cause in answer.err, answer.err
    assert error["file"] == str(path)


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (("--policy", "unfair"), "Must be one of fair-share"),
        (("--seeds", "0"), "from 1"),
        (("--seeds", "2"), "Seeds are those of a [draw] table"),
    ],
)
def test_bad_options_end_with_2(shell, trace, words, cause):
    answer = shell("comm", "jobs", trace, *words)
    assert answer.code == 2 and cause in answer.err


def test_a_draw_larger_than_the_fabric_is_refused(shell, tmp_path):
    path = tmp_path / "draw.toml"
    path.write_text(
        'cluster = "2x1xa100-pcie-40gb@50Gb/s"\n[draw]\njobs = 3\nkinds = 1\ncompute = ["60 ms", "50 ms"]\n'
        'communication = [0.3, 0.4]\nranks = [2, 3]\niterations = [4, 6]\nmean_gap = "10 ms"\n'
    )
    answer = shell("comm", "jobs", path, "--json")
    assert answer.code == 2 and answer.json["error"]["key"] == "draw.compute"
    path.write_text(path.read_text().replace('"60 ms", "50 ms"', '"50 ms", "60 ms"'))
    answer = shell("comm", "jobs", path, "--json")
    assert answer.code == 2 and answer.json["error"]["key"] == "draw.ranks"


def test_the_schema_names_every_key():
    from dataclasses import fields

    from foreshard.cli.schema import read
    from foreshard.comm.jobs import trace

    keys = read("jobs")["keys"]

    def names(cls):
        return [field.name for field in fields(cls) if field.name != "file"]

    assert list(keys["file"]) == names(trace.JobsFile)
    assert list(keys["jobs"]) == names(trace.JobTable)
    assert set(keys["phases"]) == set(names(trace.PhaseTable))
    assert set(keys["draw"]) == set(names(trace.DrawTable))
