"""Training steps on one CUDA device against their predictions: time, memory, energy.

Without a verb the steps of `device_runs.jsonl`, trained on an H200, are compared with what is predicted now,
as a table in markdown. `train`, on a machine with a device, trains each step by the framework's own code and
appends what it took; `predict` writes what is predicted, to be kept before anything is trained; `residuals`
writes what intervals of these frameworks rest on, which no fit has seen. A step is by
transformers under autocast (predicted as `ddp`) or under fully_shard (`hf`), by torchtitan's model,
recomputation, compile and fully_shard (`torchtitan`), or by torchvision under autocast.
fully_shard is on a mesh of one rank, which copies weights and gradients all the same.
Tokens and images lie on the device, weights are drawn at random.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

from device_steps import STEPS_TRAINED, TORCH_TYPES, VALUES_BELOW, Step

WARM_UP, STEPS = 4, 12
OUT = Path(__file__).parents[1] / "src/foreshard/catalog/data/step_residuals.json"


# ---------------------------------------------------------------- predict
def predictions(device: str, steps: Iterable[Step]) -> dict[str, dict[str, Any]]:
    """Return what `foreshard predict` says of steps on one device."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for step in steps:
            words = [sys.executable, "-m", "foreshard", *step.command(device, Path(folder)), "--json"]
            said = json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
            found[step.name] = {
                "step_s": said["step_time_s"],
                "interval_s": said["step_time_interval_s"],
                "parts_s": said["time_breakdown_s"],
                "memory_bytes": said["memory"]["peak_allocated_bytes"],
                "energy_j": said["energy_j_per_step"],
                "features": _features(step, said, Path(folder)) if step.seq else None,
            }
    return found


def _features(step: Step, said: dict[str, Any], folder: Path) -> tuple[float, ...]:
    """Return what intervals compare a step of a language model by."""
    from foreshard.catalog.models import load_model
    from foreshard.predict.interval import features_of
    from foreshard.spec.plan_file import parse_plan

    model = load_model(step.model if isinstance(step.model, str) else str(folder / f"{step.name}.json"))
    return features_of(model, parse_plan(said["plan"]))


def chosen(only: Iterable[str]) -> list[Step]:
    """Return the steps of some names, or all."""
    names = set(only)
    unknown = names - {step.name for step in STEPS_TRAINED}
    if unknown:
        raise SystemExit(f"unknown steps {', '.join(sorted(unknown))}")
    return [step for step in STEPS_TRAINED if not names or step.name in names]


# ---------------------------------------------------------------- train
def build(step: Step, device: str) -> tuple[Any, Callable[[], Any], Any]:
    """Return the model, a function that returns a loss, and the optimizer."""
    makers = {"transformers": _transformers, "sharded": _sharded_transformers}
    makers |= {"torchtitan": _torchtitan, "torchvision": _torchvision, "module": _module}
    makers |= {"catalog": _catalog}
    return makers[step.library](step, device)


def _transformers(step: Step, device: str) -> tuple[Any, Callable[[], Any], Any]:
    import torch

    model, tokens = _of_transformers(step, device)
    if step.recompute == "full":
        model.gradient_checkpointing_enable()
    if step.lora:
        from peft import LoraConfig, get_peft_model

        where = [f"{name}_proj" for name in "qkvo"]
        model = get_peft_model(model.bfloat16(), LoraConfig(r=step.lora, target_modules=where))
    if step.compile:
        model.compile()
    torch.backends.cuda.matmul.allow_tf32 = step.dtype == "tf32"
    wide = nullcontext() if step.dtype == "tf32" else torch.autocast(device, torch.bfloat16)

    def loss() -> Any:
        with wide:
            return model(input_ids=tokens, labels=tokens).loss

    return (
        model,
        loss,
        torch.optim.AdamW([part for part in model.parameters() if part.requires_grad], lr=1e-5),
    )


