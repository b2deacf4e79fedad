"""The models of the catalog, and the model a user names: by catalog name, ``config.json`` or factory."""

from __future__ import annotations

import difflib
import functools
import importlib.util
import os.path
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from foreshard.catalog.hf.load import model_from_config, read_config
from foreshard.catalog.hybrids import hybrid_model
from foreshard.catalog.model_dims import model_from_dims
from foreshard.catalog.shipped import shipped
from foreshard.catalog.torch_module import model_from_module
from foreshard.errors import ExtraMissingError, ForeshardError, SpecError
from foreshard.spec.model import Model

_RULE = "A model is a catalog name, a config.json or module.py:factory"
_FACTORY = "The factory is a function without arguments in that file"


def _key(name: str) -> str:
    """Return the name without case, spaces and dashes, so that spellings of one model coincide."""
    return re.sub(r"[^a-z0-9.]", "", name.lower())


@functools.cache
def _names() -> dict[str, str]:
    """Return the catalog name of every normalised name and alias."""
    table: dict[str, str] = {}
    for name, entry in shipped("models.json")["models"].items():
        for spelling in (name, *entry["aliases"]):
            table[_key(spelling)] = name
    return table


@functools.cache
def _not_modelled() -> dict[str, str]:
    return {_key(name): why for name, why in shipped("models.json")["not_modelled"].items()}


def find_model(name: str) -> Model | None:
    """Return the catalog model of this name or alias, or None.

    A model that is known and not modelled is an error.
    """
    why = _not_modelled().get(_key(name))
    if why:
        raise SpecError(f"{name!r} is not modelled", key="model", value=name, rule=f"It is {why}")
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
    model = find_model(text)
    if model:
        return model
    tail = text.rpartition("/")[2]
    if tail != text and not text.endswith(".json") and not os.path.exists(text):
        _refuse_hub_name(text, tail)
    if text.endswith(".json") or "/" in text or os.path.exists(text):
        return model_from_config(read_config(text), name=_config_name(Path(text)), file=text)
    near = difflib.get_close_matches(text.lower()[:100], models(), n=3, cutoff=0.5)
    fix = f"Did you mean {' or '.join(map(repr, near))}?" if near else "See 'foreshard models'"
    raise _wrong(f"unknown model {text[:100]!r}", text, fix)


def load_module(text: str | Path) -> tuple[Any, Any, Any] | None:
    """Return the module, example inputs and loss that ``module.py:factory`` returns; None for other models.

    Such a factory returns ``(module, inputs)`` or ``(module, inputs, loss)``: it is traced rather than read
    as a transformer.
    """
    module, colon, factory = str(text).rpartition(":")
    if not colon or not module.endswith(".py") or not Path(module).is_file():
        return None
    made = _call(Path(module), factory)
    if not isinstance(made, tuple) or len(made) not in (2, 3) or not hasattr(made[0], "named_parameters"):
        return None
    return (*made, None) if len(made) == 2 else made


def _wrong(what: str, text: str, fix: str, more: str = "") -> SpecError:
    return SpecError(what, key="model", value=text[:100], rule=_RULE + more, fix=fix)


def _refuse_hub_name(text: str, tail: str) -> None:
    """Refuse ``organisation/model`` where the catalog knows the model: nothing is downloaded."""
    known = find_model(tail)
    near = [known.name] if known else difflib.get_close_matches(tail.lower()[:100], models(), n=1, cutoff=0.6)
    if near:
        raise _wrong(f"no file {text[:100]!r}", text, f"Did you mean {near[0]!r}?", "; nothing is downloaded")


def _config_name(path: Path) -> str:
    """Return the name of the folder of a ``config.json``, else that of the file."""
    return path.resolve().parent.name if path.stem == "config" else path.stem


def _from_factory(path: Path, factory: str) -> Model:
    if not path.is_file():
        raise SpecError("no such file", file=str(path), key="model", rule="MODEL may be module.py:factory")
    made = _call(path, factory)
    if isinstance(made, Model):
        return made
    if isinstance(made, Mapping):
        return model_from_config(made, name=factory, file=f"{path}:{factory}")
    return _from_module(made, f"{path}:{factory}")


def _call(path: Path, factory: str) -> Any:
    """Run the user's module and its factory; what goes wrong in it is bad input, not our fault."""
    spec = importlib.util.spec_from_file_location(f"_foreshard_user_{path.stem}", path)
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
        fix = "The extra foreshard[run] brings torch, foreshard[models] transformers"
        raise ExtraMissingError(f"needs {error.name}", file=str(path), fix=fix) from error
    except (Exception, SystemExit) as error:
        what = f"{factory}() failed: {type(error).__name__}: {error}"
        raise SpecError(what, file=str(path), key="model", value=factory, rule=_FACTORY) from error
    finally:
        sys.modules.pop(spec.name, None)


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
    rule = "A factory returns a Model, a config dict, a torch.nn.Module, or (module, example inputs)"
    raise SpecError(f"returned a {type(made).__name__}", file=where, key="model", rule=rule)
