"""The models of the catalog, and the model a user names: by catalog name, ``config.json`` or factory."""

from __future__ import annotations

import difflib
import functools
import importlib.util
import os.path
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from foreshard.catalog.hf.hybrids import hybrid_model
from foreshard.catalog.hf.load import model_from_config, read_config
from foreshard.catalog.model_dims import model_from_dims
from foreshard.catalog.shipped import shipped
from foreshard.catalog.torch_module import model_from_module
from foreshard.errors import ExtraMissingError, ForeshardError, SpecError
from foreshard.spec.model import Model

_HUB_SOURCE = re.compile(r"https://huggingface\.co/([^/\s]+/[^/\s]+)")
_HUB_ADDRESS = re.compile(
    r"^(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/|^(?:hf|huggingface)(?:://|:)"
)
# Endings of models that were tuned from another and have its shapes.
_TUNED = re.compile(
    r"(?:[-_](?:instruct|chat|it|base|pt|hf|deduped|thinking|reasoning|sft|dpo))+(?=$|-v[0-9])", re.IGNORECASE
)
_QUANTISED = re.compile(r"[-_](?:bnb|awq|gptq|gguf|fp8|int[48]|[48]bit|nf4)\b", re.IGNORECASE)
_ON_HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")  # ORGANISATION/NAME
_RULE = "A model is a catalog name, a config.json or module.py:factory"
_FACTORY = "The factory is a function without arguments in that file"
WHERE_TRACED = "Traced modules are taken by predict, whatif, compare, plan CLUSTER and export, and by trace()"
"""The rule that a verb breaks that takes none."""
TRACED_FIX = "Use one of these, or name a model of the catalog"


def _key(name: str) -> str:
    """Return the name without case, spaces and dashes, so that spellings of one model coincide."""
    return re.sub(r"[^a-z0-9.]", "", name.lower())


@functools.cache
def _names() -> dict[str, str]:
    """Return the catalog name of every normalised name, alias and name on the Hugging Face Hub."""
    table: dict[str, str] = {}
    hub: dict[str, str] = {}
    for name, entry in shipped("models.json")["models"].items():
        for spelling in (name, *entry["aliases"]):
            table[_key(spelling)] = name
        published = _HUB_SOURCE.match(entry["source"])
        if published:
            hub.setdefault(_key(published[1]), name)
            hub.setdefault(_key(published[1].partition("/")[2]), name)
    return hub | table


@functools.cache
def _not_modelled() -> dict[str, str]:
    return {_key(name): why for name, why in shipped("models.json")["not_modelled"].items()}


def _why_not(name: str) -> str | None:
    """Return why no model is made of a name whose family is known: by its longest beginning."""
    table: dict[str, str] = shipped("models.json")["families_not_modelled"]
    key = _key(name)
    known = [start for start in table if key.startswith(start)]
    return table[max(known, key=len)] if known else None


def hub_model(text: str) -> Model | None:
    """Return the catalog model whose shapes a model of the Hub has: ORGANISATION/NAME, its address, or NAME.

    What is tuned from a model (``-Instruct``, ``-chat``, ``-it``) has its shapes. Another version or a
    quantised copy need not, and is not taken for it.

    Examples
    --------
    >>> hub_model("https://huggingface.co/Qwen/Qwen2.5-7B-Instruct").name
    'qwen2.5-7b'
    """
    path = _HUB_ADDRESS.sub("", text.strip()).strip("/")
    path = re.sub(r"/(?:blob|resolve|raw|tree)/.*$", "", path)
    if path.count("/") > 1 or path.endswith((".json", ".py", ".toml")):
        return None
    name = path.rpartition("/")[2]
    for spelling in (path, name, _TUNED.sub("", name), _TUNED.sub("", name).lower().removeprefix("meta-")):
        found = find_model(spelling)
        if found is not None:
            said = f"{text[:100]}: the shapes of {found.name} of the catalog; nothing was downloaded"
            return replace(found, assumptions=(*found.assumptions, said))
    return None