def _sharded_transformers(step: Step, device: str) -> tuple[Any, Callable[[], Any], Any]:
    """Return a model of transformers as accelerate shards it: a unit a block, in 16 bit but for masters."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model, tokens = _of_transformers(step, device)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16, torch.bfloat16)
    shared = {"mesh": init_device_mesh(device, (1,)), "mp_policy": policy}
    for block in model.model.layers:
        fully_shard(block, **shared)
    fully_shard(model, **shared)

    def loss() -> Any:
        return model(input_ids=tokens, labels=tokens).loss

    return model, loss, torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)


def _of_transformers(step: Step, device: str) -> tuple[Any, Any]:
    """Return a model of transformers with weights at random, and tokens at random."""
    import torch
    import transformers

    given = {key: value for key, value in dict(step.model).items() if key != "architectures"}
    config = transformers.AutoConfig.for_model(given.pop("model_type"), **given)
    config.use_cache = False
    made = getattr(transformers, step.model["architectures"][0])
    with torch.device(device):
        model = made._from_config(config)
    model = model.to(device).train()
    return model, torch.randint(0, config.vocab_size, (step.batch, step.seq), device=device)


def _torchvision(step: Step, device: str) -> tuple[Any, Callable[[], Any], Any]:
    import torch
    import torchvision

    torch.backends.cudnn.benchmark = True
    with torch.device(device):
        model = getattr(torchvision.models, str(step.model))(weights=None)
    layout = torch.contiguous_format if step.channels_first else torch.channels_last
    model = model.to(device, memory_format=layout).train()
    images = torch.randn(step.batch, 3, 224, 224, device=device).to(memory_format=layout)
    narrow = TORCH_TYPES.get(step.dtype)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = step.dtype == "tf32"
    labels = torch.randint(0, 1000, (step.batch,), device=device)

    def loss() -> Any:
        with torch.autocast(device, getattr(torch, narrow)) if narrow else nullcontext():
            return torch.nn.functional.cross_entropy(model(images), labels)

    return model, loss, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


def _module(step: Step, device: str) -> tuple[Any, Callable[[], Any], Any]:
    """Return a module of `device_modules.py` with zeros as its inputs."""
    import device_modules
    import torch

    torch.backends.cudnn.benchmark = True
    model, inputs, loss_of = getattr(device_modules, str(step.model))()
    model = model.to(device).train()
    given = inputs if isinstance(inputs, tuple) else (inputs,)
    made = [torch.zeros(step.batch, *each.shape[1:], dtype=each.dtype, device=device) for each in given]

    def loss() -> Any:
        return loss_of(model(*made))

    return model, loss, torch.optim.AdamW(model.parameters(), lr=1e-5)


def _catalog(step: Step, device: str) -> tuple[Any, Callable[[], Any], Any]:
    """Return a network of the catalog that makes its own loss, in 16 bit as its published runs are."""
    import torch

    from foreshard.profile.networks.catalog import is_mixed, network

    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = step.dtype == "tf32"
    model, inputs = network(str(step.model), device=device)
    narrow = getattr(torch, TORCH_TYPES.get(step.dtype, "float32"))
    whole = step.dtype in TORCH_TYPES and not is_mixed(str(step.model))
    model = model.to(narrow if whole else torch.float32).train()
    made = []
    for each, below in zip(inputs, VALUES_BELOW[str(step.model)], strict=True):
        size = (step.batch, *each.shape[1:])
        if each.is_floating_point():
            made.append(torch.rand(size, device=device, dtype=narrow if whole else torch.float32))
        else:
            made.append(torch.randint(min(1, below - 1), below, size, device=device))

    def loss() -> Any:
        with nullcontext() if whole or narrow is torch.float32 else torch.autocast(device, narrow):
            return model(*made).float()

    return model, loss, torch.optim.AdamW(model.parameters(), lr=1e-6)


def _torchtitan(step: Step, device: str) -> tuple[Any, Callable[[], Any], Any]:
    """Return a model of torchtitan, parallelized by its own code on a mesh of one rank."""
    import importlib

    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    _without_data_readers()
    from torchtitan.components.loss import cross_entropy_loss
    from torchtitan.config import JobConfig
    from torchtitan.distributed.activation_checkpoint import apply_ac

    family, flavor = str(step.size["flavor"]).split(":")
    package = importlib.import_module(f"torchtitan.models.{family}")
    flavors = {"llama3": "llama3_args", "qwen3": "qwen3_args", "deepseek_v3": "deepseekv3_args"}
    args = getattr(package, flavors[family])[flavor]
    for key, value in step.size.items():
        if key != "flavor":
            setattr(args, key, value)
    args.max_seq_len = step.seq
    args.moe_impl = "standard"  # set by its reader of configurations
    args.vocab_size = step.model["vocab_size"]
    spec = package.get_train_spec()
    with torch.device("meta"):
        model = spec.model_cls(args)
    if step.dtype == "fp8":
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig.from_recipe_name(step.recipe)
        convert_to_float8_training(
            model, config=config, module_filter_fn=lambda module, name: not name.endswith("output")
        )
    job = JobConfig()
    job.activation_checkpoint.mode = step.recompute.partition(":")[0]
    job.activation_checkpoint.selective_ac_option = "op"
    infra = importlib.import_module(f"torchtitan.models.{family}.infra.parallelize")
    if step.recompute != "none":
        apply_ac(
            model,
            job.activation_checkpoint,
            model_compile_enabled=step.compile,
            op_sac_save_list=infra._op_sac_save_list,
        )
    if step.compile:
        for name, block in model.layers.named_children():
            model.layers.register_module(name, torch.compile(block, fullgraph=True))
    mesh = init_device_mesh(device, (1,), mesh_dim_names=("fsdp",))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shared = {"mesh": mesh, "mp_policy": policy}
    fully_shard(model.tok_embeddings, **shared)
    for block in model.layers.values():
        fully_shard(block, **shared)
    fully_shard([model.norm, model.output], reshard_after_forward=False, **shared)
    fully_shard(model, **shared)
    model.to_empty(device=device)
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device(device))
    model.train()
    tokens = torch.randint(0, args.vocab_size, (step.batch, step.seq), device=device)

    def loss() -> Any:
        return cross_entropy_loss(model(tokens), tokens)

    return model, loss, torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)


def _without_data_readers() -> None:
    """Let torchtitan be imported where packages that read its data are missing: no data are read here."""
    from unittest.mock import MagicMock

    class Missing(MagicMock):
        __path__: ClassVar[list[str]] = []
        __spec__ = None

    names = [
        "datasets",
        "datasets.distributed",
        "torchdata",
        "torchdata.stateful_dataloader",
        "torchdata.nodes",
    ]
    names += ["tyro", "tyro.extras", "tyro.conf", "tokenizers", "tomli", "torch.utils.tensorboard"]
    for name in names:
        if name not in sys.modules:
            try:
                __import__(name)
            except ImportError:
                sys.modules[name] = Missing()
    if isinstance(sys.modules["torchdata.stateful_dataloader"], MagicMock):
        sys.modules["torchdata.stateful_dataloader"].StatefulDataLoader = type("StatefulDataLoader", (), {})


class Meter:
    """Joules of a device since it was made, of NVML's counter; None where there is none."""

    def __init__(self) -> None:
        try:
            import pynvml

            pynvml.nvmlInit()
            self._counter: Callable[[], int] | None = lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(
                pynvml.nvmlDeviceGetHandleByIndex(0)
            )
            self._counter()
        except Exception as missing:  # a virtual machine may hide the counter
            print(f"no counter of energy: {missing}", file=sys.stderr)
            self._counter = None

    def joules(self) -> float | None:
        """Return the counter."""
        return None if self._counter is None else self._counter() / 1e3


