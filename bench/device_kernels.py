"""Kernels of one CUDA device that no published table has: TF32, convolutions in 32 bit, recurrences.

    python bench/device_kernels.py --out device_products.jsonl

A line is an operation, what it takes forward and backward, and, of recurrent layers, the kernels that cuDNN
launched. Sizes are those of the networks of `docs/traced_modules.md`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

LEAST_S, TIMINGS = 0.006, 3
ROWS = (512, 2048, 8192)
WIDTHS = (
    (512, 512),
    (768, 768),
    (3072, 768),
    (768, 3072),
    (1024, 1024),
    (4096, 1024),
    (1024, 4096),
    (4096, 4096),
    (8192, 8192),
    (32000, 1024),
)
"""Columns and inner sizes of products."""
LAYOUTS = {"forward": (False, True), "input": (False, False), "weight": (True, False)}
"""Which operands of a layer's three products are transposed: X W^T, dY W, dY^T X."""
CONVOLUTIONS = (
    (3, 64, 7, 2, 224),
    (64, 64, 3, 1, 56),
    (64, 256, 1, 1, 56),
    (128, 128, 3, 1, 28),
    (512, 128, 1, 1, 28),
    (256, 256, 3, 1, 14),
    (1024, 256, 1, 1, 14),
    (256, 256, 3, 2, 28),
    (512, 512, 3, 1, 7),
    (256, 256, 3, 1, 38),
)
"""Channels in and out, side of the filter, stride, side of the image; 64 images."""
FILTERS = (1, 8, 128)
"""Dilations of WaveGlow's filters of 3 positions, 512 to 1,024 channels over 2,000 positions, 8 samples."""
RECURRENT = tuple(product(("LSTM",), (512, 1024, 2048), (16, 64, 256), ("fp16", "tf32"), (1,)))
RECURRENT += (("LSTM", 1024, 64, "bf16", 2), ("LSTM", 1024, 64, "fp32", 1), ("GRU", 1024, 64, "fp16", 1))
RECURRENT += (("GRU", 2048, 64, "tf32", 1), ("RNN", 1760, 64, "fp16", 1), ("LSTM", 1536, 8, "tf32", 1))
"""Kind, width, samples, precision and layers of recurrent layers over 50 steps."""