def _only_size(text: str) -> Model | None:
    """Return the model of a family that has one size in the catalog, None where it has several or none."""
    start = re.sub(r"[\s_]+", "-", text.strip().lower()) + "-"
    entries = shipped("models.json")["models"]
    found = {
        name
        for name, entry in entries.items()
        if any(spelling.lower().startswith(start) for spelling in (name, *entry["aliases"]))
    }
    if len(found) != 1:
        return None
    model = _entry(found.pop())
    said = f"{text[:100]}: taken as {model.name}, the only size of it in the catalog"
    return replace(model, assumptions=(*model.assumptions, said))


def find_model(name: str) -> Model | None:
    """Return the catalog model of this name or alias, or None.

    A model that is known and not modelled is an error.
    """
    why = _not_modelled().get(_key(name))
    if why:
        raise _not_modelled_error(name, why)
    canonical = _names().get(_key(name))
    return _entry(canonical) if canonical else None


@functools.cache
def _entry(name: str) -> Model:
    entry = shipped("models.json")["models"][name]
    if "dims" in entry:
        model = model_from_dims(name, **entry["dims"])
    elif "hybrid" in entry:
        model = hybrid_model(name, **entry["hybrid"])
    else:
        model = model_from_config(entry["config"], name=name)
    return replace(
        model,
        source=entry["source"],
        max_seq_len=entry.get("seq_len", model.max_seq_len),
        assumptions=(*model.assumptions, *entry.get("assumptions", ())),
    )


def models() -> Mapping[str, Model]:
    """Return every catalog model by its canonical name."""
    return MappingProxyType({name: _entry(name) for name in shipped("models.json")["models"]})


def load_model(text: str | Path) -> Model:
    """Return the model a user names.

    Parameters
    ----------
    text : str or Path
        A catalog name, the path of a Hugging Face ``config.json``, or ``module.py:factory``. The factory
        takes no arguments and returns a `Model`, a configuration dict or a ``torch.nn.Module``.

    Raises
    ------
    SpecError
        If nothing of that name is known, or the file is no valid configuration.
    """
    text = str(text)
    module, colon, factory = text.rpartition(":")
    if colon and module.endswith(".py"):
        return _from_factory(Path(module), factory)
    if text.endswith(".py") and os.path.exists(text):
        fix = f"Write {text}:FACTORY; of a job give --costs, made with foreshard profile and calibrate"
        error = _wrong("a Python file without the name of a factory", text, fix, "; a job is measured first")
        error.file = text
        raise error
    on_disk = os.path.exists(text)
    model = find_model(text) or (None if on_disk else hub_model(text) or _only_size(text))
    if model:
        return model
    if on_disk or (text.endswith(".json") and "://" not in text):
        file = _config_of(text)
        config = read_config(file)
        if "model_type" not in config and ("groups" in config or "plan" in config):
            fix = f"Name the model first: foreshard VERB MODEL CLUSTER --plan {text}"
            raise SpecError("is a plan, no model", file=file, rule=_RULE, fix=fix)
        return model_from_config(config, name=_config_name(Path(file)), file=file)
    raise _unknown(text)


def _config_of(path: str) -> str:
    """Return the configuration's path; of a downloaded model, a folder may be named."""
    inside = os.path.join(path, "config.json")
    return inside if os.path.isfile(inside) else path


def _not_modelled_error(name: str, why: str) -> SpecError:
    fix = "Name one of 'foreshard models', or give a config.json or module.py:factory"
    return SpecError(f"{name!r} is not modelled", key="model", value=name, rule=f"It is {why}", fix=fix)


