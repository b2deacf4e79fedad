"""What may be asked of a traced module, as a request that can be changed, and the plan that it means."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

from foreshard.advise.request import ASKED, DEGREES, OPTIONS, Request, check_beside, flag_of, set_in_plan
from foreshard.catalog.frameworks import load_framework
from foreshard.catalog.offers import Offers
from foreshard.errors import SpecError
from foreshard.predict.measured.traced_step import FRAMEWORK, STATED_DEGREES, plan_of
from foreshard.predict.tasks.kernels import KERNELS
from foreshard.spec.codec import whole
from foreshard.spec.plan import COMM_OPTIONS
from foreshard.spec.variation import Noise

if TYPE_CHECKING:
    from foreshard.catalog.prices import Prices
    from foreshard.predict.measured.costs import MeasuredCosts
    from foreshard.predict.measured.lowering import MeasuredStep
    from foreshard.sim.critical_path import TaskTimes
    from foreshard.spec.cluster import Cluster
    from foreshard.spec.framework import Framework
    from foreshard.spec.plan import Plan
    from foreshard.spec.prediction import Prediction
    from foreshard.spec.timeline import Timeline
    from foreshard.spec.traced_module import TracedModule

PREDICTS = {
    *("model", "cluster", "plan", "zero", "precision", "engine", "costs", "fidelity", *STATED_DEGREES),
    *("tokens", "prices", "usd_per_device_hour", "observed_step_s", "calibration", "forward_only"),
    *(one.name for one in fields(Noise)),
}
"""Names of what a prediction takes."""
CHANGES = {*STATED_DEGREES, "zero", "precision", "shares"}
"""Names of what a change may set, besides the hardware."""
SPEEDS = (
    *("compute", "recompute", "tensor_comm", "pipeline_comm", "data_comm", "optimizer", "host"),
    *KERNELS,
)
"""Parts of a step and classes of kernels that a change may make faster."""
OFFERS = Offers(
    zero=(0, 1, 2, 3),
    degrees=("tp", "pp"),
    recompute=("none", "full", "every"),
    narrower=("tf32", "bf16", "fp16"),
)
"""What a run of a traced module lets its user choose."""
_SWITCHES = {"sp", "compile", "lora", *COMM_OPTIONS}
"""What other models have besides, which a change may set to off."""
PLANS = {
    *("global_batch", "precision", "optimizer", "top", "budget_s", "engine", "objective", "max_tp"),
    *("prices", "usd_per_device_hour", "costs", "calibration"),
}
"""Names of what a search takes."""
_ARGUMENTS = {"model", "cluster"}
_ELSEWHERE = {*OPTIONS, *ASKED}
"""Options of other models, which may be stated to be off."""
_ALIKE: Mapping[str, Any] = dict.fromkeys((one.name for one in fields(Noise)), None)
"""Choices of a run whose ranks are alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedRequest:
    """A traced module to predict, so that one thing in it can be changed.

    `trace` returns the module for a precision and degrees of tensor parallelism, `predicted` its prediction
    on a cluster under a plan, or else under stated choices.
    """

    trace: Callable[[str, tuple[int, ...]], TracedModule]
    predicted: Callable[[TracedModule, Cluster, Plan | None, Mapping[str, Any]], Prediction]
    cluster: Cluster
    choices: Mapping[str, Any] = field(default_factory=dict)  # degrees and options stated, of `PREDICTS`
    plan: Plan | None = None  # in place of degrees and options
    prices: Prices | None = None  # for what a change brings; the cluster has them already
    speeds: Mapping[str, float] = field(default_factory=dict)  # of parts of the step, a question of what if
    trial_engine: ClassVar[str] = "graph"
    """The engine to try changes with."""

    @property
    def observed_step_s(self) -> float | None:
        """One measured step, which corrects the prediction."""
        return self.choices.get("observed_step_s")

    def observing(self, step_s: float | None) -> TracedRequest:
        """Return the request with another measured step, or none."""
        return replace(self, choices={**self.choices, "observed_step_s": step_s})

    @property
    def usd_per_device_hour(self) -> float | None:
        """The price that was stated in place of the cluster's."""
        return self.choices.get("usd_per_device_hour")

    @property
    def engine(self) -> str:
        """The engine that was asked for."""
        return self.choices.get("engine") or "graph"

    @property
    def framework(self) -> Framework:
        """The framework whose words for options are taken."""
        return load_framework(FRAMEWORK)

    def with_choice(self, name: str, value: Any) -> TracedRequest:
        """Return the request with one degree or option set, in the flags or in every group of the plan."""
        if self.plan is None:
            return replace(self, choices={**self.choices, name: value})
        return replace(self, plan=set_in_plan(self.plan, name, value))

    def predict(self, engine: str | None = None) -> Prediction:
        """Return the prediction, under another engine when one is named."""
        if engine not in (None, self.engine):  # other engines have one rank for all that are alike
            return replace(self, choices={**self.choices, **_ALIKE, "engine": engine}).predict()
        choices = {**self.choices, "speeds": self.speeds} if self.speeds else self.choices
        return self.predicted(self.module, self.cluster, self.plan, choices)

    @property
    def module(self) -> TracedModule:
        """The module as it is traced for the prediction."""
        traced = traced_as(self.plan, self.cluster, self.choices)
        return self.trace(traced["precision"], tuple(sorted(traced["degrees"])))

    def alone(self, plan: Plan) -> TracedRequest:
        """Return the request for another plan on the same cluster, without what differs among ranks."""
        kept = {name: self.choices.get(name) for name in ("engine", "fidelity", "calibration")}
        return replace(self, plan=plan, choices=kept)

    def predict_timeline(self) -> tuple[Prediction, Timeline]:
        """Return the prediction and when each task of its step runs."""
        from foreshard.predict.measured.tasks import timeline

        made = self.predict()
        step, times = self.executed(made.plan)
        return made, timeline(step, made.plan, times, made.step_time_distribution)

    def executed(self, plan: Plan) -> tuple[MeasuredStep, TaskTimes]:
        """Return the tasks of a step and when they run."""
        from foreshard.predict.measured.engine import executed

        return executed(self._costs(plan), self.cluster, plan, self.engine)

    def stage_memory(self) -> tuple[tuple[dict[str, float], ...], ...]:
        """Return the parts of the peak memory of each stage of each group, bytes."""
        from foreshard.predict.measured.memory import stage_parts

        plan = self.plan or plan_of(self.module, self.cluster, self.choices)
        return stage_parts(self._costs(plan), plan)

    def _costs(self, plan: Plan) -> MeasuredCosts:
        from foreshard.predict.measured.traced import costs_under

        fidelity = self.choices.get("fidelity") or "zero-shot"
        calibration = self.choices.get("calibration")
        slower = None if calibration is None else calibration.of_operations
        return costs_under(
            self.module, self.cluster, plan, fidelity=fidelity, speeds=self.speeds, slower=slower
        )

    def compare(self) -> tuple[Prediction, ...]:
        """Return the predictions under both engines that take operations of a trace."""
        request = replace(self, choices={**self.choices, **_ALIKE})
        return tuple(request.predict(engine) for engine in ("graph", "event"))


