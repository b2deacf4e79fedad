"""Wall time of an import and of one prediction from the command line, warm, beside a bare interpreter."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
RUNS = 7
LIMIT_S = 0.6
IMPORT_LIMIT_S = 0.3  # over a bare start
BASE = ["predict", str(ROOT / "examples/llama3-70b.json"), "8x8xh100-sxm", "--tp", "8", "--pp", "2"]
COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "import foreshard": ["-c", "import foreshard"],
    "predict --json": ["-m", "foreshard", *BASE, "--json"],
    "predict --json --global-batch 512": ["-m", "foreshard", *BASE, "--global-batch", "512", "--json"],
    "predict (text, with advice)": ["-m", "foreshard", *BASE, "--global-batch", "512"],
}


def seconds(args: list[str]) -> list[float]:
    """Return the sorted wall times of a command after one run to warm up."""
    times = []
    for i in range(RUNS + 1):
        start = time.perf_counter()
        subprocess.run([sys.executable, *args], check=True, stdout=subprocess.DEVNULL)
        if i:
            times.append(time.perf_counter() - start)
    return sorted(times)


def main() -> None:
    """Print the least and the median of each command, and its ratio to a bare start."""
    bare = None
    for name, args in COMMANDS.items():
        times = seconds(args)
        least, median = times[0], times[len(times) // 2]
        bare = bare or least
        print(f"{name:<36} least {least:.3f} s  median {median:.3f} s  {least / bare:.1f} x a bare start")
    print(f"limits: {LIMIT_S} s for predict, {IMPORT_LIMIT_S} s over a bare start for the import")


if __name__ == "__main__":
    main()
