"""The norm of a large gradient: single precision sums lose what a long sum adds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from foreshard.runtime.engine.clock import Clock
from foreshard.runtime.engine.update import Update
from foreshard.runtime.run_settings import Options


def bucket(flat: Any, *owners: int) -> SimpleNamespace:
    return SimpleNamespace(flat=flat, owners=owners)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_square_of_large_buckets(dtype: Any) -> None:
    own = torch.randn(20_000_001, generator=torch.Generator().manual_seed(1)).to(dtype)
    other = torch.ones(10, dtype=dtype)
    state: Any = SimpleNamespace(rank=1, buckets=[bucket(own, 1, 2), bucket(other, 0, 1), bucket(other, 1)])
    job: Any = None
    found = Update(job, Options(track_norm=True), Clock()).square_norm(state)
    assert found == pytest.approx(float(own.double().square().sum()) + 10.0, rel=1e-4)


def test_no_bucket_has_no_norm() -> None:
    state: Any = SimpleNamespace(rank=1, buckets=[])
    job: Any = None
    assert Update(job, Options(track_norm=True), Clock()).square_norm(state) == 0.0
