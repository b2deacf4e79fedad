"""Files of a measured job: costs of four equal layers, and a plan with a replica on each of four ranks."""

import json

import pytest

LAYER = {
    "forward_s": [1e-3, 2e-3],
    "backward_s": [1e-3, 4e-3],
    "backward_input_s": [5e-4, 2e-3],
    "optimizer_s": 1e-4,
    "parameter_bytes": 1e5,
    "state_bytes": 2e5,
    "saved_bytes_per_sample": 1e4,
    "boundary_bytes_per_sample": 1e4,
    "frozen_bytes": 0.0,
}
GROUPS = [
    {"share": 16, "micro_batch": 4, "zero": 0, "stages": [{"ranks": [rank], "layers": [[0, 4]]}]}
    for rank in range(4)
]
PLAN = {"global_batch": 64, "seq_len": 8, "precision": "fp32", "groups": GROUPS}


@pytest.fixture
def measured_job(tmp_path):
    """Return what writes costs, of devices so many times slower, and a plan, and gives the two files."""

    def write(**slow):
        costs = {
            "schema_version": 1,
            "kind": "measured costs",
            "clock": "cpu",
            "layers": [LAYER] * 4,
            "devices": slow,
            "spread": [0.95, 1.05],
            "tokens_per_sample": 8,
            "samples": [1, 4],
        }
        (tmp_path / "costs.json").write_text(json.dumps(costs))
        (tmp_path / "plan.json").write_text(json.dumps(PLAN))
        return str(tmp_path / "costs.json"), str(tmp_path / "plan.json")

    return write
