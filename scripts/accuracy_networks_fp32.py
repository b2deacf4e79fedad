"""Whole networks in fp32 on one device against published times and NeuSight's own predictions of them.

    python scripts/accuracy_networks_fp32.py      # needs the extras learn, run and models; three minutes

Networks are those of kernel_neusight_model_latency.csv, traced from Hugging Face configurations with eager
attention as NeuSight runs them (sitar-lab/NeuSight neusight/Tracing/trace.py). The device of a row is in no
fit that prices it: neither its products nor its elementwise kernels. Rows of compiled, routed or distributed
networks are left out, for NeuSight's predictions as well. Prints a table in markdown.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from functools import cache
from unittest.mock import patch

import numpy as np
from accuracy_rows import markdown
from fit_kernels import donors, figures, middle
from fit_learned import NOMINAL, Kernels, gemm_tables, regression, stream_tables, trees, with_share
from kernel_tables import ideal, read

from foreshard.catalog.devices import resolve_device
from foreshard.catalog.kernels import KernelModel, kernel_constants, kernel_model
from foreshard.catalog.learned import datasheet_features, share_of
from foreshard.cost.operations import operations_s
from foreshard.profile.networks.language.hugging_face import (
    DEPTHS,
    hugging_face_inputs,
    hugging_face_network,
    logits_of,
)
from foreshard.profile.tracing.trace import trace_module
from foreshard.spec.traced_module import Operation
from foreshard.validation.networks.latency import device_of


@cache
def operations(name: str, seq_len: int, training: bool) -> tuple[tuple[Operation, ...], ...]:
    """Return the operations of one layer's network, of two layers', and as their number the full depth."""
    found = []
    for layers in (1, 2):
        made = hugging_face_network(name, training=training, layers=layers)
        inputs = hugging_face_inputs(name, seq_len)
        traced = trace_module(
            made, inputs, loss=lambda out: logits_of(out).sum(), precision="fp32", name=name
        )
        work = [layer.forward + (layer.backward if training else ()) for layer in traced.layers]
        found.append(tuple(operation for layer in work for operation in layer))
    return tuple(found)


def seconds(name: str, seq_len: int, batch: int, training: bool, device: str, kernels: KernelModel) -> float:
    """Return the time of one pass, or forward and backward, of the whole depth."""
    vector = ideal(device, "fp32").peak_flops_per_s
    one, two = (
        float(operations_s(work, batch, kernels, vector, matrix_units=False).sum())
        for work in operations(name, seq_len, training)
    )
    return one + (DEPTHS[name] - 1) * (two - one)


class LeftOut:
    """Kernels of a device by fits that know nothing of it."""

    def __init__(self) -> None:
        self.gemm = [with_share(kernels) for kernels in gemm_tables(fp32=True)]
        self.sixteen = [with_share(kernels) for kernels in gemm_tables(fp32=False)]
        self.stream = [kernels.device for kernels in stream_tables()]

    def formula(self, device: str) -> KernelModel:
        constants = kernel_constants()
        known = {k.device: constants["gemm"]["fp32"]["devices"][k.device] for k in self.gemm}
        known.pop(device, None)
        gemm = middle([known[name] for name in donors(device, known)])
        streams = {n: constants["stream"]["devices"][n] for n in self.stream if n != device}
        stream = middle([streams[name] for name in donors(device, streams)])
        values = {f"gemm_{n}": v for n, v in gemm.items()} | {f"stream_{n}": v for n, v in stream.items()}
        return replace(ideal(device, "fp32"), **values)

    def learned(self, device: str) -> tuple[KernelModel, dict]:
        """Return the kernels, and the trees of fp32 that are to price them in place of those of 16 bit."""

        def rest(tables: list[Kernels]) -> list[Kernels]:
            return [kernels for kernels in tables if kernels.device != device]

        fit = regression(rest([*self.sixteen, *self.gemm]))
        made = trees("gemm_fp32", rest(self.gemm))
        sheet = datasheet_features(resolve_device(device), "fp32")
        assert made is not None and sheet is not None
        values = {f"gemm_{n}": v for n, v in NOMINAL["gemm"].items()}
        values |= {"gemm_eff": share_of(fit, (*sheet, 1.0)), "gemm_learned": 1.0}
        return replace(self.formula(device), **values), {"gemm_16bit": made[0]}


def main() -> None:
    rows = read("kernel_neusight_model_latency.csv")
    plain = (rows["num_gpus"] == 1) & (rows["option"] == "") & (rows["model"] != "switchxl4")
    rows = rows.take(plain)
    fits = LeftOut()
    logs: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for (table_name,), group in rows.groups("device"):
        device = device_of(str(table_name)).name
        learned, forest = fits.learned(device)
        sources = {
            "roofline": ideal(device, "fp32"),
            "formula": fits.formula(device),
            "learned": learned,
            "formula of the device": kernel_model(resolve_device(device), "fp32"),
        }
        with patch("foreshard.cost.learned.shipped_trees", lambda forest=forest: forest):
            for i in range(len(group)):
                row = {name: group[name][i] for name in ("model", "seq_len", "batch", "mode")}
                run = (str(row["model"]), int(row["seq_len"]), int(row["batch"]), row["mode"] == "train")
                measured_s = group["measured_e2e_ms"][i] * 1e-3
                found = {source: seconds(*run, device, kernels) for source, kernels in sources.items()}
                found["NeuSight"] = group["neusight_pred_e2e_ms"][i] * 1e-3
                for source, predicted_s in found.items():
                    for name in (device, "all"):
                        logs[name][source].append(float(np.log(predicted_s / measured_s)))
    sources = ("roofline", "NeuSight", "formula", "learned", "formula of the device")
    lines = []
    for name in (*sorted(set(logs) - {"all"}), "all"):
        scores = {source: figures(np.array(logs[name][source])) for source in sources}
        cells = (f"{100 * scores[s]['median']:.1f} / {100 * scores[s]['p90']:.1f}" for s in sources)
        lines.append((name, len(logs[name]["learned"]), *cells))
    print("\n".join(markdown(("device", "rows", *sources), lines)))


if __name__ == "__main__":
    main()
