"""Write which framework on which architecture was among the runs that the training constants were fitted on.

python scripts/measured_stacks.py            write src/foreshard/catalog/data/measured_stacks.toml
python scripts/measured_stacks.py --check    fail when the shipped file differs
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

from fit_training import load_runs, training_tables

from foreshard.validation.tables import measured_folder

SHIPPED = Path(__file__).parent.parent / "src/foreshard/catalog/data/measured_stacks.toml"
HEAD = (
    "# Frameworks and the architectures on which runs of them were in the fit of the training constants.\n"
    "# Written by scripts/measured_stacks.py from the measured tables.\n"
)


def measured() -> str:
    """Return the text of the file."""
    found: dict[str, set[str]] = defaultdict(set)
    for row in load_runs(training_tables(measured_folder())).rows:
        found[row.framework.name] |= {device.arch for device in row.cluster.devices}
    lines = [f"{name} = {sorted(found[name])}".replace("'", '"') for name in sorted(found)]
    return HEAD + "\n".join(lines) + "\n"


def main() -> int:
    """Write or check the file."""
    text = measured()
    if "--check" in sys.argv:
        return int(text != SHIPPED.read_text(encoding="utf-8"))
    SHIPPED.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
