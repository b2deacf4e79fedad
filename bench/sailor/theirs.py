"""Sailor's own simulator from a checkout of eth-easl/sailor, fed with plans of ours; none of it is copied.

The checkout needs `sailor/` of the repository only; importing it takes torch, numpy and pandas.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from judge import Group

ZONE = "us-central1-a"


class Theirs:
    """Their simulator on their OPT-350M profile."""

    def __init__(self, checkout: Path) -> None:
        root = checkout.resolve() / "sailor"
        home = Path(tempfile.mkdtemp())
        (home / "sailor").symlink_to(checkout.resolve())
        sys.path.insert(0, os.fspath(checkout.resolve()))
        from sailor.Planner.simulations import runtime_simulator

        def load(name: str) -> Any:
            return json.loads((root / "Planner" / name).read_text())

        self._module = runtime_simulator
        self._times = load("simulations/profiles_tmp.json")["OPT-350"]
        self._simulator = runtime_simulator.Simulator(
            os.fspath(home),
            load("simulations/configs/training_config_opt_350.json"),
            load("llm_info.json"),
            False,
            load("simulations/profiles_tmp.json"),
            zone=ZONE,
        )

    def fits(self, groups: tuple[Group, ...]) -> bool:
        """Return whether every group passes their memory check."""
        return all(
            self._quiet(self._simulator.check_config_fits, _plan([group], group.micro_batch))
            for group in groups
        )

    def simulate(self, groups: tuple[Group, ...]) -> float:
        """Return the seconds of a plan by `simulate_iteration_time`, whole: micro-batches must be alike.

        Several groups are as many of their pipelines.
        """
        plan = _plan(list(groups), groups[0].micro_batch)
        return self._quiet(self._simulator.simulate_iteration_time, plan)[0]

    def seconds(self, groups: tuple[Group, ...]) -> float:
        """Return `get_time_per_pipeline` of the slowest group and `estimate_sync_time` over all replicas.

        Their two functions, called as `simulate_iteration_time` calls them but for each group's own
        micro-batches. All replicas must cut alike: then they are one pipeline of theirs.
        """
        slowest = max(self._pipeline_s(group) for group in groups)
        everyone = Group(tuple(r for group in groups for r in group.replicas), groups[0].micro_batch, 1)
        return slowest + self._sync_s([everyone])

    def apart(self, groups: tuple[Group, ...]) -> float:
        """Return the same with each group a pipeline of its own, all-reduced by their rule for those."""
        return max(self._pipeline_s(group) for group in groups) + self._sync_s(list(groups))

    def _pipeline_s(self, group: Group) -> float:
        plan = self._convert([group], group.micro_batch)
        times = [self._layers(group.micro_batch, column) for column in range(3)]
        sizes = self._simulator.activation_sizes_per_layer
        return self._quiet(
            self._simulator.get_time_per_pipeline,
            plan.pipeline_list[0],
            group.micro_batch,
            *times,
            sizes,
            group.rounds,
        )

    def _sync_s(self, groups: list[Group]) -> float:
        return self._quiet(self._simulator.estimate_sync_time, self._convert(groups, 1))

    def _layers(self, micro_batch: int, column: int) -> dict:
        sized = {gpu: rows[str(micro_batch)] for gpu, rows in self._times.items() if str(micro_batch) in rows}
        return {
            gpu: {int(tp): [value[column] for value in layers.values()] for tp, layers in rows.items()}
            for gpu, rows in sized.items()
        }

    def _convert(self, groups: list[Group], micro_batch: int) -> Any:
        return self._quiet(
            self._module.convert_homogeneous, _plan(groups, micro_batch), self._simulator.training_config
        )

    @staticmethod
    def _quiet(call: Any, *arguments: Any) -> Any:
        with contextlib.redirect_stdout(io.StringIO()):
            return call(*arguments)


def _plan(groups: list[Group], micro_batch: int) -> dict:
    """Return a plan in the form their planner gives it to their simulator."""
    pipelines = []
    for group in groups:
        stages = list(zip(*group.replicas, strict=True))
        pipelines.append(
            {
                "num_stages": len(stages),
                "layers_per_stage": [list(range(alike[0].start, alike[0].stop)) for alike in stages],
                "tmp_per_stage": [[([(s.gpu, s.tp, ZONE)], s.tp) for s in alike] for alike in stages],
                "dp": [len(alike) for alike in stages],
            }
        )
    return {"pipeline_list": pipelines, "mbs": micro_batch}
