"""Cells of a training table as other sources write them: missing columns, words for nothing, 1,024 and 8k."""

from __future__ import annotations

import re
from collections.abc import Mapping

INPUTS = (
    "model",
    "n_layers",
    "hidden",
    "ffn_hidden",
    "n_heads",
    "n_kv_heads",
    "vocab",
    "seq_len",
    "n_experts",
    "topk",
    "gated_mlp",
    "gpu",
    "gpus",
    "gpus_per_node",
    "intra_link",
    "inter_link",
    "framework",
    "dtype",
    "dp",
    "tp",
    "pp",
    "vpp",
    "cp",
    "ep",
    "sp",
    "zero_stage_or_fsdp",
    "micro_batch",
    "global_batch",
    "act_recompute",
    "flash_attention",
)  # what a row says of its run before its results; equal in all of them = repeats
RESULTS = (
    "metric_step_time_s",
    "metric_tokens_per_s_per_gpu",
    "metric_tflops_per_gpu",
    "metric_mfu",
    "metric_peak_memory_gb",
)
COLUMNS = ("id", "source", "url_or_repo_path", *INPUTS, *RESULTS, "quality", "check", "notes")

_NOTHING = re.compile(
    r"-+|\u2013|\u2014|\?+|n/?a|nan|null|none|unknown|unstated|not stated|not given|tbd", re.IGNORECASE
)
_TEXTS = frozenset(
    (
        "model",
        "gpu",
        "intra_link",
        "inter_link",
        "framework",
        "dtype",
        "gated_mlp",
        "sp",
        "zero_stage_or_fsdp",
        "act_recompute",
        "flash_attention",
    )
)
_COUNTS = frozenset((*INPUTS, *RESULTS)) - _TEXTS
_MEANS_NOTHING = ("dtype", "framework", "inter_link", "intra_link", "sp", "gated_mlp")
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
    for name in COLUMNS:
        text = row[name]
        if not text:
            continue
        if name in _COUNTS:
            row[name] = _digits(name, text)
        elif name in ("gated_mlp", "sp") and truth(text) is not None:
            row[name] = str(truth(text))
        elif name == "gated_mlp" and re.search("glu|gated", text.lower()):
            row[name] = "True"
        elif name == "gated_mlp" and re.search("gelu|relu|plain", text.lower()):
            row[name] = "False"
        elif name in _MEANS_NOTHING and _NOTHING.fullmatch(text):
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


def truth(text: str) -> bool | None:
    """Return what a yes-or-no cell says, None when it says neither."""
    low = text.lower().strip()
    return True if low in _YES else False if low in _NO else None
