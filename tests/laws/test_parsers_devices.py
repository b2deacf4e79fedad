"""Whatever comes in, a parser returns its noun or raises SpecError: never another exception, never a hang."""

import math
import tomllib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from foreshard import quantity, units
from foreshard.catalog.clusters import load_cluster
from foreshard.catalog.devices import devices, resolve_device
from foreshard.catalog.instances import instances
from foreshard.errors import SpecError
from foreshard.spec import codec
from foreshard.spec.cluster import Cluster

QUIET = settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
DIMENSIONS = ["bytes", "bytes_per_s", "s", "flops", "flops_per_s", "w", "j", "hz", "usd", "usd_per_h"]
PIECES = st.sampled_from(
    [
        "8",
        "0",
        "-1",
        "1e30",
        "nan",
        "x",
        "X",
        "+",
        "@",
        "Gb/s",
        "GB/s",
        "h100-sxm",
        "a100",
        "aws-p5.48xlarge",
        "rtx-3090",
        " ",
        ".",
        "é",
        "\x00",
        "inf",
        "1000000",
        "tpu",
        "gb200-nvl72",
    ]
)
VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.sampled_from(["h100-sxm", "1 Gb/s", "5 us", "flat", "r0", "r1", ""]),
        st.text(max_size=8),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(["count", "device", "per_node", "nic", "kind", "between", "zz"]), inner
        ),
    ),
    max_leaves=12,
)


def toml_of(value):
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return "nan" if isinstance(value, float) and math.isnan(value) else repr(value)
    if isinstance(value, list):
        return "[" + ", ".join(toml_of(one) for one in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml_of(one)}" for key, one in value.items()) + "}"
    return '"' + "".join(c for c in value or "" if c.isalnum() or c in " -/.") + '"'


def loads_or_refuses(cluster):
    try:
        assert load_cluster(cluster).num_devices >= 1
    except SpecError as error:
        assert error.rule and error.fix and len(str(error)) < 2000


@QUIET
@given(st.one_of(st.text(), st.lists(PIECES, max_size=8).map("".join)))
def test_any_text_is_a_cluster_or_an_error(text):
    loads_or_refuses(text)


@QUIET
@given(
    st.one_of(
        st.binary(max_size=300), st.text(max_size=300).map(lambda text: text.encode("utf-8", "surrogatepass"))
    )
)
def test_any_file_is_a_cluster_or_an_error(tmp_path, content):
    path = tmp_path / "any.toml"
    path.write_bytes(content)
    loads_or_refuses(path)


@QUIET
@given(st.dictionaries(st.sampled_from(["nodes", "network", "links", "devices", "name"]), VALUES), VALUES)
def test_any_toml_values_are_a_cluster_or_an_error(tmp_path, tables, extra):
    node = {"count": 1, "device": "h100-sxm", "per_node": 8, **(extra if isinstance(extra, dict) else {})}
    tables.setdefault("nodes", [node])
    text = "\n".join(f"{key} = {toml_of(value)}" for key, value in tables.items())
    tomllib.loads(text)  # the generator writes TOML; what is tested is what comes after
    path = tmp_path / "any.toml"
    path.write_text(text, encoding="utf-8")
    loads_or_refuses(path)


@QUIET
@given(
    st.one_of(
        st.text(), st.sampled_from(list(devices())).flatmap(lambda name: st.sampled_from([name, name + "x"]))
    )
)
def test_any_name_is_a_device_or_an_error(name):
    try:
        assert resolve_device(name).name in devices()
    except SpecError as error:
        assert error.rule and error.fix


@given(st.integers(1, 1000), st.integers(1, 16), st.sampled_from(sorted(devices())), st.integers(1, 6400))
@QUIET
def test_shorthand_says_what_it_holds(count, per_node, name, rate):
    cluster = load_cluster(f"{count}x{per_node}x{name}@{rate}Gb/s")
    (group,) = cluster.nodes
    assert (group.count, group.per_node, group.device.name) == (count, per_node, name)
    assert group.nic_bytes_per_s == pytest.approx(rate * 1e9 / 8)
    assert isinstance(cluster, Cluster) and cluster.num_devices == count * per_node
    assert cluster.node_of(cluster.num_devices - 1) == count - 1


@given(st.lists(st.sampled_from(sorted(instances())), min_size=1, max_size=5))
@QUIET
def test_the_price_of_a_mix_is_the_sum_of_its_parts_or_none(names):
    parts = [load_cluster(name).usd_per_h for name in names]
    whole = load_cluster("+".join(names)).usd_per_h
    assert whole is None if None in parts else whole == pytest.approx(sum(parts))


@QUIET
@given(st.text(), st.sampled_from(DIMENSIONS))
def test_any_text_is_a_finite_quantity_or_an_error(text, dimension):
    try:
        assert 0 <= units.parse(text, dimension) < math.inf
    except SpecError as error:
        assert error.rule and error.fix


@pytest.mark.parametrize("dimension", DIMENSIONS)
@pytest.mark.parametrize("case", [str.lower, str.upper])
def test_a_unit_in_one_case_is_itself_or_refused(dimension, case):
    """Bits are never read as bytes, nor a millionth as a million."""
    known = units._dimensions()[dimension].units
    for name, scale in known.items():
        written, meant = case(name), {known[other] for other in known if other.lower() == name.lower()}
        if written in known or len(meant) == 1:
            assert units.parse(f"1 {written}", dimension) == known.get(written, scale)
        else:
            with pytest.raises(SpecError, match="Did you mean"):
                units.parse(f"1 {written}", dimension)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("2X8xH100-SXM", "2x8xh100-sxm"),
        ("2 x 8 x h100-sxm @ 400gbps", "2x8xh100-sxm@400Gb/s"),
        ("2×8×h100-sxm", "2x8xh100-sxm"),
        ("p5.48xlarge", "aws-p5.48xlarge"),
        ("4xa3-highgpu-8g+1x8xh100-sxm", "4xgcp-a3-highgpu-8g+1x8xh100-sxm"),
    ],
)
def test_other_spellings_of_a_cluster_are_the_same_cluster(written, meant):
    assert load_cluster(written).nodes == load_cluster(meant).nodes


@given(st.floats(1e-9, 1e17))
@QUIET
def test_what_is_formatted_parses_back_to_three_digits(value):
    written = {
        "s": quantity.seconds,
        "bytes": quantity.size,
        "bytes_per_s": quantity.rate,
        "j": quantity.joules,
    }
    for dimension, write in written.items():
        text = write(value).replace(",", "").replace("days", "d")
        assert units.parse(text, dimension) == pytest.approx(value, rel=6e-3)


@given(st.floats(0, 1e6), st.sampled_from(["k", "M", "G", "T"]))
@QUIET
def test_eight_bits_are_a_byte(number, prefix):
    bits = units.parse(f"{number:f} {prefix}b/s", "bytes_per_s")
    assert units.parse(f"{number:f} {prefix}B/s", "bytes_per_s") == pytest.approx(8 * bits)


@QUIET
@given(st.one_of(st.text(), st.sampled_from(["NaN", "[1e999]", '{"a":1,"a":2}', "[" * 100_000, "9" * 5000])))
def test_any_text_is_json_or_an_error(text):
    try:
        codec.parse_json(text, file="x.json")
    except SpecError as error:
        assert error.file == "x.json" and error.rule and len(str(error)) < 500
