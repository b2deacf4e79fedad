"""Imports go one way, folders and names stay small and distinct, and importing loads nothing heavy."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "foreshard"
MAX_FILES_IN_FOLDER = 20
ORDER = [
    {"units", "errors", "quantity", "words", "option_names", "file_replacement", "compiled"},
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
    {"transport"},
    {"profile"},
    {"validation"},
    {"runtime"},
    {"lab"},
    {"advise"},
    {"report"},
    {"interop"},
    {"api"},
    {"cli", "web"},
]
LEVEL = {name: level for level, names in enumerate(ORDER) for name in names}
HEAVY = ("pandas", "scipy", "sklearn", "torch", "numba")
TORCH_LAYERS = {"runtime", "profile", "transport"}
SPEC_LIBRARIES = {"numpy"}

PUBLIC = {
    "__version__",
    "advise",
    "calibrate",
    "compare",
    "export",
    "import_plan",
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
SCRIPTS = sorted((ROOT / "scripts").glob("*.py"))


def module_of(path: Path) -> str:
    """Return the dotted name that a file of the package is imported by."""
    return ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(path): path for path in FILES}


def layer_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imports(path: Path, *, module_level: bool = False) -> frozenset[str]:
    """Return the modules a file imports; `module_level` leaves out those in functions and for typing."""
    tree = tree_of(path)
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
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names & MODULES.keys() or {node.module}
    return frozenset(found)


def named_in_strings(path: Path) -> set[str]:
    """Return the modules a file names in strings: started by `-m`, or looked up by `import_module`.

    A looked-up name is an f-string such as ``import_module(f"foreshard.cli.{verb}")``; the strings of that
    file, a table of verbs for example, or names of tables in the folder ``data`` beside it, as MODULE or
    MODULE.FUNCTION, say which modules that may be.
    """
    texts = {
        node.value
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    for table in path.parent.glob("data/*.toml"):
        heads = re.findall(r"^\[.*\]", table.read_text(encoding="utf-8"), re.MULTILINE)
        texts |= {
            part
            for name in re.findall(r"[\w.]+", " ".join(heads))
            for part in (name, name.rpartition(".")[0])
        }
    found = texts & MODULES.keys()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module") and node.args:
            name = node.args[0]
            if isinstance(name, ast.JoinedStr) and isinstance(name.values[0], ast.Constant):
                found |= {f"{name.values[0].value}{text}" for text in texts} & MODULES.keys()
    return found


def reached() -> set[str]:
    """Return the modules that the command line, the public names and the scripts use."""
    found: set[str] = set()
    open_modules = {"foreshard", "foreshard.__main__", "foreshard.cli"}
    for path in SCRIPTS:
        open_modules |= imports(path) & MODULES.keys()
    while open_modules:
        module = open_modules.pop()
        found.add(module)
        uses = (imports(MODULES[module]) | named_in_strings(MODULES[module])) & MODULES.keys()
        packages = {module.rsplit(".", depth)[0] for depth in range(1, module.count(".") + 1)}
        open_modules |= (uses | packages) - found
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
        if layer_of(path) in ("spec", "units", "errors", "quantity", "words", "option_names"):
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


def test_folders_stay_small():
    sizes = defaultdict(int)
    for path in FILES:
        sizes[path.parent] += path.name != "__init__.py"
    wide = {str(folder.relative_to(SOURCE)): n for folder, n in sizes.items() if n > MAX_FILES_IN_FOLDER}
    assert not wide


def test_a_public_class_name_is_used_once():
    defined = defaultdict(list)
    for path in FILES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                defined[node.name].append(module_of(path))
    assert not {name: places for name, places in defined.items() if len(places) > 1}


def test_no_file_imports_itself_through_others():
    graph = {name: imports(path, module_level=True) & MODULES.keys() for name, path in MODULES.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"import cycle: {' -> '.join(error.args[1])}")


def test_every_module_is_used_by_more_than_tests():
    assert MODULES.keys() - reached() == set()


def test_the_formatter_is_never_switched_off():
    switches = ("fmt: " + "skip", "fmt: " + "off")  # built here, or this file would name itself
    for path in [*FILES, *SCRIPTS, *(ROOT / "bench").glob("*.py"), *(ROOT / "tests").rglob("*.py")]:
        text = path.read_text(encoding="utf-8")
        assert not any(switch in text for switch in switches), path


def test_a_package_says_what_to_read_first():
    for path in FILES:
        if path.name == "__init__.py" and path.parent != SOURCE:
            text = ast.get_docstring(tree_of(path)) or ""
            named = re.findall(r"`+([\w/]+?)(?:\.py)?`+", text)
            known = any((path.parent / f"{name}.py").exists() for name in named)
            assert "first" in text and known, (
                f"{module_of(path)} does not name the file to read first: {text}"
            )


def test_the_design_names_files_that_exist():
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w/*.]+\.(?:py|toml|json))`", text)) - {"cluster.toml", "plan.json"}
    for name in sorted(named):
        assert any(SOURCE.rglob(name)) or any(ROOT.glob(name)), f"docs/design.md names {name}"
