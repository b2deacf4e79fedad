"""What holds for a whole plan and is searched around the rest: precision, and which communication is hidden.

Every switch has two values, but hiding gradients, weights or messages between stages never lengthens a step
and takes no memory: where these may be switched they are on. Hiding the collectives of tensor parallelism
takes buffers, hiding the messages of experts forbids some recomputation and pipelines, and gathering keys and
values is no shorter than a ring in general: each of these is searched both ways.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

from foreshard.catalog.offers import offers_of
from foreshard.errors import SpecError
from foreshard.planner.pricing.stage_options import splits_sequences
from foreshard.planner.request import PlanRequest
from foreshard.spec.codec import one_of
from foreshard.spec.framework import Framework
from foreshard.spec.plan import COMM_OPTIONS, LOW_PRECISIONS, PRECISIONS

AS_SHIPPED, ALL = "framework", "all"
ALWAYS = ("grad_overlap", "param_gather_overlap", "p2p_overlap", "shared_overlap", "narrow_gather")
"""Switches that are on where they may be set: they never lengthen a step and take no memory."""
_EITHER = ("tp_overlap", "expert_overlap", "context_gather")
"""Switches that are searched on and off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One precision, and the switches of communication that the search set."""

    precision: str
    comm: Mapping[str, bool] = field(default_factory=dict)

    def of(self, request: PlanRequest) -> PlanRequest:
        """Return the request under this setting."""
        if not self.comm:
            return replace(request, precision=self.precision)
        framework = replace(request.framework, **self.comm)  # type: ignore[arg-type]
        return replace(request, precision=self.precision, comm=self.comm, framework=framework)

    def __str__(self) -> str:
        """Return the words of a note."""
        on = [name for name, value in self.comm.items() if value]
        return f"{self.precision} with {', '.join(on)}" if on else self.precision


def checked_precisions(asked: Sequence[str] | str) -> tuple[str, ...]:
    """Return the precisions that may be chosen from, or raise SpecError."""
    names = tuple(asked) if isinstance(asked, tuple | list) else (asked,)
    for name in names or ("",):
        one_of(name, PRECISIONS, key="--dtype", name="dtype", exact=True)
    return tuple(dict.fromkeys(names))


def switches(asked: Sequence[str] | str, framework: Framework) -> tuple[str, ...]:
    """Return the switches of communication that the search may set.

    Parameters
    ----------
    asked : str or sequence of str
        'framework' for none, 'all' for those that the framework ships, or names.
    framework : Framework

    Raises
    ------
    SpecError
        For an unknown name, or one that the framework does not ship.
    """
    names = (asked,) if isinstance(asked, str) else tuple(asked)
    shipped = offers_of(framework).overlaps
    if names in ((AS_SHIPPED,), (ALL,)):
        return shipped if names == (ALL,) else ()
    for name in names or ("",):
        one_of(name, COMM_OPTIONS, key="--comm", name="comm", exact=True)
        if name not in shipped:
            has = ", ".join(shipped) or "none"
            raise SpecError(
                f"{framework.label} has no switch for {name}",
                key="--comm",
                value=name,
                rule="The search sets what the framework lets its user set",
                fix=f"It has: {has}",
            )
    return tuple(name for name in COMM_OPTIONS if name in names)


def settings(request: PlanRequest, precisions: Sequence[str], may: Sequence[str]) -> Iterator[Setting]:
    """Yield what has to be searched so that no other setting holds a better plan, the likeliest first.

    Parameters
    ----------
    request : PlanRequest
    precisions : sequence of str
    may : sequence of str
        Switches of communication that may be set, see `switches`.
    """
    framework, model = request.framework, request.model
    always = {name: True for name in ALWAYS if name in may}
    if not always.get("grad_overlap", framework.grad_overlap):
        always.pop("param_gather_overlap", None)  # weights are gathered bucket by bucket, as gradients are
    degrees = offers_of(framework).degrees
    acts = {
        "tp_overlap": "tp" in degrees,
        "expert_overlap": "ep" in degrees and any(block.num_experts for block in model.blocks),
        "context_gather": "cp" in degrees if len(request.cluster.nodes) == 1 else splits_sequences(request),
    }
    either = [name for name in _EITHER if name in may and acts[name] and request.cluster.num_devices > 1]
    if len(request.cluster.nodes) > 1 and "expert_overlap" in either:
        either.remove("expert_overlap")  # its rules are those of one set of degrees
    for precision in sorted(precisions, key=lambda name: -_peak(request, name)):
        for values in product((True, False), repeat=len(either)):
            yield Setting(precision=precision, comm=always | dict(zip(either, values, strict=True)))


def _peak(request: PlanRequest, precision: str) -> float:
    """Return the FLOP/s of all devices at their peaks in a precision."""
    able = [nodes for nodes in request.cluster.nodes if nodes.device.supports(precision)]
    return sum(nodes.num_devices * nodes.device.peak(precision) for nodes in able)


def left_out(request: PlanRequest, precisions: Sequence[str]) -> dict[str, str]:
    """Return the precisions that cannot be searched, each with the reason."""
    found = {}
    for name in precisions:
        if not any(nodes.device.supports(name) for nodes in request.cluster.nodes):
            found[name] = "no device has it"
        elif (
            len(precisions) > 1 and name in LOW_PRECISIONS and not offers_of(request.framework).low_precision
        ):
            found[name] = f"{request.framework.label} does not ship it"
    return found
