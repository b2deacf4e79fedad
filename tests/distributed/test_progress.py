"""A rank that hangs is named and restarted; one that is only slow is left in peace."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from command import RANK, events, pipeline, replicas, run

SLOW_LAYER = """
class Slow(nn.Linear):
    def forward(self, x):
        time.sleep(1.2)
        return super().forward(x)
def model(): return [nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), Slow(4, 1)]
"""
SLOW_READ = """
class Rows:
    def __len__(self): return 100
    def __getitem__(self, index):
        if index % 7 == 0: time.sleep(2.5)
        return torch.full((4,), index / 100)
def dataset(): return Rows()
"""


def hanging(once: bool, how: str) -> str:
    """Return a loss that hangs from the fifth call on, once in a run or whenever it is called."""
    return f"""
calls = []
def loss(output, batch):
    calls.append(1)
    mark = Path(os.environ["MARK"])
    if len(calls) == 5 and {RANK} == 1 and not ({once} and mark.exists()):
        mark.touch()
        {how}
    return output.square().sum(), len(output)
"""


LOOP = "while True: pass"
LOCK = "import threading; lock = threading.Lock(); lock.acquire(); lock.acquire()"
HELD = "import re; re.match('(a+)+$', 'a' * 64 + 'b')"  # in C: no other thread of Python runs meanwhile
"""Ways to hang."""


@pytest.mark.parametrize(
    ("parts", "plan"),
    [
        pytest.param({"model": SLOW_LAYER}, pipeline(), marks=pytest.mark.slow),
        pytest.param({"dataset": SLOW_READ}, replicas(2), marks=pytest.mark.slow),
    ],
    ids=["a slow last stage", "slow reads"],
)
def test_a_slow_rank_is_never_suspected(tmp_path: Path, parts: dict[str, str], plan: object) -> None:
    found = run(tmp_path, parts, plan, "--steps", "3", "--detect-s", "1")
    assert found.code == 0, found.stderr
    kinds = ["peer gone", "stuck", "link suspected", "rank lost", "rank silent", "rank hangs", "rebuilt"]
    assert not events(found, kinds)


@pytest.mark.parametrize(
    "how", [LOCK, pytest.param(HELD, marks=pytest.mark.slow)], ids=["a lock", "inside of C"]
)
def test_who_hangs_is_named_and_restarted_and_no_sample_is_lost(tmp_path: Path, how: str) -> None:
    more = {"environment": {"MARK": str(tmp_path / "mark")}}
    flags = ["--steps", "12", "--detect-s", "2", "--progress-s", "3"]
    found = run(tmp_path, {"loss": hanging(True, how)}, replicas(2), *flags, **more)
    assert found.code == 0, found.stderr
    assert sorted(found.losses) == list(range(12))
    log = (found.out / "logs" / "rank-1.log").read_text()
    assert "in loss" in log, "its stack"
    if how is not HELD:
        hangs = events(found, ["rank hangs"])
        assert [line["rank"] for line in hangs] == [1]
        assert "loss in job.py, line" in hangs[0]["where"]
        assert "rank 1 hangs" in found.stderr, "said at once on the terminal"


@pytest.mark.slow
def test_a_run_that_hangs_for_ever_ends_by_name(tmp_path: Path) -> None:
    more = {"environment": {"MARK": str(tmp_path / "mark")}, "within_s": 180.0}
    always = hanging(False, LOOP).replace("== 5 and", ">= 3 and").replace(f"{RANK} == 1", "True")
    flags = ["--steps", "12", "--detect-s", "2", "--progress-s", "3"]
    found = run(tmp_path, {"loss": always}, replicas(2), *flags, **more)
    assert found.code == 1
    assert "hangs in" in found.stderr and "loss in job.py" in found.stderr
