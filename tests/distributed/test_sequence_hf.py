"""Models of transformers whose stream lies cut over the sequence: gradients and losses of one process."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
torch = pytest.importorskip("torch")
pytest.importorskip("transformers", exc_type=ImportError)

from rehearsal import plan_of, rehearse, values, worst_error
from test_tensor import parts, whole
from test_tensor_hf import CUT, Lines, job

from foreshard.lab.lab import Lab
from foreshard.predict.measured.costs import MeasuredCosts, load_costs
from foreshard.predict.measured.engine import predict_measured
from foreshard.profile.calibration import calibrate
from foreshard.profile.layer_times import profile_layers, write_profile
from foreshard.runtime.engine.executor import through
from foreshard.runtime.gradient_check import gradient_error
from foreshard.runtime.job import hf_split
from foreshard.runtime.tensor.single_rank import TensorPart
from foreshard.spec.plan import Plan


def plan(*stages: tuple, sp: bool = True, more: dict | None = None, beside: int | None = None) -> Plan:
    """A pipeline, and a replica of one rank beside it."""
    share = 6 if beside is None else 4
    groups = [{"share": share, "micro_batch": 2, "sp": sp, "stages": stages, **(more or {})}]
    if beside is not None:
        groups.append({"share": 2, "micro_batch": 1, "stages": [([beside], [[0, 4]])]})
    return plan_of(groups, global_batch=6)


TP2 = {"tp": 2}
PLANS = {
    "four ranks": plan(([0, 1, 2, 3], [[0, 4]], {"tp": 4})),
    "before one rank, beside one": plan(([0, 1], [[0, 2]], TP2), ([2], [[2, 4]]), beside=3),
    "behind one rank, beside one": plan(([3], [[0, 2]]), ([0, 1], [[2, 4]], TP2), beside=2),
    "two stages hand on parts, zb-h1": plan(
        ([0, 1], [[0, 2]], TP2), ([2, 3], [[2, 4]], TP2), more={"schedule": "zb-h1"}
    ),
    "interleaved, recomputed": plan(
        ([0, 1], [[0, 1], [2, 3]], {**TP2, "recompute": "full"}),
        ([2, 3], [[1, 2], [3, 4]], {**TP2, "recompute": "full"}),
        more={"schedule": "interleaved", "micro_batch": 3},
    ),
    "two parts of the data, zero 2": plan(([0, 1, 2, 3], [[0, 4]], {**TP2, "zero": 2})),
}
WHOLE = {"tp 2": plan(([0, 1], [[0, 4]], TP2), sp=False), "alone": plan(([0], [[0, 4]]), sp=False)}
DROPS = {"gpt2": {}, "phi3": {"resid_pdrop": 0.2}, "gpt_neox": {"hidden_dropout": 0.2}}


@pytest.mark.parametrize("name", PLANS)
def test_a_gpt2_that_drops_out_is_exact(name: str) -> None:
    """It does so behind the embedding, in attention and behind every product, a tenth by default."""
    assert gradient_error(job("gpt2"), PLANS[name]) <= 1e-12


@pytest.mark.parametrize("name", ["before one rank, beside one", "two stages hand on parts, zb-h1"])
def test_a_llama_is_exact(name: str) -> None:
    assert gradient_error(job("llama", attention_dropout=0.2), PLANS[name]) <= 1e-12
    assert gradient_error(job("llama", tie_word_embeddings=True, vocab_size=33), PLANS[name]) <= 1e-12


@pytest.mark.parametrize("kind", sorted(set(CUT) - {"gpt2", "llama"}))
def test_every_other_type_is_exact(kind: str) -> None:
    assert gradient_error(job(kind, **DROPS.get(kind, {})), PLANS["behind one rank, beside one"]) <= 1e-12


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_single_precision(kind: str) -> None:
    assert gradient_error(job(kind, torch.float32), PLANS["four ranks"]) <= 1e-6


def test_blocks_have_their_part_only(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = []

    def spied(layer: Any, hidden: Any, run: Any = hf_split.BlockLayer.forward) -> Any:
        lengths.append(hidden.shape[1])
        return run(layer, hidden)

    monkeypatch.setattr(hf_split.BlockLayer, "forward", spied)
    rehearse(job("llama"), PLANS["four ranks"], steps=1, ranks=range(4))
    assert set(lengths) == {2}


def test_live_changes_keep_losses_and_parameters() -> None:
    names = ["tp 2", "four ranks", "two stages hand on parts, zb-h1", "alone", "before one rank, beside one"]
    plans = {**PLANS, **WHOLE}
    losses, last = rehearse(job("gpt2"), plans["alone"], steps=9, after=values)[0]
    changes = {1 + 2 * number: plans[name] for number, name in enumerate(names[1:])}
    found = rehearse(job("gpt2"), plans[names[0]], steps=9, changes=changes, after=parts, ranks=range(4))
    assert found[0][0] == pytest.approx(losses, rel=1e-9)
    assert worst_error(whole(found), last) <= 1e-9


def test_the_virtual_clock_takes_as_long_as_for_whole_sequences() -> None:
    """Putting together and cutting sums are the two halves of the ring that sums."""
    lab = Lab(
        clock="table",
        slow=(1.0, 2.0),
        devices=("a", "b"),
        bandwidth_bytes_per_s=2e7,
        latency_s=3e-4,
        table_s={"forward": 1e-3, "backward": 2e-3, "optimizer": 5e-4},
    )
    took = []
    for sp in (True, False):
        told = plan(([0, 1], [[0, 4]], TP2), sp=sp)
        rehearse(job("llama"), told, steps=1, clock=lambda: lab.make_clock([0]), on_step=lambda: took.append)
    assert took[0].time_s == pytest.approx(took[-1].time_s, rel=1e-9)


EVEN = Lab(
    clock="table",
    slow=(1.0,) * 4,
    devices=("a",) * 4,
    bandwidth_bytes_per_s=2e7,
    latency_s=3e-4,
    table_s={"forward": 1e-3, "backward": 2e-3, "optimizer": 5e-4},
)


@pytest.fixture(scope="module")
def costs(tmp_path_factory: pytest.TempPathFactory) -> MeasuredCosts:
    """Layers of a Llama by the lab's table, their bytes as profiled."""
    file, told, cpu = tmp_path_factory.mktemp("costs") / "costs.json", job("llama"), torch.device("cpu")
    made = profile_layers(
        told,
        samples=(1, 2),
        repeats=1,
        out=None,
        device=cpu,
        through=through,
        parts={2: partial(TensorPart, told, 2, cpu)},
    )
    write_profile(file, calibrate(made, clock="cpu", slow={"a": 1.0}, table_s=EVEN.table_s))
    return load_costs(str(file))