def measured(step: Step, device: str, meter: Meter, kernels: bool) -> dict:
    """Train a step and return its seconds, parts, bytes and joules."""
    import torch

    began = time.perf_counter()
    torch.manual_seed(0)
    torch.cuda.reset_peak_memory_stats()
    model, loss_of, optimizer = build(step, device)
    clipped = step.library in ("torchtitan", "sharded")

    def once(marks: list[Any]) -> Any:
        def mark() -> None:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            marks.append(event)

        mark()
        loss = loss_of()
        mark()
        loss.backward()
        mark()
        if clipped:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    losses = [once([]) for _ in range(WARM_UP)]
    torch.cuda.synchronize()
    ready_s = time.perf_counter() - began
    marks: list[list[Any]] = [[] for _ in range(STEPS + 1)]
    before, start = meter.joules(), time.perf_counter()
    for row in marks[:STEPS]:
        losses.append(once(row))
    torch.cuda.synchronize()
    took_s, after = time.perf_counter() - start, meter.joules()
    once(marks[STEPS])
    torch.cuda.synchronize()

    def between(first: int, second: int) -> float:
        return median(row[first].elapsed_time(row[second]) for row in marks[:STEPS]) / 1e3

    steps = [a[0].elapsed_time(b[0]) / 1e3 for a, b in pairwise(marks)]
    found = {
        "name": step.name,
        "step_s": median(steps),
        "steps_s": steps,
        "mean_s": took_s / STEPS,
        "forward_s": between(0, 1),
        "backward_s": between(1, 2),
        "memory_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "parameters": sum(part.numel() for part in model.parameters()),
        "energy_j": None if before is None or after is None else (after - before) / STEPS,
        "first_loss": float(losses[0]),
        "last_loss": float(losses[-1]),
        "ready_s": ready_s,
    }
    found["rest_s"] = found["step_s"] - found["forward_s"] - found["backward_s"]
    if kernels:
        found["kernels"] = _kernels(lambda: once([]))
    return found


