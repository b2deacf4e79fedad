"""Plans of traced modules as Python that wraps the module: FSDP2 by the layers of the chain, or replicas.

Source: torch 2.13 (distributed/fsdp/_fully_shard, nn/parallel/distributed.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from foreshard.errors import SpecError
from foreshard.interop.exporters.exported import ExportRequest, filled
from foreshard.interop.exporters.uniform import Uniform, required_uniform
from foreshard.spec.plan import Plan
from foreshard.spec.traced_module import TracedModule
from foreshard.units import number_of

FILE = "parallel.py"
_DTYPES = {"fp16": "torch.float16", "bf16": "torch.bfloat16"}


def export_traced(
    request: ExportRequest, module: TracedModule
) -> tuple[tuple[tuple[str, str], ...], list[str]]:
    """Return ``parallel.py``, whose function wraps the module as the plan says, and notes."""
    plan = request.plan
    layers = plan.groups[0].num_layers
    if layers != len(module.layers):
        raise SpecError(
            f"the plan splits {layers} layers, {module.name} has {len(module.layers)}",
            key="groups.stages.layers",
            value=layers,
            rule="A plan holds every layer of the chain that was traced",
            fix=f"Plan again: foreshard plan {module.source} CLUSTER --global-batch {plan.global_batch}",
        )
    degrees = required_uniform(request, _gaps)
    sharded = degrees.zero >= 2
    text = filled(
        "sharded.py.txt" if sharded else "replicated.py.txt",
        name=module.name,
        source=module.source,
        ranks=number_of(len(degrees.ranks), "rank"),
        micro_batch=degrees.micro_batch,
        num_micro_batches=degrees.num_micro_batches,
        units=_units(module),
        policy=_policy(module),
        reshard=degrees.zero == 3,
    )
    return ((FILE, text),), list(_notes(plan, module, sharded=sharded, degrees=degrees))


def _gaps(request: ExportRequest, degrees: Uniform) -> Iterator[str]:
    if degrees.tp > 1:
        yield f"tp {degrees.tp} (no tool splits any module by itself: plan with --max-tp 1)"
    for name, value in (("pp", degrees.pp), ("cp", degrees.cp), ("ep", degrees.ep)):
        if value > 1:
            yield f"{name} {value}"
    if degrees.zero == 1:
        yield "zero 1 (replicas are zero 0, FSDP2 is zero 2 and 3)"
    if degrees.zero and degrees.shard_size != degrees.dp:
        yield f"a shard group of {degrees.shard_size} in {degrees.dp} replicas"
    if degrees.recompute != "none":
        yield f"recompute {degrees.recompute} (call torch.utils.checkpoint in the module, it is traced so)"
    if degrees.offload != "none":
        yield f"offload {degrees.offload}"
    traced = request.traced
    if traced and degrees.zero and not traced.source.rpartition(":")[0].endswith(".py"):
        yield f"units of {traced.name} by name, whose modules are not named as yours (give module.py:factory)"


def _units(module: TracedModule) -> str:
    """Return the modules of each layer as lines of a tuple."""
    lines = [f"    {layer.modules!r},  # {layer.name}\n" for layer in module.layers if layer.modules]
    return "".join(lines)


def _policy(module: TracedModule) -> str:
    """Return the precision of gathered weights: 16 bit where the whole module was traced so."""
    if not module.casts_weights or module.precision not in _DTYPES:
        return "MixedPrecisionPolicy()"
    dtype = _DTYPES[module.precision]
    return f"MixedPrecisionPolicy(param_dtype={dtype}, reduce_dtype=torch.float32)"


def _notes(plan: Plan, module: TracedModule, *, sharded: bool, degrees: Uniform) -> Iterator[str]:
    yield f"Launch {len(degrees.ranks)} ranks with torchrun, and step {plan.optimizer}."
    dtype = _DTYPES.get(module.precision)
    if dtype and not (sharded and module.casts_weights):
        yield f"Compute inside of torch.autocast(device, {dtype}), unless the module does."
    if module.precision == "tf32":
        yield "Products in TF32 are asked for: torch.backends.cuda.matmul.allow_tf32 = True."
    if module.precision == "fp16":
        yield "Gradients in fp16 need a loss that is scaled (torch.amp.GradScaler)."
    if degrees.num_micro_batches > 1 and not sharded:
        yield "Only the last micro-batch of a step sums gradients: run the others inside of no_sync()."
