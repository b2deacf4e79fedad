"""A configuration that its vendor tuned by hand: it lies in the space, and its measured time is near."""

from dataclasses import replace

import numpy as np
import pytest

import foreshard
from foreshard.catalog.frameworks import load_framework
from foreshard.catalog.training import training_constants
from foreshard.planner.grid.bounds import cell_bounds, pass_bounds
from foreshard.planner.grid.space import GridRequest, cells_of, rows_of, shapes_of, with_rules
from foreshard.spec.plan import TABLED

# NVIDIA/dgxc-benchmarking@v25.04 llama3.1/README.md: Llama 3.1 70B in fp8 on 512 H100, 1024 samples of 8192.
MEASURED_S = 10.07
MODEL, CLUSTER, BATCH, SEQ = "llama3-70b", "64x8xh100-sxm", 1024, 8192
DEGREES = {"tp": 4, "pp": 8, "vpp": 5, "micro_batch": 1}
HIDDEN = ("tp_overlap", "grad_overlap", "param_gather_overlap", "p2p_overlap")


def predicted_under(framework):
    return foreshard.predict(
        foreshard.load_model(MODEL),
        foreshard.load_cluster(CLUSTER),
        **DEGREES,
        zero=1,
        schedule="interleaved",
        recompute="none",
        precision="fp8",
        global_batch=BATCH,
        seq_len=SEQ,
        framework=framework,
        engine="graph",
        **dict.fromkeys(HIDDEN, True),
    )


def test_the_measured_time_of_the_published_configuration_lies_in_the_interval():
    predicted = predicted_under("nemo@25.04")  # what it was measured under
    assert predicted.memory.fits
    low_s, high_s = predicted.step_time_interval_s
    assert low_s <= MEASURED_S <= high_s
    assert predicted.step_time_s == pytest.approx(MEASURED_S, rel=0.1)


def test_the_published_configuration_lies_in_the_space_and_above_its_bounds():
    predicted = predicted_under("megatron-core")
    request = GridRequest(
        model=foreshard.load_model(MODEL),
        cluster=foreshard.load_cluster(CLUSTER),
        framework=replace(load_framework("megatron-core"), **dict.fromkeys(HIDDEN, True)),
        constants=training_constants(),
        comm=dict.fromkeys(HIDDEN, True),
        global_batch=BATCH,
        seq_len=SEQ,
        precision="fp8",
    )
    cells = cells_of(request)
    same = [getattr(cells, name) == DEGREES[name] for name in ("tp", "pp", "micro_batch")]
    cell = cells.take(np.flatnonzero(np.logical_and.reduce(same) & (cells.cp == 1)))
    passes, _ = with_rules(request, shapes_of(request, cell))
    chosen = passes.take(np.flatnonzero((passes.vpp == 5) & (passes.sp == 1) & (passes.recompute == 0)))
    rows = rows_of(request, chosen)
    assert passes.rules[0] == "none"
    assert 1 in rows.zero[rows.schedule == TABLED.index("interleaved")]
    assert cell_bounds(request, cell)[0].max() <= predicted.step_time_s
    assert pass_bounds(request, chosen).max() <= predicted.step_time_s
