"""Bytes that a block keeps for the backward, as counted and as autograd keeps them, eager and compiled.

Compiled, inductor's partitioner says what is kept and what backward computes again; nothing runs on a device.
The eager half is a test (`tests/validation/test_hf_memory.py`); compiling takes seconds a model.

    python bench/bench_kept.py [MODEL_TYPE ...]
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.validation.test_hf_memory import MODELS, SAMPLES, SEQ, SIZES, counted_bytes, kept_bytes


def main() -> None:
    """Print a line for each model and way to run it, in bytes per token and channel of the hidden state."""
    warnings.simplefilter("ignore")
    print("| model | autocast | compiled | autograd keeps | counted | error |\n|---|---|---|---|---|---|")
    elements = SAMPLES * SEQ * SIZES["hidden_size"]
    for kind in sys.argv[1:] or MODELS:
        for autocast in (False, True):
            for compiled in (False, True):
                how = {"autocast": autocast, "compiled": compiled}
                kept = kept_bytes(kind, 2, **how) - kept_bytes(kind, 1, **how)
                counted = counted_bytes(kind, **how)
                words = " | ".join("yes" if on else "no" for on in (autocast, compiled))
                sizes = f"{kept / elements:.2f} | {counted / elements:.2f} | {counted / kept - 1:+.1%}"
                print(f"| {kind} | {words} | {sizes} |", flush=True)


if __name__ == "__main__":
    main()
