"""Errors of kernel times by cost source, devices left out of fits: python scripts/cost_source_tables.py.

Prints the table of docs/cost_sources.md from what scripts/fit_learned.py found.
"""

from __future__ import annotations

from accuracy_rows import markdown

from foreshard.catalog.learned import learned_kernels

NAMES = {
    "gemm_16bit": "matrix products, 16 bit",
    "gemm_fp32": "matrix products, fp32",
    "attention": "attention",
    "grouped": "grouped products of experts",
    "stream": "elementwise",
}
SOURCES = ("roofline", "formula", "learned")


def main() -> None:
    """Print one line for each kind of kernel and device, median and 90 % quantile of errors in percent."""
    lines = []
    for kind, errors in learned_kernels()["left_out"].items():
        used = "learned" if kind in learned_kernels()["preferred"] else "formula"
        for name, scores in errors.items():
            cells = [f"{100 * scores[s]['median']:.1f} / {100 * scores[s]['p90']:.1f}" for s in SOURCES]
            lines.append((NAMES[kind], name, scores["learned"]["rows"], *cells, used))
    print("\n".join(markdown(("kernels", "left out", "rows", *SOURCES, "auto takes"), lines)))


if __name__ == "__main__":
    main()
