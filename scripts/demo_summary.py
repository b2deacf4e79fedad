"""Write the headline of the demo, and say where its files are."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(folder: Path) -> None:
    """Write summary.json beside the predictions of the run stated and of the plan found."""
    prediction = json.loads((folder / "prediction.json").read_text(encoding="utf-8"))
    planned = json.loads((folder / "plan_prediction.json").read_text(encoding="utf-8"))
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
        "planned": {
            "model": planned["model"],
            "cluster": planned["cluster"],
            "predicted_step_time_s": planned["step_time_s"],
            "predicted_step_time_interval_s": planned["step_time_interval_s"],
            "mfu": planned["mfu"],
            "shares": [group["share"] for group in planned["plan"]["groups"]],
        },
    }
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    about = {
        "report.html": "the prediction as people look at it; opens in any browser, offline",
        "trace.json.gz": "the step, task by task; drop it on ui.perfetto.dev",
        "plan.html": "the plan found for devices of two kinds, drawn, with the bound on all others",
        "plan.json": "that plan; foreshard predict MODEL CLUSTER --plan reads it",
        "plan.txt": "the second table above",
        "plan_prediction.json": "every number of that plan",
        "prediction.json": "every number of the prediction",
        "prediction.txt": "the first table above",
        "summary.json": "the headline",
    }
    print("\nWritten:")
    for name, text in about.items():
        print(f"  {folder.resolve() / name}  {text}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
