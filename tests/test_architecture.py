"""Imports go one way, the public surface is what it was, and importing loads nothing heavy."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "foreshard"
ORDER = [
    {"units", "errors", "quantity"},
    {"spec"},
    {"catalog"},
    {"cost"},
    {"comm"},
    {"graph"},
    {"sim"},
    {"predict"},
    {"planner"},
    {"control"},
    {"simulate"},
    {"profile"},
    {"validation"},
    {"runtime", "lab"},
    {"advise"},
    {"report"},
    {"interop"},
    {"api"},
    {"cli", "web"},
]
LEVEL = {name: level for level, names in enumerate(ORDER) for name in names}
HEAVY = ("pandas", "scipy", "sklearn", "torch", "numba")
TORCH_LAYERS = {"runtime", "profile"}
SPEC_LIBRARIES = {"numpy"}

PUBLIC = {
    "__version__",
    "advise",
    "calibrate",
    "compare",
    "export",
    "load_cluster",
    "load_model",
    "load_plan",
    "make_plan",
    "plan",
    "predict",
    "predict_timeline",
    "profile",
    "report",
    "simulate",
    "validate",
    "whatif",
    "write_trace",
}
FILES = sorted(SOURCE.rglob("*.py"))


def layer_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports(path: Path, *, module_level: bool = False) -> set[str]:
    """Return the modules a file imports; `module_level` leaves out those in functions and for typing."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inside = set()
    if module_level:
        for node in ast.walk(tree):
            lazy = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            typing = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            if lazy or typing:
                inside |= {id(child) for child in ast.walk(node)}
    found = set()
    for node in ast.walk(tree):
        if id(node) in inside:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module)
            if node.module == "foreshard":
                found |= {f"foreshard.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_go_down(path):
    layer = layer_of(path)
    if layer in ("__init__", "__main__"):
        return
    assert layer in LEVEL, f"{layer} is no layer of docs/design.md"
    for module in imports(path):
        if module.startswith("foreshard."):
            target = module.split(".")[1]
            if target in LEVEL:
                assert LEVEL[target] <= LEVEL[layer], f"{layer} imports {module}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_heavy_libraries_are_imported_only_inside_functions(path):
    tops = {module.split(".")[0] for module in imports(path, module_level=True)}
    allowed = {"torch"} if layer_of(path) in TORCH_LAYERS and path.name != "__init__.py" else set()
    assert not tops & set(HEAVY) - allowed
    if layer_of(path) not in TORCH_LAYERS | {"catalog", "cli"}:
        assert "torch" not in {module.split(".")[0] for module in imports(path)}


def test_spec_needs_numpy_at_most():
    for path in FILES:
        if layer_of(path) in ("spec", "units", "errors", "quantity"):
            others = {module.split(".")[0] for module in imports(path)} - set(sys.stdlib_module_names)
            assert others <= SPEC_LIBRARIES | {"foreshard"}, path


def test_the_public_surface_is_frozen():
    import foreshard
    from foreshard import api

    assert set(foreshard.__all__) == PUBLIC
    assert set(api.__all__) == PUBLIC - {"__version__"}
    for name in PUBLIC:
        assert callable(getattr(foreshard, name)) or name == "__version__"


def test_layers_named_like_verbs_do_not_hide_them():
    code = (
        "import foreshard; from foreshard.predict import predict; import foreshard.report.screen\n"
        "assert callable(foreshard.predict) and callable(foreshard.report)\n"
        "try: foreshard.predict(None)\n"
        "except TypeError as error: assert 'cluster' in str(error), error\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_import_is_light():
    code = (
        "import sys, foreshard\n"
        "heavy = 'numpy pandas scipy sklearn torch numba pydantic rich click'.split()\n"
        "assert not set(heavy) & set(sys.modules), set(heavy) & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_predicting_from_the_command_line_loads_nothing_heavy():
    code = (
        "import sys; from foreshard.cli.program import run\n"
        "code = run('predict llama3-8b 1x8xh100-sxm --tp 2 --json'.split()); assert code == 0, code\n"
        "heavy = 'pandas scipy sklearn torch numba rich pydantic'.split()\n"
        "assert not set(heavy) & set(sys.modules), set(heavy) & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
