"""Interpolated tables of products judged on sizes left out: python scripts/accuracy_product_tables.py.

Every second value of one size, of rows, columns or inner sizes, is left out of a device's table (16-bit
products of aiconfigurator) and interpolated from the rest, twice as far apart. Prints the error of the table
and of the formula fitted to the device on the same products, in markdown.
"""

from __future__ import annotations

import numpy as np
from accuracy_rows import markdown
from fit_kernels import figures
from kernel_tables import sixteen_bit_rows

from foreshard.catalog.devices import resolve_device
from foreshard.catalog.kernels import kernel_model
from foreshard.cost.gemm import gemm_s
from foreshard.cost.tables import SIZES, product_table


def main() -> None:
    """Print one line for each device and size."""
    lines, pooled = [], {"table": [], "formula": []}
    for device, rows in sixteen_bit_rows().items():
        sizes = np.stack([rows[name] for name in SIZES], axis=1).astype(float)
        kernels = kernel_model(resolve_device(device), "bf16", sustained=False)
        for axis, name in enumerate(SIZES):
            values = np.unique(sizes[:, axis])
            out = np.isin(sizes[:, axis], values[1:-1:2])
            kept = product_table(sizes[~out], rows["s"][~out])
            asked = [sizes[out, i] for i in range(3)]
            covered = kept.covered(*asked)
            found = {
                "table": kept.seconds(*asked)[covered],
                "formula": gemm_s(*(size[covered] for size in asked), kernels, bytes_per_element=2),
            }
            cells = []
            for source, seconds in found.items():
                off = np.log(seconds / rows["s"][out][covered])
                pooled[source].append(off)
                cells.append(_text(off))
            lines.append((device, name, int(out.sum()), f"{100 * covered.mean():.0f}", *cells))
    whole = [_text(np.concatenate(parts)) for parts in pooled.values()]
    lines.append(("all", "", sum(map(len, pooled["table"])), "", *whole))
    header = ("device", "size left out", "products", "covered (%)", "table", "formula of the device")
    print("\n".join(markdown(header, lines)))


def _text(log_ratios: np.ndarray) -> str:
    s = figures(log_ratios)
    return f"{100 * s['median']:.1f} / {100 * s['p90']:.1f} ({100 * s['bias']:+.1f})"


if __name__ == "__main__":
    main()