def _unknown(text: str) -> SpecError:
    """Return the error of a model that is neither in the catalog nor a file, with those that come nearest."""
    name = text.strip("/").rpartition("/")[2][:100]
    why = _why_not(name)
    if why:
        return _not_modelled_error(name, why)
    near = near_models(_QUANTISED.split(_TUNED.sub("", name))[0])
    fix = f"Did you mean {' or '.join(map(repr, near))}?" if near else "See 'foreshard models'."
    if "/" in text and "://" not in text and not near and not _ON_HUB.fullmatch(text):
        read_config(text)  # raises: a path without such a file
    if _is_cluster(text):
        return _wrong(
            f"{text[:100]!r} is a cluster", text, "Name the model first: foreshard VERB MODEL CLUSTER"
        )
    if "/" not in text:
        return _wrong(f"unknown model {text[:100]!r}", text, fix)
    more = "; weights are trained in the precision of the run" if _QUANTISED.search(name) else ""
    fix = f"{fix if near else ''} {'Or fetch' if near else 'Fetch'} its config.json and give the path".strip()
    return _wrong(f"no file {text[:100]!r}", text, fix, f"; nothing is downloaded{more}")


def _is_cluster(text: str) -> bool:
    """Return whether a text describes a cluster: the arguments were then given in the other order."""
    from foreshard.catalog.shorthand import read_shorthand

    try:
        return bool(read_shorthand(text))
    except SpecError:
        return False


def near_models(name: str) -> list[str]:
    """Return the catalog models nearest in meaning: of its family, first those of its version and size.

    A family alone gets its sizes. What shares no family is near only in spelling, or there is none.

    Examples
    --------
    >>> near_models("llama-405b")[0], near_models("qwen3-8")[0]
    ('llama3.1-405b', 'qwen3-8b')
    >>> near_models("resnet152"), near_models("lama3-8b")[0]
    ([], 'llama3-8b')
    """
    low = re.sub(r"(?<=[0-9])_(?=[0-9])", ".", name.lower())
    words, family = _words(low), _family(low)
    scored = []
    for known, entry in shipped("models.json")["models"].items():
        # a short alias where it says more of what was typed: qwen2-7b has the shapes of qwen2.5-7b
        best = max(
            (sum(map(_weight, words & _words(spelling))), spelling == known, spelling)
            for spelling in (known, *map(str.lower, entry["aliases"]))
            if len(spelling) <= len(known)
        )
        other = _family(best[2])
        if family == other or (len(other) > 1 and other in words) or _ratio(family, other) >= 0.85:
            scored.append((best[0], _ratio(low, best[2]), best[2]))
    scored.sort(key=lambda entry: entry[:2], reverse=True)
    sizes = any(word[-1] in "bm" for word in words if word[0].isdigit())
    return [known for shared, _, known in scored if shared >= scored[0][0]][: 3 if sizes else 8]


def _weight(word: str) -> float:
    if word.isalpha():
        return 3.0 * (len(word) > 1)
    return 2.0 if word[-1] in "bm" else 1.0


def _words(name: str) -> frozenset[str]:
    """Return the parts of a model's name that mean something: its family, its version, its size."""
    return frozenset(re.findall(r"[0-9.]+x?[0-9.]*[bm]\b|[0-9.]+|[a-z]+", name))


def _family(name: str) -> str:
    """Return the first word of a name."""
    found = re.search(r"[a-z]+", name)
    return found[0] if found else ""


