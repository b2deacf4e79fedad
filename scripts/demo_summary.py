"""Write the headline of the demo, and say where its files are."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median


def trained(folder: Path, job: str) -> dict:
    """Return what was predicted and measured of the run on the lab, with the plan and with an even split."""
    from foreshard.runtime import gradient_error
    from foreshard.runtime.job.job import load_job
    from foreshard.runtime.records.outcome import kept_steps, settled_times
    from foreshard.spec.plan_file import load_plan

    predicted = json.loads((folder / "job_prediction.json").read_text(encoding="utf-8"))
    planned, even = (kept_steps(folder / run / "metrics.jsonl") for run in ("run", "run_even"))
    return {
        "predicted_step_time_s": predicted["step_time_s"],
        "predicted_step_time_interval_s": predicted["step_time_interval_s"],
        "measured_step_time_s": median(settled_times(planned)),
        "even_split_step_time_s": median(settled_times(even)),
        "clock": planned[-1]["clock"],
        "gradient_max_rel_error": gradient_error(load_job(job), load_plan(str(folder / "job_plan.json"))),
        "job": job,
        "shares": [group["share"] for group in predicted["plan"]["groups"]],
    }


def headline(summary: dict) -> str:
    """Return the lines that compare prediction, measurement and the even split."""
    predicted, measured, even = (
        1e3 * summary[f"{name}_step_time_s"] for name in ("predicted", "measured", "even_split")
    )
    return (
        f"\nTrained {summary['job']} on the lab ({summary['clock']} clock):\n"
        f"  planned  {measured:.0f} ms a step measured, {predicted:.0f} ms predicted "
        f"({100 * (predicted / measured - 1):+.1f} %)\n"
        f"  even     {even:.0f} ms a step measured: {even / measured:.2f} times as long\n"
        f"  gradients differ from one process by {summary['gradient_max_rel_error']:.1e} at most"
    )


def main(folder: Path, job: str) -> None:
    """Write summary.json beside the predictions of the run stated and of the plan found."""
    prediction = json.loads((folder / "prediction.json").read_text(encoding="utf-8"))
    planned = json.loads((folder / "plan_prediction.json").read_text(encoding="utf-8"))
    summary = {
        "schema_version": 1,
        "model": prediction["model"],
        "cluster": prediction["cluster"],
        **(training := trained(folder, job)),
        "stated": {
            "predicted_step_time_s": prediction["step_time_s"],
            "predicted_step_time_interval_s": prediction["step_time_interval_s"],
            "mfu": prediction["mfu"],
            "peak_bytes": prediction["memory"]["peak_bytes"],
            "capacity_bytes": prediction["memory"]["capacity_bytes"],
            "usd_per_1b_tokens": prediction["cost"]["usd_per_1b_tokens"],
            "usd_total": prediction["cost"]["usd_total"],
        },
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
        "report.html": "the prediction as a page; opens in any browser, offline",
        "trace.json.gz": "the step, task by task; drop it on ui.perfetto.dev",
        "plan.html": "the plan found for devices of two kinds, drawn, with the bound on all others",
        "plan.json": "that plan; foreshard predict MODEL CLUSTER --plan reads it",
        "plan.txt": "the second table above",
        "plan_prediction.json": "every number of that plan",
        "prediction.json": "every number of the prediction",
        "prediction.txt": "the first table above",
        "job_plan.json": "the plan of the small GPT on the lab, by what was measured of it (job_costs.json)",
        "run": "its training: metrics, events, samples; run_even the same with equal shares",
        "summary.json": "the headline",
    }
    print(headline(training))
    print("\nWritten:")
    for name, text in about.items():
        print(f"  {folder.resolve() / name}  {text}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
