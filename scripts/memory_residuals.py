"""Write catalog/data/memory_residuals.json: how far published peaks lie from predicted ones.

    python scripts/memory_residuals.py           writes the file
    python scripts/memory_residuals.py --check   fails when the shipped one differs

A residual is log(measured / predicted) of one configuration; no constant of memory is fitted to these rows,
so each is left out by nature. Reserved bytes are compared with what the allocator holds, figures read from
outside the process with all that the device has given away. Needs the folder of measurements.
"""

from __future__ import annotations

import csv
import json
import math
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from foreshard.predict.batch import PlannedRun
from foreshard.predict.memory import plan_memory
from foreshard.predict.memory_interval import kin
from foreshard.validation.rows import TrainingRow, table_rows
from foreshard.validation.tables import measured_folder, read_table

OUT = Path(__file__).parents[1] / "src/foreshard/catalog/data/memory_residuals.json"
_ALSO_RESERVED = re.compile(r"; reserved ([\d.]+) GiB")  # beside the allocated bytes of SimuMax's rows


def residuals() -> dict[str, dict[str, list[float]]]:
    """Return the sorted residuals by figure (allocated, reserved) and kin of frameworks."""
    found: dict[str, dict[str, list[float]]] = {"allocated": defaultdict(list), "reserved": defaultdict(list)}
    seen = set()
    for path in sorted(measured_folder().glob("llm_*.csv")):
        notes = {row["id"]: row.get("notes", "") for row in csv.DictReader(path.open(encoding="utf-8"))}
        for row in table_rows(read_table(path))[0]:
            key = (row.model, row.cluster.name, repr(row.plan), row.framework.label, row.measured_peak_bytes)
            if row.measured_peak_bytes is None or key in seen:
                continue
            seen.add(key)
            for figure, value in _figures(row, notes.get(row.id, "")):
                found[figure][kin(row.framework)].append(round(value, 4))
    return {figure: {name: sorted(own[name]) for name in sorted(own)} for figure, own in found.items()}


def _figures(row: TrainingRow, note: str) -> Iterator[tuple[str, float]]:
    """Yield the residuals of a row; a figure of unknown kind counts as neither."""
    case = PlannedRun(model=row.model, cluster=row.cluster, plan=row.plan, framework=row.framework)
    memory, _ = plan_memory(case)
    if row.memory_kind in ("allocated", "reserved", "device"):
        figure = "allocated" if row.memory_kind == "allocated" else "reserved"
        yield figure, math.log(row.measured_peak_bytes / memory.counted(row.memory_kind))
    if stated := _ALSO_RESERVED.search(note):
        yield "reserved", math.log(float(stated[1]) * 2**30 / memory.peak_reserved_bytes)


def main() -> int:
    """Write the file, or compare it."""
    text = json.dumps(residuals(), indent=1) + "\n"
    if "--check" in sys.argv[1:]:
        return int(text != OUT.read_text(encoding="utf-8"))
    OUT.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