def _kernels(run: Callable[[], Any]) -> list[tuple[str, int, float]]:
    """Return the kernels of one step that take longest: name, calls, milliseconds."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        run()
        torch.cuda.synchronize()
    rows: dict[str, list[float]] = {}
    for event in seen.events():
        if str(event.device_type).endswith("CUDA") and not event.name.startswith("ProfilerStep"):
            row = rows.setdefault(event.name[:160], [0, 0.0])
            row[0] += 1
            row[1] += event.device_time / 1e3
    ranked = sorted(rows.items(), key=lambda item: -item[1][1])[:60]
    return [(name, int(calls), round(took, 4)) for name, (calls, took) in ranked]


def trained(out: Path, only: Iterable[str], kernels: bool, last_s: float) -> None:
    """Train every step and append a line for each."""
    import torch
    import torch.distributed as dist

    began = time.perf_counter()
    with tempfile.NamedTemporaryFile() as store:
        dist.init_process_group("nccl", store=dist.FileStore(store.name, 1), rank=0, world_size=1)
        meter = Meter()
        for step in chosen(only):
            if time.perf_counter() - began > last_s:
                print(f"{step.name}: no time left", flush=True)
                continue
            try:
                row = measured(step, "cuda", meter, kernels)
            except Exception as error:
                row = {"name": step.name, "error": traceback.format_exc()[-3000:]}
                print(step.name, type(error).__name__, str(error)[:300], flush=True)
            else:
                print(
                    f"{step.name:24} {1e3 * row['step_s']:9.2f} ms {row['memory_bytes'] / 2**30:7.2f} GiB "
                    f"ready {row['ready_s']:.0f} s",
                    flush=True,
                )
            row |= {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "step": asdict(step)}
            with out.open("a") as file:
                file.write(json.dumps(row) + "\n")
            gc.collect()
            torch._dynamo.reset()
            torch.cuda.empty_cache()
        dist.destroy_process_group()


# ---------------------------------------------------------------- table
def compared(runs: Path, only: Iterable[str]) -> None:
    """Print a table of errors, in markdown."""
    rows = {row["name"]: row for row in map(json.loads, runs.read_text().splitlines()) if "error" not in row}
    steps = [step for step in chosen(only) if step.name in rows]
    device = catalog_name(rows[steps[0].name]["device"])
    said = predictions(device, steps)
    print("| step | batch x tokens | predicted (ms) | measured (ms) | error | 90 % | memory | energy |")
    print("|---|---|---|---|---|---|---|---|")
    found: dict[str, list[float]] = {"step_s": [], "memory_bytes": [], "energy_j": []}
    for step in steps:
        told, row = said[step.name], rows[step.name]
        errors = {key: told[key] / row[key] - 1.0 for key in found if told[key] and row[key]}
        for key, error in errors.items():
            found[key].append(abs(error))
        low, high = told["interval_s"]
        inside = "inside" if low <= row["step_s"] <= high else "outside"
        size = f"{step.batch} x {step.seq}" if step.seq else f"{step.batch}"
        shown = [f"{errors[key]:+.1%}" if key in errors else "" for key in ("memory_bytes", "energy_j")]
        print(
            f"| {step.name} | {size} | {1e3 * told['step_s']:.1f} | {1e3 * row['step_s']:.1f} "
            f"| {errors['step_s']:+.1%} | {inside} | {shown[0]} | {shown[1]} |"
        )
    middle = ", ".join(f"{key.split('_')[0]} {median(errors):.1%}" for key, errors in found.items() if errors)
    print(f"\n{len(steps)} steps on {device}: median errors {middle}")


def written(runs: Iterable[Path]) -> None:
    """Write the residuals of steps of language models, which intervals of their frameworks rest on.

    Without those that ran what a prediction says it does not model: experts in 32 bit under autocast, casts
    to 8 bit that are not compiled, attention sinks.
    """
    from foreshard.catalog.devices import resolve_device

    cases = []
    for path in runs:
        lines = map(json.loads, path.read_text().splitlines())
        rows = {row["name"]: row for row in lines if "error" not in row}
        steps = [step for step in chosen([]) if step.seq and step.name in rows]
        steps = [step for step in steps if (step.kind, step.library) != ("experts", "transformers")]
        steps = [step for step in steps if step.dtype != "fp8" or step.compile]
        steps = [step for step in steps if not step.name.startswith("hf-gpt-oss")]
        device = resolve_device(rows[steps[0].name]["device"])
        said = predictions(device.name, steps)
        for step in steps:
            ratio = rows[step.name]["step_s"] / said[step.name]["step_s"]
            kind = "lora" if step.lora else {"experts": "moe"}.get(step.kind, step.kind)
            cases.append(
                {
                    "name": f"{step.name} on {device.name}",
                    "framework": step.framework.partition("@")[0],
                    "architecture": device.arch,
                    "kind": kind,
                    "residual": round(math.log(ratio), 4),
                    "features": [round(value, 3) for value in said[step.name]["features"]],
                }
            )
    made = {"schema_version": 1, "written_by": "bench/bench_device.py residuals", "cases": cases}
    OUT.write_text(json.dumps(made, indent=1) + "\n")
    print(f"{len(cases)} steps: {OUT}")


def catalog_name(device: str) -> str:
    """Return the catalog's name of a device that torch names."""
    from foreshard.catalog.devices import resolve_device

    return resolve_device(device).name


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="names of steps")
    parser.add_argument("--runs", type=Path, default=Path(__file__).parent / "device_runs.jsonl")
    verbs = parser.add_subparsers(dest="verb")
    predict = verbs.add_parser("predict")
    predict.add_argument("--device", default="h200-sxm")
    predict.add_argument("--out", type=Path, required=True)
    train = verbs.add_parser("train")
    train.add_argument("--out", type=Path, required=True)
    train.add_argument("--kernels", action="store_true", help="also the kernels that take longest")
    train.add_argument("--last-s", type=float, default=1e9, help="begin no step later than this")
    residuals = verbs.add_parser("residuals", help="what intervals of these frameworks rest on")
    residuals.add_argument("all_runs", nargs="+", type=Path, metavar="RUNS")
    words = parser.parse_args()
    only = [name for name in words.only.split(",") if name]
    if words.verb == "predict":
        found = {"device": words.device, "steps": predictions(words.device, chosen(only))}
        words.out.write_text(json.dumps(found, indent=1) + "\n")
    elif words.verb == "train":
        trained(words.out, only, words.kernels, words.last_s)
    elif words.verb == "residuals":
        written(words.all_runs)
    else:
        compared(words.runs, only)


if __name__ == "__main__":
    main()