@pytest.mark.parametrize(
    "told",
    [
        plan(([0, 1], [[0, 4]], TP2)),
        plan(([0, 1], [[0, 2]], TP2), ([2, 3], [[2, 4]], TP2)),
        plan(([0, 1], [[0, 2]], TP2), ([2], [[2, 4]])),
        plan(([2], [[0, 1]]), ([0, 1], [[1, 4]], TP2)),
    ],
    ids=["one stage", "two that hand on parts", "before one rank", "behind one rank"],
)
def test_what_is_predicted_is_what_a_run_takes(costs: MeasuredCosts, told: Plan) -> None:
    """On the virtual clock; that layers do a little less of what is no product is not in it."""
    took: list[float] = []
    rehearse(
        job("llama"),
        told,
        steps=2,
        clock=lambda: EVEN.make_clock([0]),
        on_step=lambda: lambda done: took.append(done.time_s),
    )
    found = predict_measured(costs, EVEN.cluster(), told)
    assert took[1] == pytest.approx(found.step_time_s, rel=1e-9)
    assert any(text.startswith("sp:") for text in found.assumptions)


def test_sequences_that_do_not_come_out_even_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    seven = lambda self, index: torch.arange(8)  # noqa: E731
    monkeypatch.setattr(Lines, "__getitem__", seven)
    with pytest.raises(RuntimeError, match="a sequence of 7 cannot be cut over 2 ranks"):
        gradient_error(job("gpt2"), plan(([0, 1], [[0, 4]], TP2)))
