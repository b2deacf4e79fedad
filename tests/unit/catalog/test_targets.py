"""Samples and steps to a target: fitted, published, by law, from a file, and what is refused."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreshard.catalog.shipped import shipped
from foreshard.catalog.targets import MeasuredBatch, TargetFile, curve_of, load_target, task_names
from foreshard.errors import SpecError
from foreshard.spec.codec import decode

constants = st.floats(10.0, 1e9)
batches = st.integers(1, 2**24)
LOSS = "kaplan-lm:2.8"


def stated(least, critical, **more):
    return curve_of(
        TargetFile(target="t", source="s", min_samples=least, critical_batch=critical, **more), name="x"
    )


@given(constants, constants, batches, batches)
def test_a_larger_batch_takes_no_more_steps_and_no_fewer_samples(least, critical, one, other):
    curve = stated(least, critical)
    small, large = sorted((one, other))
    assert curve.steps(large) <= curve.steps(small)
    assert curve.samples(large) >= curve.samples(small)
    assert curve.steps(large) >= curve.min_samples / curve.critical_batch * (1 - 1e-9)
    assert (curve.steps(large) - 1) * large <= curve.samples(large) <= curve.steps(large) * large * (1 + 1e-9)


@given(constants, constants)
def test_the_critical_batch_doubles_samples_and_the_fewest_steps(least, critical):
    curve = stated(least, critical)
    assert curve.samples(critical) == pytest.approx(2 * least)
    assert curve.samples(critical) / critical == pytest.approx(2 * least / critical)


@given(constants, constants, st.lists(batches, min_size=2, max_size=6, unique=True), st.booleans())
def test_points_of_the_law_give_its_constants_back(least, critical, sizes, as_steps):
    law = stated(least, critical)
    if max(sizes) / critical < 1e-3 or (max(sizes) - min(sizes)) / max(sizes) < 0.1:
        return  # too flat or too near each other to be told apart in floats
    points = tuple(
        MeasuredBatch(batch=b, steps=law.samples(b) / b)
        if as_steps
        else MeasuredBatch(batch=b, samples=law.samples(b))
        for b in sizes
    )
    curve = curve_of(TargetFile(target="t", source="s", points=points), name="x")
    for batch in sizes:
        assert curve.samples(batch) == pytest.approx(law.samples(batch), rel=1e-6)
    assert curve.worst_error < 1e-6 and curve.batches == (min(sizes), max(sizes))


@given(constants, constants, st.integers(1, 10**5), st.integers(1, 10**5), batches)
def test_other_lengths_need_as_many_tokens(least, critical, counted, asked, batch):
    curve = stated(least, critical, samples_of=counted)
    again = curve.for_sequences(asked)
    assert again.samples(batch * counted / asked) * asked == pytest.approx(curve.samples(batch) * counted)
    assert again.for_sequences(counted).samples(batch) == pytest.approx(curve.samples(batch))
    assert stated(least, critical).for_sequences(asked).samples(batch) == curve.samples(batch)


@pytest.mark.parametrize(
    ("task", "at_most"),
    [
        ("mlperf-llama3.1-405b", 0.02),
        ("mlperf-llama3.1-8b", 0.075),
        ("mlperf-resnet50", 0.08),
        ("mlperf-gpt3", 0.16),
        ("mlperf-bert", 0.14),
    ],
)
def test_published_scalings_are_reproduced_at_batches_left_out(task, at_most):
    entry = decode(TargetFile, shipped("targets.toml")[task])
    for i, point in enumerate(entry.points):
        others = (*entry.points[:i], *entry.points[i + 1 :])
        left_out = curve_of(replace(entry, points=others), name=task)
        assert left_out.samples(point.batch) == pytest.approx(point.samples, rel=at_most)


def test_the_law_of_language_models_gives_its_loss_back():
    parameters = 1.5e9
    curve = load_target(LOSS, parameters=parameters)
    fewest = curve.min_samples / curve.critical_batch
    loss = (6.5e13 / parameters) ** 0.077 + (2.1e3 / fewest) ** 0.76
    assert loss == pytest.approx(2.8)
    # "roughly 1-2 million tokens at convergence for the largest models" (section 1.1 of the paper)
    assert 1e6 < curve.critical_batch < 2e6
    lower = load_target("kaplan-lm:2.6", parameters=parameters)
    assert lower.min_samples > curve.min_samples and lower.critical_batch > curve.critical_batch
    larger = load_target(LOSS, parameters=10 * parameters)
    assert larger.min_samples < curve.min_samples and larger.critical_batch == curve.critical_batch


def test_candidates_are_within_what_is_known():
    for name in task_names()[:-1]:
        curve = load_target(name)
        sizes = curve.candidates()
        assert sizes[0] == curve.batches[0] and sizes[-1] == curve.batches[1]
        assert all(curve.knows(size) for size in sizes) and list(sizes) == sorted(set(sizes))
    assert not load_target("mlperf-bert").knows(2**20)
    assert stated(1e6, 2.0).candidates() == (1, 2, 4, 8, 16)


def test_a_file_is_read(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        'target = "loss 2"\nsource = "own runs"\nsamples_of = 1024\n'
        "points = [{batch = 64, steps = 3000}, {batch = 256, samples = 384_000}]\n"
    )
    curve = load_target(str(path))
    assert curve.name == "mine" and curve.samples(64) == pytest.approx(192_000)
    assert curve.samples(256) == pytest.approx(384_000) and curve.samples_of == 1024


HEAD = 'target = "t"\nsource = "s"\n'


@pytest.mark.parametrize(
    ("text", "key"),
    [
        (HEAD, "points"),
        (HEAD + "min_samples = 9", "points"),
        (HEAD + "min_samples = 9\ncritical_batch = 3\npoints = [{batch = 1, steps = 1}]", "points"),
        (HEAD + "points = [{batch = 1, steps = 9}]", "points"),
        (HEAD + "points = [{batch = 1, steps = 9}, {batch = 1, steps = 8}]", "points"),
        (HEAD + "points = [{batch = 1, steps = 9}, {batch = 2}]", "points[1]"),
        (HEAD + "points = [{batch = 1, steps = 9, samples = 9}, {batch = 2, steps = 5}]", "points[0]"),
        (HEAD + "points = [{batch = 1, samples = 9}, {batch = 2, samples = 8}]", "points"),
        (HEAD + "points = [{batch = 1, samples = 1}, {batch = 2, samples = 9}]", "points"),
        (HEAD + "min_samples = -1\ncritical_batch = 3", "min_samples"),
        (HEAD + "loss = 3", "loss"),
        ('target = "t"', "source"),
    ],
)
def test_a_wrong_file_names_file_and_key(tmp_path, text, key):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(SpecError) as caught:
        load_target(str(path))
    assert caught.value.file == str(path) and caught.value.key == key and caught.value.rule


@pytest.mark.parametrize(
    "text", ["mlperf-resnet", "kaplan-lm", "kaplan-lm:x", "kaplan-lm:nan", "kaplan-lm:1.2", "mlperf-bert:3"]
)
def test_a_wrong_task_says_what_to_do(text):
    with pytest.raises(SpecError) as caught:
        load_target(text, parameters=1e9)
    assert caught.value.key == "--to-target" and caught.value.fix


def test_a_network_has_no_loss_of_language():
    with pytest.raises(SpecError, match="without tokens"):
        load_target(LOSS)


def test_a_curve_of_tokens_for_a_model_without_says_what_a_sample_counts_as():
    """ResNet-50 was compared over a curve of sequences without a word."""
    curve = curve_of(
        TargetFile(target="t", source="s", min_samples=1e6, critical_batch=64.0, samples_of=4096), name="x"
    )
    assert curve.for_sequences(None).samples(8) == curve.samples(8)
    assert curve.for_sequences(None).notes == (
        "the curve counts samples of 4096 tokens; a sample of this model is one",
    )
    assert curve.for_sequences(4096).notes == ()