Asked = Request | TracedRequest
"""A run that may be changed and predicted: of a model of layers, or of what is traced."""


def check_predicts(values: Mapping[str, Any]) -> None:
    """Raise SpecError for what a prediction of a traced module does not take."""
    _reject_unknown({name: value for name, value in values.items() if name != "speeds"}, PREDICTS)
    _check_costs(values)


def _check_costs(values: Mapping[str, Any]) -> None:
    if values.get("costs") not in (None, "auto", "formula"):
        raise SpecError(
            f"costs {values['costs']} of a traced module",
            key="--costs",
            value=values["costs"],
            rule="Operations of a traced module are priced by formulas",
            fix="Leave out --costs, or give the file that calibrate writes of measured steps or of a profile",
        )


def check_plans(values: Mapping[str, Any]) -> None:
    """Raise SpecError for what a search of plans of a traced module does not take."""
    _reject_unknown(values, PLANS)
    _check_costs(values)
    only = {"engine": ("graph", ("graph",)), "objective": ("time", ("time", ("time",), ()))}
    for name, (taken, same) in only.items():
        value = values.get(name)
        if value is not None and value not in same:
            shown = value if isinstance(value, str) else ",".join(value)
            rule = f"Plans of traced modules are compared by {name} {taken}"
            what = f"{name} {shown} for a traced module"
            raise SpecError(what, key=flag_of(name), value=shown, rule=rule, fix="Leave it out")


