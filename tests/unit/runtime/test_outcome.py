"""What is said of a run when it ends, by the files in its folder."""

from __future__ import annotations

from pathlib import Path

from foreshard.catalog.models import load_model
from foreshard.runtime.membership.supervisor_state import SupervisorState, save_state
from foreshard.runtime.records.outcome import outcome_of
from foreshard.spec.degrees import plan_from_degrees


def test_ranks_that_stayed_away_are_named_though_the_plan_file_is_gone(tmp_path: Path) -> None:
    """Somebody may have removed the folder while the run trained: its end is said all the same."""
    plan = plan_from_degrees(
        load_model("gpt2").num_layers, 2, dp=2, micro_batch=1, global_batch=4, seq_len=16
    )
    save_state(tmp_path, SupervisorState(plan=plan.to_dict(), expected=[0, 1], ranks=[0], over=True))
    found = outcome_of(tmp_path, global_batch=4, steps=0, restarts=0)
    assert found.absent == (1,)
