"""Fit learned kernel costs on published kernel timings: catalog/data/learned_kernels.json, learned_trees.npz.

    python -m venv /tmp/learn && /tmp/learn/bin/pip install '.[learn]' scipy
    OMP_NUM_THREADS=1 /tmp/learn/bin/python scripts/fit_learned.py          # refit, judge left out, write
    OMP_NUM_THREADS=1 /tmp/learn/bin/python scripts/fit_learned.py --check  # fail if shipped data differ

Deterministic, about five minutes on one core. Every device is judged by a fit without it, and again by a fit
without its architecture. docs/cost_sources.md explains the model and shows the errors.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from columns import Table
from fit_kernels import ATTENTION_START, GEMM_START, donors, figures, middle
from kernel_tables import (
    attention_rows,
    cache_writes_s,
    deepbench_rows,
    fp32_rows,
    ideal,
    read,
    sixteen_bit_rows,
)
from sklearn.ensemble import HistGradientBoostingRegressor

from foreshard.catalog.devices import resolve_device
from foreshard.catalog.kernels import KernelModel, kernel_constants
from foreshard.catalog.learned import datasheet_features, share_of
from foreshard.cost.attention import flash_attention_forward_s
from foreshard.cost.elementwise import stream_s
from foreshard.cost.gemm import gemm_s
from foreshard.cost.grouped import grouped_gemm_s
from foreshard.cost.learned import Trees, attention_features, gemm_features, grouped_features, trees_of
from foreshard.validation.kernels.cases import STREAMS, attention_kernel

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "src/foreshard/catalog/data"
REGRESSIONS, TREES = DATA / "learned_kernels.json", DATA / "learned_trees.npz"

# Starting point of the formula's own fit (scripts/fit_kernels.py): what no device was looked at for.
NOMINAL = {
    "gemm": {name: value for name, value in GEMM_START.items() if name != "eff"} | {"exposed": 0.3},
    "attention": {name: value for name, value in ATTENTION_START.items() if name != "fwd_eff"},
}
HOST_S = 30e-6  # NeuSight times calls from the host: of a product
HOST_STREAM_S = 18e-6  # of an elementwise kernel
RIDGE = 1.0  # one device's worth of doubt about each weight
SHARE = 0.7  # of the log formula time that trees need not find; the rest may be flatter, never falling
ROWS = 1500  # of a device and precision: evenly taken
TREES_PER_KIND, LEAVES, DEPTH, RATE, LEAF_ROWS = 150, 15, 6, 0.08, 40
# Last features that are no sizes: the library; how uneven routing is, and log ranks that share the tokens.
NO_SIZES = {"attention": 1, "grouped": 2}
LARGE = 0.6  # quantile of the formula's time from which a kernel is bound by its peak


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """Kernels of one table and device: seconds, and what prices them at an achieved share of the peak."""

    device: str
    datasheet: tuple[float, ...]
    price: Callable[[float], np.ndarray]
    features: np.ndarray
    measured_s: np.ndarray
    bound: np.ndarray  # mask of the kernels that tell the share of the peak
    formula: Callable[[Sequence[str]], np.ndarray]  # left out: constants of these other devices
    roofline_s: np.ndarray
    share: float = field(default=0.0)

    @property
    def arch(self) -> str:
        return resolve_device(self.device).arch


def with_share(kernels: Kernels) -> Kernels:
    """Return the kernels with the share at which those bound by the peak come out right in the median."""
    low, high = 0.02, 5.0
    for _ in range(50):
        middle_share = (low * high) ** 0.5
        ratio = np.median(np.log(kernels.price(middle_share) / kernels.measured_s)[kernels.bound])
        low, high = (middle_share, high) if ratio > 0 else (low, middle_share)
    return replace(kernels, share=middle_share)


def evenly(rows: Table, *names: str) -> Table:
    rows = rows.take(rows.order(*names))
    return rows.take(slice(None, None, max(1, len(rows) // ROWS)))


def nominal(device: str, precision: str, **fields: float) -> KernelModel:
    values = {f"gemm_{n}": v for n, v in NOMINAL["gemm"].items()}
    values |= {f"attn_{n}": v for n, v in NOMINAL["attention"].items()}
    return replace(ideal(device, precision), **(values | {"stream_eff": 0.85} | fields))


# ---- tables --------------------------------------------------------------------------------------------


def gemm_tables(fp32: bool) -> list[Kernels]:
    """Return the products of every device of the tables of one width."""
    if fp32:
        tables = {(device, "fp32"): rows for device, rows in fp32_rows().items()}
    else:
        tables = {(device, "bf16"): rows for device, rows in sixteen_bit_rows().items()}
        for device, name in (("v100-sxm-16gb", "NV_V100"), ("t4", "NV_T4")):
            tables[device, "fp16"] = deepbench_rows("Results - FP16 ip, Mixed math", name)
    names = sorted({device for device, _ in tables})
    return [_gemm(device, precision, rows, names) for (device, precision), rows in sorted(tables.items())]


def _gemm(device: str, precision: str, rows: Table, names: Sequence[str]) -> Kernels:
    if "b" not in rows.columns:
        rows = rows.plus(b=np.ones(len(rows)))
    rows = evenly(rows, "b", "m", "n", "k")
    m, n, k, batch = (rows[c] for c in "mnkb")
    width = 4.0 if precision == "fp32" else 2.0
    called = len(rows) > 200 and precision == "fp32"  # NeuSight, not DeepBench
    launch_s = HOST_S if called else NOMINAL["gemm"]["launch_s"]
    sheet, base = ideal(device, precision), nominal(device, precision, gemm_launch_s=launch_s)
    section = kernel_constants()["gemm"]["fp32" if precision == "fp32" else "16bit"]["devices"]
    overhead_s = kernel_constants()["table_overhead_s"]["gemm_fp32"]

    def price(share: float) -> np.ndarray:
        return gemm_s(m, n, k, replace(base, gemm_eff=share), bytes_per_element=width, batch=batch)

    def formula(allowed: Sequence[str]) -> np.ndarray:
        known = {name: section[name] for name in names if name in allowed}
        entry = middle([known[name] for name in donors(device, known)])
        if called:
            entry["launch_s"] = float(np.median([overhead_s[name] for name in known]))
        kernels = replace(sheet, **{f"gemm_{name}": value for name, value in entry.items()})
        return gemm_s(m, n, k, kernels, bytes_per_element=width, batch=batch)

    flops = 2.0 * m * n * k * batch
    moved = width * (m * k + n * k + m * n) * batch
    tiles = np.ceil(m / 128) * np.ceil(n / 128) * batch / sheet.num_sms
    bound = (flops / moved > 2.0 * sheet.peak_flops_per_s / sheet.memory_bytes_per_s) & (tiles > 4.0)
    bound &= price(0.75) > 10.0 * launch_s
    if bound.sum() < 15:
        bound = (flops / moved > sheet.peak_flops_per_s / sheet.memory_bytes_per_s) & (tiles > 1.0)
    return Kernels(
        device=device,
        datasheet=(*_datasheet(device, precision), float(precision == "fp32")),
        price=price,
        features=np.column_stack(gemm_features(m, n, k, batch, sheet.num_sms)),
        measured_s=rows["s"],
        bound=bound,
        formula=formula,
        roofline_s=np.maximum(flops / sheet.peak_flops_per_s, moved / sheet.memory_bytes_per_s),
    )


def _datasheet(device: str, precision: str) -> tuple[float, ...]:
    found = datasheet_features(resolve_device(device), precision)
    assert found is not None, device
    return found


def attention_tables() -> list[Kernels]:
    rows = attention_rows()
    rows = rows.plus(serving=rows["kernel"] == "trtllm")
    return [
        _attention(device, bool(serving), group)
        for (device, serving), group in rows.groups("name", "serving")
    ]


def _attention(device: str, serving: bool, rows: Table) -> Kernels:
    rows = evenly(rows, "head_dim", "seq_len", "batch", "num_heads", "num_kv_heads")
    columns = ("batch", "num_heads", "num_kv_heads", "seq_len", "head_dim")
    batch, heads, kv_heads, seq, dim = (rows[c].astype(float) for c in columns)
    sheet = nominal(device, "bf16")
    cache_s = cache_writes_s(rows, sheet)
    sections = kernel_constants()["attention"]
    native = {d: sections[attention_kernel(d, "")]["devices"][d] for d in _attention_devices(sections)}
    known = sections["trtllm"]["devices"] if serving else native

    def seconds(kernels: KernelModel) -> np.ndarray:
        return cache_s + flash_attention_forward_s(
            batch, heads, kv_heads, seq, seq, dim, dim, kernels, causal=True
        )

    def formula(allowed: Sequence[str]) -> np.ndarray:
        others = {name: entry for name, entry in known.items() if name in allowed}
        entry = middle([others[name] for name in donors(device, others)])
        return seconds(replace(sheet, **{f"attn_{name}": value for name, value in entry.items()}))

    time_s = seconds(replace(sheet, attn_fwd_eff=0.6))
    flops = 2.0 * batch * heads * seq**2 * dim
    moved = 4.0 * batch * (heads + kv_heads) * seq * dim
    features = attention_features(batch * heads, batch * kv_heads, seq, seq, dim, sheet.num_sms)
    flag = np.full(len(rows), float(serving))
    return Kernels(
        device=device,
        datasheet=(*_datasheet(device, "bf16"), float(serving)),
        price=lambda share: seconds(replace(sheet, attn_fwd_eff=share)),
        features=np.column_stack([*features, flag]),
        measured_s=rows["s"],
        bound=time_s > np.quantile(time_s, LARGE),
        formula=formula,
        roofline_s=np.maximum(flops / sheet.peak_flops_per_s, moved / sheet.memory_bytes_per_s),
    )


def _attention_devices(sections: dict) -> list[str]:
    """Return the devices whose own kernel was timed."""
    fitted = {name for kernel in ("fa2", "fa3", "cudnn") for name in sections[kernel]["devices"]}
    return sorted(name for name in fitted if name in sections[attention_kernel(name, "")]["devices"])


def grouped_tables(gemm: Sequence[Kernels]) -> list[Kernels]:
    """Return fused expert layers of TensorRT-LLM (CUTLASS): two grouped products and the traffic around."""
    rows = read("kernel_aiconfigurator_moe.csv.gz")
    rows = rows.take(rows["framework"] == "trtllm")
    shares = {kernels.device: kernels for kernels in gemm}
    return [
        _grouped(resolve_device(str(name)).name, group, shares) for (name,), group in rows.groups("device")
    ]


def _grouped(device: str, rows: Table, gemm: dict[str, Kernels]) -> Kernels:
    rows = evenly(rows, "distribution", "num_tokens", "hidden", "inter", "experts", "moe_tp", "moe_ep")
    tokens = rows["num_tokens"] * rows["topk"] / rows["moe_ep"]
    experts, hidden = rows["experts"] / rows["moe_ep"], rows["hidden"].astype(float)
    inner = rows["inter"] / rows["moe_tp"]
    moved = tokens * (8.0 * hidden + 6.0 * inner)
    sheet = nominal(device, "bf16")

    def seconds(kernels: KernelModel) -> np.ndarray:
        first = grouped_gemm_s(tokens, experts, 2.0 * inner, hidden, kernels)
        return first + grouped_gemm_s(tokens, experts, hidden, inner, kernels) + stream_s(moved, sheet) + 1e-5

    constants = kernel_constants()

    def formula(allowed: Sequence[str]) -> np.ndarray:
        known = {n: constants["gemm"]["16bit"]["devices"][n] for n in gemm if n in allowed}
        entry = middle([known[name] for name in donors(device, known)])
        speed = {n: e for n, e in constants["grouped"]["devices"].items() if n in allowed}
        kernels = replace(sheet, **{f"gemm_{name}": value for name, value in entry.items()})
        return seconds(replace(kernels, grouped_eff=middle(list(speed.values()))["eff"])) / 2.0

    active = np.minimum(experts, np.ceil(tokens))
    exponent = [float(text.rpartition("_")[2]) if "_" in text else 0.0 for text in rows["distribution"]]
    features = [
        0.5 * (one + other)  # of the mean of both products
        for one, other in zip(
            grouped_features(tokens, active, 2.0 * inner, hidden, sheet.num_sms),
            grouped_features(tokens, active, hidden, inner, sheet.num_sms),
            strict=True,
        )
    ]
    flops = 6.0 * tokens * hidden * inner
    bytes_moved = 6.0 * active * hidden * inner + 2.0 * tokens * (2.0 * hidden + 3.0 * inner)
    return Kernels(
        device=device,
        datasheet=gemm[device].datasheet,
        price=lambda share: seconds(replace(sheet, gemm_eff=share)) / 2.0,  # of one of the two
        features=np.column_stack([*features, exponent, np.log(rows["moe_ep"])]),
        measured_s=rows["latency_ms"] * 1e-3 / 2.0,
        bound=np.ones(len(rows), bool),
        formula=formula,
        roofline_s=np.maximum(flops / sheet.peak_flops_per_s, bytes_moved / sheet.memory_bytes_per_s) / 2.0,
        share=gemm[device].share,
    )


def stream_tables() -> list[Kernels]:
    rows = read("kernel_neusight_elementwise.csv.gz")
    rows = rows.plus(passes=np.array([STREAMS.get(op, 2) for op in rows["op"]]))
    return [_stream(resolve_device(str(name)).name, group) for (name,), group in rows.groups("device")]


def _stream(device: str, rows: Table) -> Kernels:
    rows = evenly(rows, "op", "b", "h")
    moved, sheet = 4.0 * rows["b"] * rows["h"] * rows["passes"], ideal(device, "fp32")
    constants = kernel_constants()
    overhead_s, known = constants["table_overhead_s"]["elementwise"], constants["stream"]["devices"]

    def formula(allowed: Sequence[str]) -> np.ndarray:
        others = {name: known[name] for name in overhead_s if name in allowed}
        eff = middle([others[name] for name in donors(device, others)])["eff"]
        host_s = float(np.median([overhead_s[name] for name in others]))
        return stream_s(moved, replace(sheet, stream_eff=eff, stream_launch_s=host_s))

    plain = ~np.isin(rows["op"], ("ln", "softmax", "pow", "powu"))
    return Kernels(
        device=device,
        datasheet=_datasheet(device, "fp32"),
        price=lambda share: stream_s(moved, replace(sheet, stream_eff=share, stream_launch_s=HOST_STREAM_S)),
        features=np.zeros((len(rows), 0)),
        measured_s=rows["latency_ms"] * 1e-3,
        bound=plain & (moved > np.quantile(moved, LARGE)),
        formula=formula,
        roofline_s=moved / sheet.memory_bytes_per_s,
    )


SOURCES = ("learned", "formula", "roofline")
# Better on kernels left out, not on whole networks of devices left out (scripts/accuracy_networks_fp32.py).
WORSE_ON_NETWORKS = ("gemm_fp32",)

# ---- fits ----------------------------------------------------------------------------------------------


def regression(known: Sequence[Kernels]) -> dict:
    """Return the ridge regression of log share on the figures of the datasheet."""
    x = np.array([kernels.datasheet for kernels in known])
    y = np.log([kernels.share for kernels in known])
    mean, scale = x.mean(0), np.maximum(x.std(0), 1e-9)
    z = (x - mean) / scale
    weights = np.linalg.solve(z.T @ z + RIDGE * np.eye(z.shape[1]), z.T @ (y - y.mean()))
    return {
        "intercept": round(float(y.mean()), 6),
        **{
            n: [round(float(v), 6) for v in a]
            for n, a in (("mean", mean), ("scale", scale), ("weights", weights))
        },
    }


def trees(kind: str, known: Sequence[Kernels]) -> tuple[Trees, dict[str, np.ndarray]] | None:
    """Return the trees of a kind, and their arrays as they ship; None for a kind without features."""
    if not known[0].features.shape[1]:
        return None
    formula = np.concatenate([np.log(kernels.price(kernels.share)) for kernels in known])
    measured = np.concatenate([np.log(kernels.measured_s) for kernels in known])
    rows = np.column_stack([formula, np.concatenate([kernels.features for kernels in known])])
    weights = np.concatenate([np.full(len(k.measured_s), len(k.measured_s) ** -0.5) for k in known])
    rising = [int(i < rows.shape[1] - NO_SIZES.get(kind, 0)) for i in range(rows.shape[1])]
    target = measured - SHARE * formula
    model = _boosted(rows, target, weights, rising)
    arrays = _arrays(model)
    low, high = np.quantile(formula, (0.001, 0.999))
    base = float(model._baseline_prediction.item())
    arrays["scalars"] = np.array([DEPTH, base, SHARE, low, high])
    return trees_of(arrays), arrays


def _boosted(
    rows: np.ndarray, target: np.ndarray, weights: np.ndarray, rising: Sequence[int]
) -> HistGradientBoostingRegressor:
    """Return trees for the median of the target that rise along the features marked.

    The library's absolute errors set leaves to medians after a tree has grown, which breaks the order that a
    rising feature asks for; its squared errors keep it. So the first say where the median lies, and targets
    held near it are then fitted by the second (one step of Huber's weights).
    """

    def fitted(loss: str, wanted: np.ndarray) -> HistGradientBoostingRegressor:
        return HistGradientBoostingRegressor(
            loss=loss,
            max_iter=TREES_PER_KIND,
            learning_rate=RATE,
            max_leaf_nodes=LEAVES,
            max_depth=DEPTH,
            min_samples_leaf=LEAF_ROWS,
            monotonic_cst=list(rising),
            early_stopping=False,
            random_state=0,
        ).fit(rows, wanted, sample_weight=weights)

    near = fitted("absolute_error", target).predict(rows)
    size = np.median(np.abs(target - near))
    return fitted("squared_error", near + np.clip(target - near, -size, size))


def _arrays(model: HistGradientBoostingRegressor) -> dict[str, np.ndarray]:
    """Return the nodes of all trees as arrays; a leaf is its own child."""
    nodes = [predictors[0].nodes for predictors in model._predictors]
    shape = len(nodes), max(map(len, nodes))
    own = np.broadcast_to(np.arange(shape[1], dtype=np.int16), shape)
    out = {
        "feature": np.zeros(shape, np.int16),
        "threshold": np.zeros(shape, np.float32),
        "left": own.copy(),
        "right": own.copy(),
        "value": np.zeros(shape, np.float32),
    }
    for i, tree in enumerate(nodes):
        inner = np.flatnonzero(tree["is_leaf"] == 0)
        out["value"][i, : len(tree)] = tree["value"]
        out["feature"][i, inner] = tree["feature_idx"][inner]
        out["threshold"][i, inner] = tree["num_threshold"][inner]
        out["left"][i, inner], out["right"][i, inner] = tree["left"][inner], tree["right"][inner]
    return out


def predicted(fit: dict, forest: Trees | None, kernels: Kernels) -> np.ndarray:
    """Return the learned seconds of kernels of a device, its share being the regression's."""
    time_s = kernels.price(share_of(fit, kernels.datasheet))
    return time_s if forest is None else np.exp(forest.log_time(np.log(time_s), kernels.features))


def left_out(kind: str, tables: Sequence[Kernels], shares: Sequence[Kernels]) -> dict:
    """Return the errors of learned costs, formula and roofline on every device that a fit never saw."""
    found: dict[str, dict] = {}
    for out in ("device", "architecture"):
        logs: dict[str, list[np.ndarray]] = {f"{s}{long}": [] for s in SOURCES for long in ("", " long")}
        groups = sorted({getattr(k, "device" if out == "device" else "arch") for k in tables})
        for name in groups:

            def is_out(kernels: Kernels, out: str = out, name: str = name) -> bool:
                return name == (kernels.device if out == "device" else kernels.arch)

            rest = [kernels for kernels in tables if not is_out(kernels)]
            fit = regression([kernels for kernels in shares if not is_out(kernels)])
            made = trees(kind, rest)
            allowed = sorted({kernels.device for kernels in (*rest, *shares) if not is_out(kernels)})
            for kernels in filter(is_out, tables):
                log_s = np.log(kernels.measured_s)
                mine = {
                    "learned": np.log(predicted(fit, made and made[0], kernels)) - log_s,
                    "formula": np.log(kernels.formula(allowed)) - log_s,
                    "roofline": np.log(kernels.roofline_s) - log_s,
                }
                long = kernels.roofline_s > np.quantile(kernels.roofline_s, LARGE)
                for source, log_ratio in mine.items():
                    logs[source].append(log_ratio)
                    logs[f"{source} long"].append(log_ratio[long])
                if out == "device":
                    entry = found.setdefault(kernels.device, {s: [] for s in SOURCES})
                    for source, log_ratio in mine.items():
                        entry[source].append(log_ratio)
        found[f"all, {out} left out"] = {source: logs[source] for source in SOURCES}
        found[f"long ones, {out} left out"] = {source: logs[f"{source} long"] for source in SOURCES}
    return {
        name: {source: figures(np.concatenate(parts)) for source, parts in entry.items()}
        for name, entry in found.items()
    }


def fit_all() -> tuple[dict, dict[str, np.ndarray]]:
    """Return the regressions with errors left out, and the arrays of all trees."""
    sixteen = [with_share(kernels) for kernels in gemm_tables(fp32=False)]
    single = [with_share(kernels) for kernels in gemm_tables(fp32=True)]
    tables = {
        "gemm_16bit": sixteen,
        "gemm_fp32": single,
        "attention": [with_share(kernels) for kernels in attention_tables()],
        "grouped": grouped_tables([k for k in sixteen if k.device not in ("t4", "v100-sxm-16gb")]),
        "stream": [with_share(kernels) for kernels in stream_tables()],
    }
    regressions, arrays, report, preferred = {}, {}, {}, []
    for kind in tables:
        # One regression of products of both widths: it has more devices than one of each.
        shares = tables[kind] if kind in ("attention", "stream") else [*sixteen, *single]
        report[kind] = left_out(kind, tables[kind], shares)
        better = kind not in WORSE_ON_NETWORKS and all(
            report[kind][f"{which}, device left out"]["learned"]["median"]
            < report[kind][f"{which}, device left out"]["formula"]["median"]
            for which in ("all", "long ones")
        )
        if better:
            preferred.append(kind)
            watts = [kernels.datasheet[0] for kernels in tables[kind]]
            trained = {
                "log_watts_range": [round(f(watts), 6) for f in (min, max)],
                "vendors": sorted({resolve_device(kernels.device).vendor for kernels in tables[kind]}),
            }
            regressions[kind] = regression(shares) | trained
            made = trees(kind, tables[kind])
            assert made is not None
            arrays |= {f"{kind}/{name}": array for name, array in made[1].items()}
        print(kind, "preferred" if better else "not better", file=sys.stderr)
        for name, entry in report[kind].items():
            text = (f"{s} {100 * f['median']:.1f}/{100 * f['p90']:.1f}" for s, f in entry.items())
            print("  ", name, entry["learned"]["rows"], *text, file=sys.stderr)
    made_of = {
        "schema_version": 1,
        "fitted_by": "scripts/fit_learned.py",
        "nominal": NOMINAL,
        "regressions": regressions,
        "preferred": preferred,
        "left_out": report,
    }
    return made_of, arrays


def packed(arrays: dict[str, np.ndarray]) -> bytes:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    return buffer.getvalue()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="Compare with what is shipped, write nothing.")
    check = parser.parse_args().check
    found, arrays = fit_all()
    text = json.dumps(found, indent=1) + "\n"
    if check:
        with np.load(TREES) as shipped:
            same = all(np.array_equal(shipped[name], array) for name, array in arrays.items())
        return 0 if same and REGRESSIONS.read_text(encoding="utf-8") == text else 1
    REGRESSIONS.write_text(text, encoding="utf-8")
    TREES.write_bytes(packed(arrays))
    print(f"{TREES}: {TREES.stat().st_size} bytes", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
