"""Split the demo's prediction into the files people open first, and say where they are."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(folder: Path) -> None:
    """Write plan.json and summary.json beside prediction.json."""
    prediction = json.loads((folder / "prediction.json").read_text(encoding="utf-8"))
    (folder / "plan.json").write_text(json.dumps(prediction["plan"], indent=2) + "\n", encoding="utf-8")
    summary = {
        "schema_version": 1,
        "model": prediction["model"],
        "cluster": prediction["cluster"],
        "predicted_step_time_s": prediction["step_time_s"],
        "predicted_step_time_interval_s": prediction["step_time_interval_s"],
        "mfu": prediction["mfu"],
        "peak_bytes": prediction["memory"]["peak_bytes"],
        "capacity_bytes": prediction["memory"]["capacity_bytes"],
        "usd_per_1b_tokens": prediction["cost"]["usd_per_1b_tokens"],
        "usd_total": prediction["cost"]["usd_total"],
    }
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    about = {
        "report.html": "what people look at; opens in any browser, offline",
        "trace.json.gz": "the step, task by task; drop it on ui.perfetto.dev",
        "plan.json": "the plan predicted; foreshard predict MODEL CLUSTER --plan reads it",
        "prediction.json": "every number",
        "prediction.txt": "the table above",
        "summary.json": "the headline",
    }
    print("\nWritten:")
    for name, text in about.items():
        print(f"  {folder.resolve() / name}  {text}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
