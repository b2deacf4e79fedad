"""Networks of the library timm, made by its own code without weights."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from foreshard.errors import ExtraMissingError, SpecError

PREFIX = "timm/"
"""Before names of timm, as the Hub has them."""
_READER = "torchvision"
"""What timm reads images by."""


def timm_name(text: str) -> str | None:
    """Return a network of timm as ``timm/NAME``, None for what is not said to be of timm.

    Examples
    --------
    >>> timm_name("timm:resnet50"), timm_name("timm/resnet50.a1_in1k"), timm_name("resnet50")
    ('timm/resnet50', 'timm/resnet50.a1_in1k', None)
    """
    said = re.fullmatch(r"timm[:/]([\w.-]+)", text.strip(), re.IGNORECASE)
    return None if said is None else PREFIX + said[1].lower()


def timm_network(name: str, *, side: int | None = None, fused_attention: bool = True) -> tuple[Any, Any]:
    """Return a network of timm and one image, on the meta device.

    Parameters
    ----------
    name : str
        ``timm/NAME``; of names that timm has given up, the network that it calls so now.
    side : int, optional
        Of the image, pixels; by default what timm says that the network reads.
    fused_attention : bool
        Whether attention is one operation, as timm writes it from PyTorch 2.0 on.

    Raises
    ------
    ExtraMissingError
        Without timm.
    SpecError
        For a name that timm does not make, alone or for this side.
    """
    import torch

    bare = name.removeprefix(PREFIX)
    with torch.device("meta"), nullcontext() if fused_attention else _attention_in_parts():
        module = _made(bare)
        channels, *sides = module.default_cfg.get("input_size") or (3, 224, 224)
        if side is not None and module.default_cfg.get("fixed_input_size") and sides != [side, side]:
            module = _made(bare, img_size=side)
        return module, torch.empty(1, channels, *((side, side) if side else sides))


@contextmanager
def _attention_in_parts() -> Iterator[None]:
    """Make networks whose attention is products and a softmax.

    Source: timm, timm/layers/config.py, use_fused_attn.
    """
    choose = _timm().layers.set_fused_attn
    choose(False)
    try:
        yield
    finally:
        choose(True)


def _made(name: str, **sized: int) -> Any:
    """Return a module of timm."""
    timm = _timm()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of names that it has given up
            return timm.create_model(name, **sized)
    except (RuntimeError, AssertionError, TypeError, ValueError, NotImplementedError) as error:
        near = get_close_matches(name, timm.list_models(), n=3)
        raise SpecError(
            f"timm {timm.__version__} does not make {name}: {str(error).partition(chr(10))[0]}",
            key="model",
            value=PREFIX + name,
            rule="A network of timm is one that timm.create_model makes",
            fix=f"Did you mean {', '.join(near)}?" if near else "See timm.list_models()",
        ) from error


@cache
def _timm() -> ModuleType:
    """Return the library, whose reader of images a trace does not need."""
    try:
        with _without_reader():
            return import_module("timm")
    except ModuleNotFoundError as error:
        what = f"networks of timm are made by its own code, and {error.name} is not installed"
        raise ExtraMissingError(what, key="model", fix="pip install timm") from error


@contextmanager
def _without_reader() -> Iterator[None]:
    """Import a stand-in for torchvision, where there is none or one of another torch."""
    try:
        import_module(_READER)
    except (ImportError, RuntimeError):
        stand_ins = _StandIns()
        sys.meta_path.insert(0, stand_ins)
        try:
            _forget_reader()
            yield
        finally:
            sys.meta_path.remove(stand_ins)
            _forget_reader()
    else:
        yield


def _forget_reader() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == _READER]:
        del sys.modules[name]


class _StandIns(MetaPathFinder, Loader):
    """Finds modules of torchvision whose every name is a class without contents."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        """Return the place of a module of torchvision, None of others."""
        is_reader = fullname.partition(".")[0] == _READER
        return ModuleSpec(fullname, self, is_package=True) if is_reader else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return an empty module."""
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Leave it empty."""


class _Nothing(type):
    """A class whose every attribute is such a class."""

    def __getattr__(cls, name: str) -> Any:
        return _nothing(name)


class _StandIn(ModuleType):
    """A module whose every name is a class without contents."""

    def __getattr__(self, name: str) -> Any:
        return _nothing(name)


def _nothing(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Nothing(name, (), {})