def _ratio(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()


@contextmanager
def load_module(text: str | Path) -> Iterator[tuple[Any, Any, Any] | None]:
    """Give the module, example inputs and loss that ``module.py:factory`` returns; None for other models.

    Such a factory returns ``(module, inputs)`` or ``(module, inputs, loss)``: it is traced rather than read
    as a transformer. Within the context the module may import what lies beside its file.
    """
    module, colon, factory = str(text).rpartition(":")
    if not colon or not module.endswith(".py") or not Path(module).is_file():
        yield None
        return
    with _importing_beside(Path(module)):
        made = _call(Path(module), factory)
        if not _is_with_inputs(made):
            yield None
        else:
            yield (*made, None) if len(made) == 2 else made


def _is_with_inputs(made: Any) -> bool:
    return isinstance(made, tuple) and len(made) in (2, 3) and hasattr(made[0], "named_parameters")


def _wrong(what: str, text: str, fix: str, more: str = "") -> SpecError:
    return SpecError(what, key="model", value=text[:100], rule=_RULE + more, fix=fix)


def _config_name(path: Path) -> str:
    """Return the name of the folder that was given with a ``config.json``, else that of the file."""
    return path.parent.name or path.name if path.stem == "config" else path.stem


def _from_factory(path: Path, factory: str) -> Model:
    if not path.is_file():
        raise SpecError("no such file", file=str(path), key="model", rule="MODEL may be module.py:factory")
    with _importing_beside(path):
        made = _call(path, factory)
    if isinstance(made, Model):
        return made
    if isinstance(made, Mapping):
        return model_from_config(made, name=factory, file=f"{path}:{factory}")
    return _from_module(made, f"{path}:{factory}")


@contextmanager
def _importing_beside(path: Path) -> Iterator[None]:
    """Let modules and packages beside a file be imported, as a script would.

    They are forgotten after it, so that those of the same name beside another file are not taken for them.
    """
    folder, known = str(path.resolve().parent), set(sys.modules)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
        for name in set(sys.modules) - known:
            if name == _user_name(path) or _is_beside(name, folder):
                sys.modules.pop(name, None)


def _user_name(path: Path) -> str:
    """Return the name under which a user's file is imported."""
    return f"_foreshard_user_{path.stem}"


def _call(path: Path, factory: str) -> Any:
    """Run the user's module and its factory; what goes wrong in it is bad input, not our fault."""
    spec = importlib.util.spec_from_file_location(_user_name(path), path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
        made = getattr(module, factory, None)
        if not callable(made):
            raise _no_factory(path, factory, module)
        return _made(made)
    except ForeshardError:
        raise
    except ModuleNotFoundError as error:
        extras = "foreshard[run] brings torch, foreshard[models] transformers"
        fix = f"Put it beside the file, or install it: {extras}"
        raise ExtraMissingError(f"needs {error.name}", file=str(path), fix=fix) from error
    except (Exception, SystemExit) as error:
        what = f"{factory}() failed: {type(error).__name__}: {error}"
        raise SpecError(what, file=str(path), key="model", value=factory, rule=_FACTORY) from error


def _is_beside(name: str, folder: str) -> bool:
    """Return whether a module is a file of a folder or of a package in it, and none of our own."""
    root, file = name.partition(".")[0], getattr(sys.modules[name], "__file__", None)
    places = (Path(folder, root), Path(folder, f"{root}.py"))
    found = isinstance(file, str) and any(place in (Path(file), *Path(file).parents) for place in places)
    return found and root != __name__.partition(".")[0]


def _made(factory: Callable[[], Any]) -> Any:
    """Return what a factory makes, without values where it uses torch and can do without."""
    torch = sys.modules.get("torch")
    if torch is None:
        return factory()
    try:
        with torch.device("meta"):
            return factory()
    except Exception:  # initial values that are computed: made for real
        return factory()


def _no_factory(path: Path, factory: str, module: ModuleType) -> SpecError:
    found = [
        name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__
    ]
    what = f"no function {factory!r}"
    fix = f"It has {', '.join(found[:8])}" if found else "Define one"
    return SpecError(what, file=str(path), key="model", value=factory, rule=_FACTORY, fix=fix)


def _from_module(made: Any, where: str) -> Model:
    """Return the model of a torch module: by its config if transformers made it, else by its weights."""
    config: Any = getattr(made, "config", None)
    if hasattr(config, "to_dict"):
        return model_from_config(config.to_dict(), name=type(made).__name__, file=where)
    if hasattr(made, "named_parameters"):
        return model_from_module(made, where)
    if _is_with_inputs(made):
        what = "a module with example inputs is traced"
        raise SpecError(what, file=where, key="model", rule=WHERE_TRACED, fix=TRACED_FIX)
    rule = "A factory returns a Model, a config dict, a torch.nn.Module, or (module, example inputs)"
    raise SpecError(f"returned a {type(made).__name__}", file=where, key="model", rule=rule)