def prepared(dtype: str) -> Any:
    """Return torch's type of a precision, with TF32 allowed where it is asked for."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = dtype == "tf32"
    return {"fp16": torch.float16, "bf16": torch.bfloat16}.get(dtype, torch.float32)


def seconds_of(run: Callable[[], Any]) -> float:
    """Return the median seconds of an operation, launched again and again."""
    import torch

    def timed(turns: int) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(turns):
            run()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / turns

    timed(1)
    turns = max(2, round(LEAST_S / max(timed(2), 1e-6)))
    return median(timed(turns) for _ in range(TIMINGS))


def products() -> Iterator[dict]:
    """Yield the products of a layer in three layouts."""
    import torch

    for dtype, m, (n, k), (layout, turned) in product(
        ("tf32", "bf16", "fp32"), ROWS, WIDTHS, LAYOUTS.items()
    ):
        if dtype == "fp32" and layout != "forward":
            continue
        kind = prepared(dtype)
        shapes = {"forward": ((m, k), (n, k)), "input": ((m, n), (n, k)), "weight": ((m, n), (m, k))}[layout]
        a, b = (torch.randn(shape, device="cuda").to(kind) for shape in shapes)
        a, b = a.t() if turned[0] else a, b.t() if turned[1] else b
        yield {
            "op": "product",
            "dtype": dtype,
            "layout": layout,
            "m": m,
            "n": n,
            "k": k,
            "seconds": seconds_of(lambda a=a, b=b: a @ b),
        }


def convolutions() -> Iterator[dict]:
    """Yield convolutions of images and of sound, the three passes apart."""
    import torch
    from torch.ops import aten

    torch.backends.cudnn.benchmark = True
    images = [(64, *sizes, 1) for sizes in CONVOLUTIONS]
    cases = [*product(("tf32", "fp32"), images, ("first", "last"))]
    cases += [*product(("tf32", "fp32"), [(8, 512, 1024, 3, 1, 2000, far) for far in FILTERS], ("sound",))]
    for dtype, (batch, first, last, side, stride, width, apart), layout in cases:
        prepared(dtype)
        flat = layout == "sound"
        space, taps = ((width,), (side,)) if flat else ((width, width), (side, side))
        held = torch.channels_last if layout == "last" else torch.contiguous_format
        image = torch.randn(batch, first, *space, device="cuda").to(memory_format=held)
        weight = torch.randn(last, first, *taps, device="cuda").to(memory_format=held)
        form = ([stride] * len(taps), [apart * (side // 2)] * len(taps), [apart] * len(taps))
        made = aten.convolution(image, weight, None, *form, False, [0] * len(taps), 1)
        back = (made, image, weight, [0], *form, False, [0] * len(taps), 1)
        row = {
            "op": "convolution",
            "dtype": dtype,
            "layout": layout,
            "batch": batch,
            "first": first,
            "last": last,
        }
        row |= {"side": side, "stride": stride, "width": width, "dilation": apart}
        row["forward"] = seconds_of(
            lambda i=image, w=weight, f=form, t=taps: aten.convolution(i, w, None, *f, False, [0] * len(t), 1)
        )
        for name, mask in (("input", [True, False, False]), ("weight", [False, True, False])):
            row[name] = seconds_of(lambda b=back, m=mask: aten.convolution_backward(*b, m))
        yield row


def recurrences() -> Iterator[dict]:
    """Yield recurrent layers and the kernels that they launch."""
    import torch

    for kind, width, batch, dtype, layers in RECURRENT:
        held = prepared(dtype)
        layer = getattr(torch.nn, kind)(width, width, layers, batch_first=True).to("cuda", held).train()
        words = torch.randn(batch, 50, width, device="cuda").to(held).requires_grad_()
        made = layer(words)[0]
        given = torch.ones_like(made)

        def back(made: Any = made, layer: Any = layer, words: Any = words, given: Any = given) -> Any:
            return torch.autograd.grad(made, [words, *layer.parameters()], given, retain_graph=True)

        row = {
            "op": "recurrence",
            "kind": kind,
            "width": width,
            "batch": batch,
            "dtype": dtype,
            "layers": layers,
        }
        row |= {
            "forward": seconds_of(lambda layer=layer, words=words: layer(words)),
            "backward": seconds_of(back),
        }
        for name, run in (("forward", lambda layer=layer, words=words: layer(words)), ("backward", back)):
            row |= {f"{name}_{key}": value for key, value in kernels_of(run).items()}
        yield row


def kernels_of(run: Callable[[], Any]) -> dict[str, Any]:
    """Return kernels by name with calls and milliseconds, and milliseconds from first to last."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        run()
        torch.cuda.synchronize()
    calls: Counter[str] = Counter()
    took: dict[str, float] = defaultdict(float)
    ends: list[tuple[float, float]] = []
    for event in seen.events():
        if str(event.device_type).endswith("CUDA"):
            calls[event.name[:120]] += 1
            took[event.name[:120]] += event.device_time / 1e3
            ends.append((event.time_range.start, event.time_range.end))
    kernels = [
        (name, calls[name], round(took[name], 4)) for name in sorted(took, key=lambda name: -took[name])
    ]
    span = (max(end for _, end in ends) - min(start for start, _ in ends)) / 1e3
    return {"kernels": kernels[:12], "span_ms": round(span, 4)}


def updates() -> Iterator[dict]:
    """Yield what an update of BERT-base's parameters takes, over lists, tensor by tensor and fused."""
    import torch

    from foreshard.profile.networks.catalog import network

    prepared("fp32")
    model, _ = network("bert_base_squad", device="cuda")
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    tensors = len(list(model.parameters()))
    for name, form in product(("Adam", "AdamW", "SGD"), ("foreach", "single", "fused")):
        flags = {"foreach": form == "foreach", "fused": form == "fused"}
        flags |= {"momentum": 0.9} if name == "SGD" else {}
        made = getattr(torch.optim, name)(model.parameters(), lr=1e-6, **flags)
        yield {
            "op": "update",
            "kind": name,
            "form": form,
            "tensors": tensors,
            "seconds": seconds_of(made.step),
        }


def main() -> None:
    """Read the command line, time all kernels and write a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kinds", default="recurrences,products,convolutions,updates")
    words = parser.parse_args()
    import torch

    known = {make.__name__: make for make in (products, convolutions, recurrences, updates)}
    told = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    with words.out.open("a") as file:
        for kind in words.kinds.split(","):
            start = time.perf_counter()
            for row in known[kind]():
                file.write(json.dumps(row | told) + "\n")
            file.flush()
            print(f"{kind}: {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
