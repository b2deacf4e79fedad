"""Checks that the tensor-parallel degrees of a plan suit the layers; refuses them by name where not."""

from __future__ import annotations

from collections.abc import Mapping

from foreshard.errors import SpecError
from foreshard.runtime.state.layout import RankLayout
from foreshard.runtime.state.parameters import Parameters
from foreshard.runtime.tensor.split import LayerSplit


def check_split(layout: RankLayout, parameters: Parameters) -> None:
    """Raise for stages whose layers cannot be cut as the plan asks."""
    for g, group in enumerate(layout.plan.groups):
        for s, stage in enumerate(group.stages):
            where = f"groups[{g}].stages[{s}]"
            layers = [layer for lo, hi in stage.layers for layer in range(lo, hi)]
            if stage.tp > 1:
                splits = {layer: parameters.splits[layer] for layer in layers if layer in parameters.splits}
                check_degree(splits, stage.tp, f"{where}.tp", of=f"of {where} ")
            whole = sorted(set(layers) - parameters.sequential)
            if group.sp and stage.tp > 1 and whole:
                raise SpecError(
                    f"layer {whole[0]} takes whole sequences only",
                    key=f"groups[{g}].sp",
                    value=True,
                    rule="sp cuts the sequences of models of transformers that are split by themselves",
                    fix="Set sp to false",
                )


def check_degree(splits: Mapping[int, LayerSplit], degree: int, key: str, *, of: str = "") -> None:
    """Raise where a degree does not suit every layer that can be cut, or there is no such layer."""

    def refused(what: str, rule: str, fix: str) -> SpecError:
        return SpecError(what, key=key, value=degree, rule=rule, fix=fix)

    if not splits:
        rule = "tp cuts weights of layers with a tensor_plan, and of models of transformers"
        fix = "Define tensor_plan in the job (docs/runtime_jobs.md), or set tp to 1"
        raise refused(f"no layer {of}has a tensor plan", rule, fix)
    for layer, split in splits.items():
        if split.plan.refused is not None:
            what = f"layer {layer} cannot be cut: {split.plan.refused}"
            raise refused(what, "tp cuts what every rank can compute alone", "Set tp to 1")
        for name, count in split.plan.units.items():
            if count % degree:
                what = f"tp {degree} does not divide {count} {name} of layer {layer}"
                raise refused(what, f"tp divides the {name}", f"Use a divisor of {count}")
        for name, cut in split.cuts.items():
            if not cut.divides(split.shapes[name], split.degree(name, degree)):
                size = f"{split.shapes[name][cut.dim]} in {len(cut.blocks)} block(s)"
                what = f"tp {degree} does not divide {name} of layer {layer}: {size}"
                fix = "Use a smaller tp, or another tensor_plan"
                raise refused(what, "tp divides every block of a weight that is cut", fix)
