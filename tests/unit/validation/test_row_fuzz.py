"""Whatever a cell holds, a row is read or refused with a SpecError."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from foreshard.errors import SpecError
from foreshard.validation.rows import TrainingRow, read_row

NUMBERS = (
    "0",
    "-1",
    "1e9",
    "1e300",
    "nan",
    "inf",
    "1.5",
    "7",
    "",
    "1,024",
    "0x10",
    "\u0663",
    "99999999999999999999",
)
WORDS = (
    "none",
    "full:block:0",
    "selective:what",
    "FSDP 0",
    "ZeRO-9",
    "fp8",
    "bf17",
    "TPU",
    "H100",
    "a;b=c",
    "E|(t|)*99",
)
CELL = st.one_of(st.sampled_from(NUMBERS), st.sampled_from(WORDS), st.text(max_size=30))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_row_is_read_or_refused(cells, data):
    names = data.draw(st.lists(st.sampled_from(sorted(cells)), min_size=1, max_size=4, unique=True))
    changed = dict(cells) | {name: data.draw(CELL) for name in names}
    try:
        row = read_row(changed, "t")
    except SpecError:
        return
    assert isinstance(row, TrainingRow)
    assert row.measured_s is None or 0 < row.measured_s < float("inf")
    spans = sorted(span for stage in row.plan.groups[0].stages for span in stage.layers)
    assert spans[0][0] == 0
    assert spans[-1][1] == row.model.num_layers + 2


def test_a_shard_of_nothing_is_no_shard(cells):
    row = read_row(dict(cells) | {"zero_stage_or_fsdp": "FSDP 0"}, "t")
    assert row.plan.groups[0].stages[0].shard_size is None
