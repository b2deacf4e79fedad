"""The parallel degrees of a training row: as stated, or as a run of that kind most likely had them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

from foreshard.errors import SpecError
from foreshard.spec.device import Device
from foreshard.spec.model import Model
from foreshard.validation.row_cluster import RowReading, node_size

_FILLED = (
    0.85  # share of the device memory taken to be usable: the rest is context, buffers and fragmentation
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """What a rank must hold, for rules that look for what fits."""

    model: Model
    device: Device
    seq_len: int
    global_batch: int
    sharded: bool  # parameters, gradients and states are cut over the data-parallel ranks

    @property
    def adapted(self) -> bool:
        """Whether little of the model is trained: adapters on frozen weights."""
        return self.model.trainable_params < 0.5 * self.model.num_params

    def fits(
        self,
        tp: int,
        pp: int,
        dp: int,
        *,
        cp: int = 1,
        micro_batch: int = 1,
        vpp: int = 1,
        recompute: bool | None = None,
    ) -> bool:
        """Whether a rank of such a plan fits: 6 + 12/dp bytes per parameter, 34 s b h / t of activations.

        Source
        ------
        Korthikanti et al. 2022 (arXiv 2205.05198) eq. 4 with flash attention, in-flight of interleaved
        1F1B; frozen weights are 2 bytes and keep what their inputs need, sharded states 18 bytes over all.
        """
        model, tokens = self.model, self.seq_len / cp * micro_batch
        states = 2.0 if self.adapted else 18.0 / dp if self.sharded else 6 + 12 / dp
        layers = model.num_layers * (1 + (pp - 1) / (pp * vpp) if pp > 1 else 1)
        kept = (10 if self.adapted else 34) * tokens * model.hidden / tp * layers
        if self.sharded if recompute is None else recompute:
            kept *= 2 / 34  # runs that shard their states recompute where memory is short
        logits = 6 * tokens * model.vocab / tp
        return model.num_params / (tp * pp) * states + kept + logits <= _FILLED * self.device.capacity_bytes

    def largest_micro_batch(self, tp: int, pp: int, dp: int, cp: int, vpp: int) -> int:
        """Return the largest power of two that fits and leaves a micro-batch for every stage."""
        per_rank = max(1, self.global_batch // dp)
        best, size = 1, 1
        while size <= per_rank and not per_rank % size and not (pp > 1 and per_rank // size < pp):
            if self.fits(tp, pp, dp, cp=cp, micro_batch=size, vpp=vpp):
                best = size
            size *= 2
        return best


def degrees(row: RowReading, gpus: int, size: ModelSize) -> dict[str, int]:
    """Return tp, pp, cp, ep and dp of a row; blank ones are filled and said.

    More stated degrees than devices are an error.
    """
    out = _filled(row, gpus, size)
    out["ep"] = row.whole("ep") or 1
    inner = out["tp"] * out["pp"] * out["cp"]
    if inner > gpus:
        what = f"tp {out['tp']} x pp {out['pp']} x cp {out['cp']} is more than {gpus} devices"
        raise SpecError(what, key="tp", value=inner, rule="The degrees divide the devices")
    if out["dp"] * inner != gpus:
        row.note(f"dp {out['dp']} x {inner} is not {gpus} devices: dp {gpus // inner}")
        out["dp"] = gpus // inner
    group = out["tp"] * out["cp"] * out["dp"]
    if group % out["ep"]:
        fitting = max(ep for ep in range(1, out["ep"]) if group % ep == 0)
        row.note(f"ep {out['ep']} does not divide the {group} devices of a stage: {fitting}")
        out["ep"] = fitting
    return out


def _filled(row: RowReading, gpus: int, size: ModelSize) -> dict[str, int]:
    tp, pp, cp, dp = map(row.whole, ("tp", "pp", "cp", "dp"))
    if tp is not None and pp is not None:
        inner = tp * pp * (cp or 1)
        return {"tp": tp, "pp": pp, "cp": cp or 1, "dp": dp or max(1, gpus // inner)}
    if dp is not None and (tp or pp) and gpus % (dp * (tp or 1) * (pp or 1) * (cp or 1)) == 0:
        rest = gpus // (dp * (tp or 1) * (pp or 1) * (cp or 1))
        tp, pp = tp or rest, pp or rest
        row.note(f"tp or pp not stated: tp {tp} pp {pp}, which with the other degrees make {gpus} devices")
        return {"tp": tp, "pp": pp, "cp": cp or 1, "dp": dp}
    chosen = _likely(tp, pp, cp, gpus, node_size(row, gpus), size)
    listed = " ".join(f"{name} {value}" for name, value in chosen.items())
    row.note(f"parallel degrees not stated: {listed}, the fewest cuts that fit the memory and the batch")
    return chosen


def _likely(
    tp: int | None, pp: int | None, cp: int | None, gpus: int, per_node: int, size: ModelSize
) -> dict[str, int]:
    """Return the fewest cuts of the model that leave a sample for each replica and fit: tp, then pp.

    Sharding frameworks do not cut the model at all unless there are more ranks than samples; adapters are
    trained with longer sequences, whose ranks share them (cp) before layers are cut. The run took place: the
    finest cut is taken where nothing is said to fit.
    """
    heads = max(block.num_heads for block, _ in size.model.block_kinds())
    tps = [tp] if tp else [n for n in _powers(per_node) if gpus % n == 0 and heads % n == 0]
    pps = [pp] if pp else [n for n in _powers(gpus) if n <= size.model.num_layers]
    wanted = gpus / size.global_batch  # ranks that share a sample
    finest = None
    for pipeline in pps:
        for tensor in tps:
            inner = tensor * pipeline
            if gpus % inner:
                continue
            context = cp or 1
            if size.adapted and cp is None and inner * context < wanted:
                context = next(n for n in count(1) if n * inner >= wanted)
            inner *= context
            if gpus % inner or inner < wanted:
                continue
            finest = {"tp": tensor, "pp": pipeline, "cp": context, "dp": gpus // inner}
            if size.fits(tensor, pipeline, gpus // inner, cp=context):
                return finest
    if finest is not None:
        return finest
    rule = f"No plain cut of {size.model.name} makes {gpus} of {size.device.name}"
    raise SpecError("parallel degrees are not stated", key="tp" if tp is None else "pp", rule=rule)


def _powers(most: int) -> list[int]:
    return [2**n for n in range(most.bit_length()) if 2**n <= most]
