"""A link between two ranks that live is lost: one stays out, the others train on, no sample is lost."""

import json
import subprocess
import time

import pytest
from small_files import SLOW_JOB

from foreshard.lab.lab import Lab
from foreshard.lab.network import LabNetwork, missing
from foreshard.runtime.membership.agent import Agent
from foreshard.runtime.membership.secret import make_secret
from foreshard.runtime.records.outcome import outcome_of
from foreshard.runtime.run_settings import RunSettings
from foreshard.spec.plan_file import parse_plan

LACKS = missing()
STEPS, DETECT_S = 30, 1.5
PLAN = parse_plan(
    {
        "global_batch": 3,
        "seq_len": 8,
        "precision": "fp32",
        "groups": [
            {"share": 1, "stages": [{"ranks": [rank], "layers": [[0, 2]], "zero": 0}]} for rank in range(3)
        ],
    }
)


@pytest.mark.skipif(LACKS is not None, reason=f"no network namespaces here: {LACKS}")
def test_one_end_of_a_lost_link_stays_out(tmp_path):
    (tmp_path / "job.py").write_text(SLOW_JOB)
    ranks, out = range(3), tmp_path / "run"
    out.mkdir()
    lab = Lab(clock="wall", slow=(1.0,) * 3, devices=("cpu",) * 3, bandwidth_bytes_per_s=1e8, latency_s=1e-4)
    cut_s = []
    with LabNetwork(lab) as bed:
        work = RunSettings(
            job=str(tmp_path / "job.py"), out=str(out), steps=STEPS, detect_s=DETECT_S, interface=bed.address
        )
        agent = Agent(
            out=out,
            plan=PLAN,
            work=work,
            ranks=ranks,
            expected=ranks,
            secret_file=make_secret(out / "secret"),
            address=bed.address,
            command=bed.command,
        )

        def cut():
            """Let nothing pass between ranks 1 and 2 from the fifth step on."""
            if not cut_s and (out / "metrics.jsonl").exists():
                if len((out / "metrics.jsonl").read_text().splitlines()) < 5:
                    return
                for here, there in ((1, 2), (2, 1)):
                    subprocess.run(
                        [
                            "ip",
                            "-n",
                            bed._space(here),
                            "route",
                            "add",
                            "blackhole",
                            bed.address_of(there) + "/32",
                        ],
                        check=True,
                    )
                cut_s.append(time.time())

        restarts = agent.run(cut)
    found = outcome_of(out, global_batch=3, steps=STEPS, restarts=restarts)
    assert (found.steps, found.lost, found.repeated, restarts) == (STEPS, 0, 0, 0)
    told = [json.loads(line) for line in (out / "supervisor.jsonl").read_text().splitlines()]
    suspected = [line for line in told if line["kind"] == "link suspected"]
    assert suspected and suspected[0]["rank"] in (1, 2)
    assert suspected[0]["time"] - cut_s[0] < 60  # two failures, of up to five timeouts of a connection each
