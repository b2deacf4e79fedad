"""Training that ends and begins again elsewhere, under another plan, is training that never ended."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import small_jobs
from rehearsal import rehearse, values, worst_error
from small_jobs import JOBS
from small_plans import ALONE, PLANS

from foreshard.errors import SpecError
from foreshard.runtime.membership.fixed_membership import FixedMembership
from foreshard.runtime.trainer import Options, Trainer

BEFORE_AND_AFTER = [
    ("sharded pipeline with recompute, zero 3", "uneven replicas"),
    ("uneven replicas", "three ranks sharded whole beside one, zero 3"),
    ("interleaved", "four ranks in a stage, zero 1"),
    ("two uneven pipelines", "many micro-batches"),
]


@pytest.mark.parametrize(("before", "after"), BEFORE_AND_AFTER)
@pytest.mark.parametrize("job", JOBS)
def test_a_run_goes_on_from_its_checkpoint_under_another_plan(
    job: str, before: str, after: str, tmp_path: Path
) -> None:
    options, double = Options(checkpoint_every=3), torch.float64
    whole = rehearse(JOBS[job](double), ALONE, steps=10, after=values)[0]
    more = {"options": options, "checkpoints": tmp_path, "ranks": range(4)}
    first = rehearse(JOBS[job](double), PLANS[before], steps=7, **more)
    second = rehearse(JOBS[job](double), PLANS[after], steps=4, after=values, resume=True, **more)
    assert first[0][0] == pytest.approx(whole[0][:7], rel=1e-12)
    assert second[0][0] == pytest.approx(whole[0][6:], rel=1e-12), "step 6 is the first after the checkpoint"
    assert worst_error(second, whole[1]) <= 1e-9


def test_layers_of_other_shapes_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    more = {"options": Options(checkpoint_every=1), "checkpoints": tmp_path}
    Trainer(JOBS["gpt"](), ALONE, **more).train_step()
    monkeypatch.setattr(small_jobs, "WIDTH", 2 * small_jobs.WIDTH)
    other = FixedMembership(None, 0, ALONE, ALONE.ranks, resume=True)
    trainer = Trainer(JOBS["gpt"](), membership=other, **more)
    with pytest.raises(SpecError, match=r"layers\.\d\.\S+: the checkpoint has shape \[.+the job has \["):
        trainer.train_step()
