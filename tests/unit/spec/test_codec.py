from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest

from foreshard.errors import SpecError
from foreshard.spec import codec


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    size: Annotated[float, codec.Unit("bytes")]
    kind: Literal["ring", "tree"] = "ring"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    inner: Inner
    ranks: tuple[int, ...] = ()
    layers: tuple[tuple[int, int], ...] = ()
    share: Annotated[int, codec.Range(1, 10)] | None = None
    zero: int | str = 0
    weights: Mapping[Literal["a", "b"], float] | None = None
    any: Any = None


def refuse(data):
    with pytest.raises(SpecError) as caught:
        codec.decode(Outer, data, file="f.json")
    assert caught.value.file == "f.json" and caught.value.rule and caught.value.fix
    return caught.value


def test_decode_builds_nested_dataclasses():
    data = {
        "inner": {"size": "2 KiB", "kind": "tree"},
        "ranks": [3, 1],
        "layers": [[0, 12], [12, 24]],
        "share": None,
        "zero": "full",
        "weights": {"a": 1},
        "any": {"free": [1]},
    }
    found = codec.decode(Outer, data)
    assert found.inner == Inner(size=2048.0, kind="tree")
    assert (found.ranks, found.layers, found.share, found.zero) == ((3, 1), ((0, 12), (12, 24)), None, "full")
    assert (found.weights, found.any) == ({"a": 1.0}, {"free": [1]})


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"inner": {}}, "inner.size"),
        ({"inner": {"size": "2 KiB", "knid": "tree"}}, "inner.knid"),
        ({"inner": {"size": "2 KiB", "kind": "tre"}}, "inner.kind"),
        ({"inner": {"size": "2 KiB", "kind": 1}}, "inner.kind"),
        ({"inner": 3}, "inner"),
        ({"ranks": [0, 1.0]}, "ranks[1]"),
        ({"ranks": [0, True]}, "ranks[1]"),
        ({"ranks": 3}, "ranks"),
        ({"layers": [[0, 12], [12]]}, "layers[1]"),
        ({"layers": [[0, 12], [12, "x"]]}, "layers[1][1]"),
        ({"share": 11}, "share"),
        ({"share": True}, "share"),
        ({"zero": 1.5}, "zero"),
        ({"weights": {"c": 1.0}}, "weights.c"),
        ({"weights": {"a": "x"}}, "weights.a"),
        ({"weights": {"a": float("nan")}}, "weights.a"),
        ({"weights": {"a": 10**400}}, "weights.a"),
        ({"x" * 500: 1}, "x" * 64),
    ],
)
def test_an_error_names_the_exact_key(change, key):
    assert refuse({"inner": {"size": "2 KiB"}} | change).key == key


def test_messages_show_values_and_limits_as_a_file_writes_them():
    def said(change):
        return str(refuse({"inner": {"size": "1 B"}} | change))

    assert said({"weights": {"a": "5"}}).startswith("f.json: weights.a: '5' is not valid. Must be a number.")
    assert said({"share": True}).startswith("f.json: share: true is not valid. Must be a whole number.")
    assert "Must be a whole number from 1 to 10." in said({"share": 11})
    assert "[1] is not valid. Must be a list of 2." in said({"layers": [[1]]})


def test_unknown_keys_and_values_get_suggestions():
    assert refuse({"inner": {"size": "1 B"}, "rank": []}).fix == "Did you mean 'ranks'?"
    assert refuse({"inner": {"size": "1 B", "kind": "rong"}}).fix == "Did you mean 'ring'?"


@pytest.mark.parametrize(
    "text", ["{", '{"a": NaN}', '{"a": Infinity}', '{"a": 1, "a": 2}', "[" * 100_000, "1 2"]
)
def test_what_is_no_json_is_an_error(text):
    with pytest.raises(SpecError, match="not valid JSON"):
        codec.parse_json(text, file="f.json")


@pytest.mark.parametrize("parse", [codec.parse_json, codec.parse_toml])
@pytest.mark.parametrize("text", ["", " \n"])
def test_an_empty_file_is_said_to_be_empty(parse, text):
    with pytest.raises(SpecError, match=r"^f: the file is empty\. .* 'foreshard schema'"):
        parse(text, file="f")


def test_a_file_larger_than_the_limit_is_refused_without_reading_it_all(tmp_path):
    path = tmp_path / "big"
    path.write_bytes(b"a" * 101)
    assert codec.read_text(path, max_bytes=101) == "a" * 101
    with pytest.raises(SpecError, match="too large"):
        codec.read_text(path, max_bytes=100)


def test_a_byte_order_mark_is_no_content(tmp_path):
    path = tmp_path / "bom"
    path.write_bytes(b"\xef\xbb\xbf{}")
    assert codec.parse_json(codec.read_text(path)) == {}
