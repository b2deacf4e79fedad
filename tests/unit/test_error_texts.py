"""Rules and fixes of errors are sentences: they begin with a capital, unless with a name that is typed so."""

import ast
from collections.abc import Iterator
from pathlib import Path

import foreshard

SOURCE = Path(foreshard.__file__).parent
NAMES = {
    *("tp", "dp", "cp", "ep", "pp", "etp", "sp", "shares", "nodes", "kind", "per", "duty", "gpus", "seq_len"),
    *("schema_version", "rank_shares", "len", "devices", "layer_types", "no_rope_layers", "attention_types"),
    *("pip", "head", "chmod", "foreshard", "profile", "torchtitan"),
}


def openings(value: ast.expr) -> Iterator[str]:
    """Yield how a text of the source begins, of either branch where there are two."""
    if isinstance(value, ast.IfExp):
        yield from openings(value.body)
        yield from openings(value.orelse)
    elif isinstance(value, ast.JoinedStr):
        yield from openings(value.values[0])
    elif isinstance(value, ast.Constant) and isinstance(value.value, str):
        yield value.value


def sentences(tree: ast.Module) -> Iterator[str]:
    """Yield every rule and fix that is stated by name, and those of `spec.checks`."""
    for call in ast.walk(tree):
        if isinstance(call, ast.Call):
            told = [word.value for word in call.keywords if word.arg in ("rule", "fix")]
            if isinstance(call.func, ast.Attribute) and call.func.attr == "error" and len(call.args) == 5:
                told += call.args[3:]
            for value in told:
                yield from openings(value)


def test_rules_and_fixes_begin_as_sentences_do():
    found, small = 0, []
    for path in sorted(SOURCE.rglob("*.py")):
        for text in sentences(ast.parse(path.read_text(encoding="utf-8"))):
            found += 1
            word = text.partition(" ")[0].partition("(")[0].rstrip(":=")
            if word[:1].islower() and word not in NAMES:
                small.append(f"{path.name}: {text}")
    assert found > 300 and not small