def traced_as(plan: Plan | None, cluster: Cluster, stated: Mapping[str, Any]) -> dict[str, Any]:
    """Return how a module is traced for a prediction on a cluster, as a plan or else what is stated says.

    Raises
    ------
    SpecError
        For degrees and options beside a plan.
    """
    check_beside(plan, {name: stated[name] for name in (*DEGREES, *OPTIONS) if name in stated})
    if plan is not None:
        tp = {stage.tp for group in plan.groups for stage in group.stages}
        return {"precision": plan.precision, "degrees": tp}
    tp = {1 if stated.get("tp") is None else whole(stated["tp"], key="--tp", name="tp")}
    return {"precision": _precision(cluster, stated), "degrees": tp}


def searched_as(cluster: Cluster, stated: Mapping[str, Any]) -> dict[str, Any]:
    """Return how a module is traced for a search of plans on a cluster."""
    return {"precision": _precision(cluster, stated), "degrees": degrees_on(cluster, stated.get("max_tp"))}


def _precision(cluster: Cluster, stated: Mapping[str, Any]) -> str:
    """Return the precision that is stated, else one of all devices; several as one text, which is refused."""
    given = stated.get("precision") or cluster.default_precision()
    return ",".join(given) if isinstance(given, tuple | list) else given


def degrees_on(cluster: Cluster, max_tp: Any) -> list[int]:
    """Return the tensor parallelism that a search tries: powers of two up to the devices of a node."""
    most = max(nodes.per_node for nodes in cluster.nodes)
    most = most if max_tp is None else min(most, whole(max_tp, key="--max-tp", name="tp"))
    return [2**power for power in range(1, most.bit_length())]


def check_change(key: str, value: str) -> None:
    """Raise SpecError for a change that a prediction of a traced module does not take."""
    same = key in _SWITCHES and value.lower() in ("off", "none", "no", "false")
    faster = key.startswith("speed_") and key.removeprefix("speed_") in SPEEDS
    if key not in CHANGES and not same and not faster and (key, value) != ("framework", FRAMEWORK):
        shown, *known = (flag_of(one).removeprefix("--") for one in (key, *sorted(CHANGES)))
        rule = f"Of a traced module may be changed {', '.join(known)}"
        what = f"{shown} is not taken for a traced module"
        fix = "Leave it out, or change device, nodes, nic, link, memory-bandwidth or a speed-PART"
        raise SpecError(what, key=f"--change {shown}", value=value, rule=rule, fix=fix)


def _reject_unknown(values: Mapping[str, Any], known: set[str]) -> None:
    """Raise SpecError for a name that is not known.

    Options of other models may be stated where they change nothing: as off, or the framework as what it is.
    """
    for name, value in values.items():
        off = value is False or (isinstance(value, str) and value == "none")
        same = off or (name == "framework" and value == FRAMEWORK)
        if name not in known and value is not None and not (same and name in _ELSEWHERE):
            flag = flag_of(name)
            rule = f"A traced module takes {', '.join(sorted(map(flag_of, known - _ARGUMENTS)))}"
            what = f"{flag} is not taken for a traced module"
            raise SpecError(what, key=flag, value=str(value), rule=rule, fix="Leave it out")
