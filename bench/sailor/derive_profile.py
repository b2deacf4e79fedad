"""Write `profile.json` from a checkout of eth-easl/sailor: `python bench/sailor/derive_profile.py PATH`.

Layers of one size and time are stored once: the embedding, the first block, every other block, the head.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

GPUS = ("A100-40", "V100-16")
TP_DEGREES = ("1", "2", "4")
ZONE = "us-central1-a"
MODEL = "OPT-350"
KINDS = ("0", "1", "2", "25")


def derive(checkout: Path) -> dict:
    """Return what the formula needs of their files, and check that nothing else differs between layers."""
    root = checkout / "sailor"
    times = json.loads((root / "Planner/simulations/profiles_tmp.json").read_text())[MODEL]
    sizes = json.loads((root / "Planner/llm_info.json").read_text())[MODEL]
    links = json.loads((root / "providers/multizone_bandwidths_het.json").read_text())[ZONE]
    return {
        "source": "https://github.com/eth-easl/sailor at cf2c8e3 (SOSP 2025): sailor/Planner/simulations/"
        "profiles_tmp.json, sailor/Planner/llm_info.json, sailor/providers/multizone_bandwidths_het.json",
        "licence": "MIT, Copyright (c) 2023 - present ETH Zurich",
        "model": "OPT-350M, sequences of 2048, fp32, Adam; layers: embedding, 24 blocks, head",
        "layer_kinds": ["embedding", "first block", "block", "head"],
        "times": [
            _times(times[gpu][size][tp], gpu, int(size), int(tp))
            for gpu in GPUS
            for size in sorted(times[gpu], key=int)
            for tp in TP_DEGREES
            if tp in times[gpu][size]
        ],
        "params": {tp: _sizes(sizes[tp], "params_floats") for tp in TP_DEGREES},
        "activation_floats": {tp: _sizes(sizes[tp], "act_mem_floats") for tp in TP_DEGREES},
        "message_floats": _sizes(sizes["1"], "act_output_floats"),
        "links": {
            f"{a} {n} {b} {m}": links[a][n][ZONE][b][m][0]
            for a in GPUS
            for n in TP_DEGREES
            for b in GPUS
            for m in TP_DEGREES
        },
    }


def _times(layers: dict, gpu: str, micro_batch: int, tp: int) -> dict:
    if len({layer[2] for layer in layers.values()}) != 1:
        raise ValueError(f"update times of {gpu} tp {tp} differ between layers")
    return {
        "gpu": gpu,
        "micro_batch": micro_batch,
        "tp": tp,
        "update_s": layers["0"][2],
        "forward_s": _by_kind({number: layer[0] for number, layer in layers.items()}),
        "backward_s": _by_kind({number: layer[1] for number, layer in layers.items()}),
    }


def _sizes(layers: dict, key: str) -> list:
    return _by_kind({number: layer[key] for number, layer in layers.items()})


def _by_kind(values: dict) -> list:
    if len(values) != 26 or len({values[str(number)] for number in range(2, 25)}) != 1:
        raise ValueError("blocks differ")
    return [values[kind] for kind in KINDS]


if __name__ == "__main__":
    target = Path(__file__).with_name("profile.json")
    target.write_text(json.dumps(derive(Path(sys.argv[1])), indent=1) + "\n")
