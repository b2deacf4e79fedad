"""Cells of a training table as other sources write them: missing columns, words for nothing, 1,024 and 8k."""

from __future__ import annotations

import re
from collections.abc import Mapping

from foreshard.catalog.shipped import shipped

_KINDS: Mapping[str, str] = shipped("columns.toml", "foreshard.validation")["inputs"]
INPUTS = tuple(_KINDS)
"""What a row says of its run before its results; equal in all of them = repeats."""
RESULTS = tuple(shipped("columns.toml", "foreshard.validation")["results"])
COLUMNS = ("id", "source", "url_or_repo_path", *INPUTS, *RESULTS, "quality", "check", "notes")

_NOTHING = re.compile(
    r"-+|\u2013|\u2014|\?+|n/?a|nan|null|none|unknown|unstated|not stated|not given|tbd", re.IGNORECASE
)
_GROUPED = re.compile(r"\d{1,3}(?:[, _]\d{3})+(?:\.\d+)?")
_KILO = re.compile(r"(\d+(?:\.\d+)?) ?[kK](?: ?tokens)?")
_YES = ("true", "1", "1.0", "yes", "y", "on", "enabled")
_NO = ("false", "0", "0.0", "no", "n", "off", "disabled")


def cleaned(raw: Mapping[str, str]) -> dict[str, str]:
    """Return the row with every column a training table has, and its numbers as plain digits.

    `-`, `n/a`, `unknown` and the like are blank where a number or a name belongs; zero experts are none;
    `1,024` is 1024 and a sequence of `8k` is 8192. What else a cell says is left for its reader.
    """
    row = {name: "" for name in COLUMNS} | {key: (value or "").strip() for key, value in raw.items() if key}
    for name, kind in _KINDS.items() | dict.fromkeys(RESULTS, "number").items():
        text = row[name]
        if kind == "number":
            row[name] = _digits(name, text)
        elif kind == "switch":
            row[name] = _switch(text)
        elif kind == "name" and _NOTHING.fullmatch(text):
            row[name] = ""
    return row


def _digits(name: str, text: str) -> str:
    if _NOTHING.fullmatch(text):
        return ""
    if _GROUPED.fullmatch(text):
        return re.sub("[, _]", "", text)
    thousands = _KILO.fullmatch(text)
    if thousands and name == "seq_len":
        return str(round(float(thousands[1]) * 1024))
    if name in ("n_experts", "topk", "vpp", "cp", "ep") and re.fullmatch(r"0+(?:\.0*)?", text):
        return ""
    return text


def _switch(text: str) -> str:
    """Return True or False, blank for nothing; of an MLP its activation says whether it is gated."""
    said = truth(text)
    if said is None and re.search("glu|gated", text.lower()):
        said = True
    elif said is None and re.search("gelu|relu|plain", text.lower()):
        said = False
    if said is None:
        return "" if _NOTHING.fullmatch(text) else text
    return str(said)


def truth(text: str) -> bool | None:
    """Return what a yes-or-no cell says, None when it says neither."""
    low = text.lower().strip()
    return True if low in _YES else False if low in _NO else None
