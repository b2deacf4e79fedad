"""`foreshard doctor`: whether this install is healthy, and what it lacks."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Callable
from importlib import metadata
from importlib.util import find_spec
from typing import Any

import click

from foreshard import __version__
from foreshard.cli.options.answer import give
from foreshard.cli.options.sources import verb_command
from foreshard.report.screen import Screen, table

_EXTRAS = {
    "numba": ("fast", "faster searches with tighter bounds, faster batches of predictions"),
    "scipy": ("plan", "plans on mixed nodes"),
    "torch": ("run", "profile and run jobs, models given as modules"),
    "transformers": ("models", "check parameter counts against transformers"),
    "sklearn": ("learn", "training of learned costs; using them needs none of it"),
    "timm": ("timm", "networks for images that timm makes"),
    "ray": ("sweep", "searches in tasks of Ray"),
    "yaml": ("yaml", "configurations of accelerate to import"),
    "pandas": ("notebook", "to_pandas of results"),
    "matplotlib": ("notebook", "plot of results"),
}
_DISTRIBUTIONS = {
    "yaml": "PyYAML",
    "sklearn": "scikit-learn",
}  # where a library is published under another name
FAULT = 1  # exit code where something needed is broken


@verb_command("doctor")
@click.pass_context
def command(ctx: click.Context) -> None:
    """Check the health of this install; exit 1 when something it needs is broken."""
    checks = [
        _python(),
        *(_library(name) for name in required()),
        *_catalogs(),
        _tried("prediction", _one_prediction),
        _measurements(),
    ]
    checks += [_extra(name, *about) for name, about in _EXTRAS.items()]
    data = {
        "schema_version": 1,
        "version": __version__,
        "healthy": all(check["status"] != "broken" for check in checks),
        "checks": checks,
    }
    give(data, lambda: _screen(checks))
    if not data["healthy"]:
        ctx.exit(FAULT)


def _check(name: str, status: str, detail: str) -> dict[str, str]:
    return {"check": name, "status": status, "detail": detail}


def required() -> list[str]:
    """Return the libraries that foreshard depends on, without extras; none where it runs uninstalled."""
    try:
        stated = metadata.requires("foreshard") or []
    except metadata.PackageNotFoundError:
        return []
    return [re.split(r"[^\w-]", text, maxsplit=1)[0] for text in stated if "extra ==" not in text]


def _python() -> dict[str, str]:
    good = sys.version_info >= (3, 11)
    return _check("python", "ok" if good else "broken", f"{platform.python_version()} ({sys.executable})")


def _library(name: str) -> dict[str, str]:
    try:
        return _check(name, "ok", metadata.version(name))
    except metadata.PackageNotFoundError:
        return _check(name, "broken", "not installed; pip install foreshard again")


def _extra(name: str, extra: str, use: str) -> dict[str, str]:
    if find_spec(name) is None:
        return _check(name, "absent", f"optional: {use}; pip install 'foreshard[{extra}]'")
    return _check(name, "ok", f"{metadata.version(_DISTRIBUTIONS.get(name, name))}: {use}")


def _tried(name: str, look: Callable[[], str]) -> dict[str, str]:
    try:
        return _check(name, "ok", look())
    except Exception as error:  # whatever is wrong with the install is what this verb is for
        return _check(name, "broken", f"{type(error).__name__}: {error}")


def _catalogs() -> list[dict[str, str]]:
    def devices() -> str:
        from foreshard.catalog.devices import devices

        unverified = sum(not device.verified for device in devices().values())
        return f"{len(devices())} devices, {unverified} unverified"

    def models() -> str:
        from foreshard.catalog.models import models

        return f"{len(models())} models"

    def prices() -> str:
        from foreshard.catalog.instances import instances, is_old

        priced = [instance for instance in instances().values() if instance.usd_per_h is not None]
        old = sum(is_old(instance.price_date) for instance in priced)
        return f"{len(priced)} prices, {old} older than a year"

    def frameworks() -> str:
        from foreshard.catalog.frameworks import frameworks

        return f"{len(frameworks())} frameworks and releases"

    return [_tried(look.__name__, look) for look in (devices, models, prices, frameworks)]


def _one_prediction() -> str:
    from foreshard import api, quantity

    made = api.predict(api.load_model("llama3-8b"), api.load_cluster("1x8xh100-sxm"), tp=2)
    parts = sum(made.time_breakdown_s.values())
    if abs(parts - made.step_time_s) > 1e-9 * made.step_time_s:
        raise ValueError(f"time parts sum to {parts}, the step is {made.step_time_s}")
    return f"llama3-8b on 1x8xh100-sxm: {quantity.seconds(made.step_time_s)} a step"


def _measurements() -> dict[str, str]:
    from foreshard.validation.tables import measured_folder

    folder = measured_folder()
    found = sorted(folder.glob("*.csv*")) if folder.is_dir() else []
    if found:
        return _check("measurements", "ok", f"{len(found)} tables in {folder}")
    return _check("measurements", "absent", f"optional: none in {folder}; set FORESHARD_MEASURED to validate")


def _screen(checks: list[dict[str, Any]]) -> Screen:
    rows = [(check["check"], check["status"], check["detail"]) for check in checks]
    return Screen(
        header=(f"foreshard {__version__}",), tables=(table("", ("check", "status", "detail"), rows),)
    )
