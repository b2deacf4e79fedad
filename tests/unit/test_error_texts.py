"""Rules and fixes of errors are sentences: they begin with a capital, unless with a name that is typed so."""

import ast
from collections.abc import Iterator
from pathlib import Path

import foreshard

SOURCE = Path(foreshard.__file__).parent
NAMES = {
    *("tp", "dp", "cp", "ep", "pp", "etp", "sp", "shares", "nodes", "kind", "per", "duty", "gpus", "seq_len"),
    *("schema_version", "rank_shares", "len", "devices", "layer_types", "no_rope_layers", "attention_types"),
    *("pip", "head", "chmod", "foreshard", "profile", "torch", "torchtitan"),
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
    """Yield every rule and fix: given by name, or held in a name before it is given."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            for word in node.keywords:
                if word.arg in ("rule", "fix"):
                    yield from openings(word.value)
            if isinstance(node.func, ast.Attribute) and node.func.attr == "error" and len(node.args) == 5:
                for value in node.args[3:]:
                    yield from openings(value)
        elif isinstance(node, ast.Assign):
            pairs = [(node.targets[0], node.value)]
            if isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(node.targets[0].elts, node.value.elts, strict=True))
            for target, value in pairs:
                if isinstance(target, ast.Name) and target.id in ("rule", "fix"):
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
