"""`--costs FILE`: predict and plan a model by what was measured of it, without a catalog entry."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from foreshard.cli.options.answer import say
from foreshard.cli.options.varying import NOISE
from foreshard.errors import SpecError
from foreshard.spec.variation import Noise

if TYPE_CHECKING:
    from foreshard.spec.prediction import Prediction

_PREDICTS = {"model", "cluster", "plan", "costs", "tokens", "engine", *NOISE}
_PLANS = {
    "global_batch",
    "seq_len",
    "precision",
    "optimizer",
    "top",
    "budget_s",
    "tokens",
    "costs",
    "engine",
    "objective",
}


def is_file(costs: str | None) -> bool:
    """Return whether a cost source is a file of measured layers: no name, constants or table."""
    from foreshard import api
    from foreshard.catalog.training import CALIBRATED

    known = (CALIBRATED, api.KERNEL_TABLE)
    return costs is not None and api.is_costs_file(costs) and api.costs_kind(costs) not in known


def predict(values: dict[str, Any], others: dict[str, Any]) -> Prediction:
    """Return the prediction of `predict` from measured costs."""
    from foreshard import api

    _reject_unknown({**values, **others}, _PREDICTS)
    _same_model(values["model"], values["costs"])
    if not values.get("plan"):
        raise _refused("no plan", "--plan", None, "Give --plan FILE, or find one with foreshard plan")
    return api.predict_measured(
        values["costs"],
        values["cluster"],
        api.load_plan(values["plan"]),
        tokens=values.get("tokens"),
        engine=values.get("engine") or "graph",
        noise=Noise.stated(values),
    )


def plan(model: str, cluster: str, asked: dict[str, Any], others: dict[str, Any]) -> Any:
    """Return the result of `plan` from measured costs, and the cluster."""
    from foreshard import api

    _reject_unknown({**asked, **others}, _PLANS)
    _same_model(model, asked["costs"])
    if asked.get("engine") not in (None, "graph"):
        raise _refused("another engine than graph", "--engine", asked["engine"], "Leave --engine out")
    if asked.get("objective", ("time",)) != ("time",):
        value, fix = ",".join(asked["objective"]), "Leave --objective out"
        raise _refused("another objective than time", "--objective", value, fix)
    if isinstance(asked.get("precision"), tuple):
        value, fix = ",".join(asked["precision"]), "Give the one that was measured"
        raise _refused("several precisions", "--dtype", value, fix)
    chosen = {
        name: asked[name] for name in ("precision", "optimizer", "top", "budget_s", "tokens") if name in asked
    }
    length = _length(asked.get("seq_len"), asked["costs"])
    return api.plan_measured(
        asked["costs"], cluster, global_batch=asked["global_batch"], seq_len=length, **chosen
    )


def _length(asked: int | None, costs: str) -> int:
    """Return the length that the plan notes: costs hold for samples as they were measured, whatever it is."""
    from foreshard.predict.measured.costs import load_costs

    counted = load_costs(costs).tokens_per_sample
    if asked not in (None, round(counted)):
        say(
            f"--seq {asked} is only noted in the plan: the costs are of samples as long as those that were "
            f"measured, which count {counted:g} each. For others profile the job again."
        )
    return asked or max(1, round(counted))


def _same_model(model: str, costs: str) -> None:
    """Raise for costs of another job, whose prediction would be taken for one of MODEL."""
    from foreshard.predict.measured.costs import load_costs

    measured = load_costs(costs).model
    if Path(model).name != measured:
        rule = f"These costs are of {measured or 'a job without a file'}"
        fix = "Name that job, or profile this one"
        raise SpecError(f"{model} was not measured", key="MODEL", value=model, file=costs, rule=rule, fix=fix)


def _reject_unknown(values: dict[str, Any], known: set[str]) -> None:
    for name, value in values.items():
        if name not in known and value not in (None, False, (), "none"):
            flag = f"--{name.replace('_', '-')}"
            raise _refused(f"{flag} is not taken with measured costs", flag, str(value), "Leave it out")


def _refused(what: str, flag: str, value: str | None, fix: str) -> SpecError:
    return SpecError(
        what, key=flag, value=value, rule="Measured costs price the plan as the runtime runs it", fix=fix
    )
