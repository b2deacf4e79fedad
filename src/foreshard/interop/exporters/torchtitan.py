"""Plans for torchtitan: the TOML file of releases up to 0.2, the recipe module of 0.3.

Source: torchtitan 0.2.2 (torchtitan/config/job_config.py, distributed/pipeline_parallel.py) and 0.3.0
(torchtitan/config/configs.py, trainer.py, distributed/activation_checkpoint.py, models/*/__init__.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from foreshard.catalog.frameworks import load_framework
from foreshard.catalog.shipped import shipped
from foreshard.errors import SpecError
from foreshard.interop.exporters.exported import ExportRequest, filled
from foreshard.interop.exporters.uniform import Gaps, Uniform, option_gaps, overlap_gaps, required_uniform
from foreshard.spec.model import Model
from foreshard.spec.plan import Plan

_NOTES = ["Yours to add: data, tokenizer assets, learning rate, steps."]
_SCHEDULES = {
    "1f1b": "1F1B",
    "gpipe": "GPipe",
    "interleaved": "Interleaved1F1B",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}

_NO_PIPELINE_02 = ("qwen3", "gpt_oss")  # `pipelining_fn=None` in their train specs
_WITHOUT = "a config.json with num_nextn_predict_layers 0 plans without"


def export_toml(request: ExportRequest) -> tuple[str, list[str]]:
    """Return ``train.toml`` for ``torchtitan.train --job.config_file train.toml`` of releases up to 0.2.2."""
    degrees, family, flavor = _known(request, _gaps_02)
    lines = [f"# {request.version}, {len(degrees.ranks)} ranks; add data, tokenizer, learning rate and steps"]
    for name, values in _sections_02(request.plan, degrees, family, flavor).items():
        lines += ["", f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())]
    return "\n".join(lines) + "\n", _notes(request)


def export_recipe(request: ExportRequest) -> tuple[str, list[str]]:
    """Return ``foreshard_recipe.py`` for ``--module foreshard_recipe --config planned`` of torchtitan 0.3."""
    return _recipe(request, *_known(request, _gaps_03)), _notes(request)


def _notes(request: ExportRequest) -> list[str]:
    assert request.model is not None
    return [*_NOTES, *_facts_notes(request.model)]


def flavor_of(model: Model) -> tuple[str, str] | None:
    """Return torchtitan's family and flavor of the same sizes, None where it ships none."""
    first, last = model.blocks[0], model.blocks[-1]
    sizes = [model.num_layers, model.hidden, last.num_heads, last.num_kv_heads, model.vocab]
    sizes += [first.ffn, last.num_experts, last.top_k, last.expert_ffn]
    for family, flavors in shipped("flavors.toml", "foreshard.interop.exporters").items():
        for flavor, known in flavors.items():
            if sizes == known[: len(sizes)] and last.qk_norm == (family == "qwen3"):
                return family, flavor
    return None


def _known(request: ExportRequest, gaps: Gaps) -> tuple[Uniform, str, str]:
    if request.model is None:
        rule = "torchtitan trains models it ships, by family and flavor"
        fix = "Give MODEL after the plan"
        raise SpecError(f"{request.target} needs the model", key="MODEL", rule=rule, fix=fix)
    of_model = tuple(model_gaps(request.model))
    degrees = required_uniform(request, lambda *_: of_model, _gaps, gaps)
    named = flavor_of(request.model)
    assert named is not None
    return degrees, *named


def model_gaps(model: Model) -> Iterator[str]:
    """Yield why no plan of a model can be trained."""
    if flavor_of(model) is None:
        yield f"{model.name} (it ships Llama 3, Qwen 3, DeepSeek V2 and V3, and gpt-oss)"
    yield from _facts_gaps(model)


def _facts_gaps(model: Model) -> Iterator[str]:
    """Yield facts of the model that the flavor of its sizes has otherwise."""
    named = flavor_of(model)
    if named is None:
        return
    tied, base, *_ = _facts(named)
    if model.tied_embeddings != tied:
        yield f"{'tied' if model.tied_embeddings else 'untied'} embeddings (its {named[1]} has others)"
    if model.rope_base not in (None, base):
        yield f"rotary positions of base {model.rope_base:,.0f} (its {named[1]} has {base:,})"


def _facts_notes(model: Model) -> list[str]:
    """Return in which factor of rotary positions and epsilon of norms the flavor differs."""
    named = flavor_of(model)
    assert named is not None
    _, _, factor, epsilon = _facts(named)
    notes = []
    own = float(model.rope_scaling[1]) if model.rope_scaling else 1.0
    if own != factor:
        notes.append(f"Its {named[1]} scales rotary positions by {factor}, {model.name} by {own:g}.")
    if model.norm_eps not in (None, epsilon):
        notes.append(
            f"Its {named[1]} has an epsilon of {epsilon:g} in norms, {model.name} {model.norm_eps:g}."
        )
    return notes


def _facts(named: tuple[str, str]) -> list[Any]:
    """Return tied embeddings, base and factor of rotary positions, and epsilon of norms of a flavor."""
    family, flavor = named
    known: list[Any] = shipped("flavors.toml", "foreshard.interop.exporters")[family][flavor]
    return known[-4:]


def _gaps(request: ExportRequest, degrees: Uniform) -> Iterator[str]:
    """Yield what neither release can say."""
    plan = request.plan
    if degrees.schedule not in _SCHEDULES:
        yield f"schedule {degrees.schedule} as it is modelled (it has {', '.join(_SCHEDULES)})"
    if plan.optimizer != "adamw":
        yield f"optimizer {plan.optimizer}"
    if plan.precision not in ("fp32", "bf16", "fp8"):
        yield f"precision {plan.precision} for every matrix product"
    if degrees.zero == 1:
        yield "zero 1 (it shards weights too, zero 2 and 3, or nothing)"
    if degrees.zero and degrees.shard_size % degrees.cp:
        yield f"a shard group of {degrees.shard_size} that splits the context group of {degrees.cp}"
    if degrees.zero == 0 and degrees.cp > 1:
        yield "zero 0 with context parallelism (its context ranks shard the weights)"
    if degrees.offload not in ("none", "all"):
        yield f"offload {degrees.offload} (it offloads weights, gradients and optimizer together)"
    if degrees.offload == "all":
        yield "offload all (it offloads no activations)"
    if plan.compile is False and _async_tp(plan, degrees):
        yield "overlapped tensor parallelism without compile (it is a pass of the compiler)"
    kind = degrees.recompute.partition(":")
    if kind[0] == "full" and kind[2]:
        yield f"recompute {degrees.recompute} (full recomputes every block)"
    if kind[0] == "selective" and kind[2] != "op":
        yield f"recompute {degrees.recompute} (its selective rule is selective:op)"


def _gaps_02(request: ExportRequest, degrees: Uniform) -> Iterator[str]:
    family = (flavor_of(request.model) or ("",))[0] if request.model else ""
    yield from option_gaps(request.plan, "torchtitan@0.2")
    yield from overlap_gaps(request.plan, "torchtitan@0.2")
    if degrees.pp > 1 and family in _NO_PIPELINE_02:
        yield f"pp {degrees.pp} of {family} (it pipelines Llama 3 and DeepSeek)"
    if request.model and request.model.num_next_token:
        yield f"the next-token layers of {request.model.name} ({_WITHOUT})"
    if degrees.tp > 1 and not degrees.sp:
        yield "tensor parallelism without sequence parallelism"
    if degrees.ep > 1 and degrees.etp not in (1, degrees.tp):
        yield f"etp {degrees.etp} (it has 1 or tp)"


def _gaps_03(request: ExportRequest, degrees: Uniform) -> Iterator[str]:
    if request.model and request.model.num_next_token and degrees.pp * degrees.cp > 1:
        yield f"the next-token layers of {request.model.name} under pp or cp ({_WITHOUT})"
    yield from option_gaps(request.plan, "torchtitan@0.3", writes=("cuda_graphs",))
    yield from overlap_gaps(request.plan, "torchtitan@0.3")
    graphs = request.plan.overrides.cuda_graphs
    if graphs == "partial" or (graphs == "full" and not _graphs(request.plan, degrees)):
        yield f"cuda_graphs {graphs} (it has full, without pp and ep, or none)"
    if _narrow_gather(request.plan):
        yield "narrow_gather (its scales per row gather in 16 bit)"
    if degrees.etp > 1:
        yield f"etp {degrees.etp} (experts are not cut)"
    if degrees.recompute.startswith("every-"):
        yield f"recompute {degrees.recompute} (full or selective:op)"


def _data_parallel(degrees: Uniform) -> tuple[int, int]:
    """Return (replicate, shard) degrees; context ranks shard beside the latter."""
    if degrees.zero == 0:
        return degrees.dp, 1
    shard = degrees.shard_size // degrees.cp
    return degrees.dp // shard, shard


def _parts(degrees: Uniform, head: str) -> list[list[str]]:
    """Return the module names of each virtual stage; torchtitan gives them to ranks as the schedule asks."""
    last = degrees.num_blocks + 1
    parts = []
    for start, stop in sorted(degrees.chunks()):
        names = ["tok_embeddings"] if start == 0 else []
        names += [f"layers.{i - 1}" for i in range(max(start, 1), min(stop, last))]
        parts.append(names + (["norm", head] if stop > last else []))
    return parts


def _narrow_gather(plan: Plan) -> bool:
    return plan.precision == "fp8" and bool(plan.comm.get("narrow_gather"))


def _async_tp(plan: Plan, degrees: Uniform) -> bool:
    default = load_framework(plan.framework).tp_overlap
    return degrees.tp > 1 and bool(plan.comm.get("tp_overlap", default))


def _compiles(plan: Plan, degrees: Uniform) -> bool:
    """Return whether to compile; asynchronous tensor parallelism is a pass of the compiler."""
    return bool(plan.compile) or _async_tp(plan, degrees)


def _reshards(degrees: Uniform) -> str:
    """Return the policy that predictions are of: by default pipelines keep weights gathered."""
    if degrees.zero < 3:
        return "never"
    return "always" if degrees.pp == 1 else "default"


def _parallelism(degrees: Uniform, head: str) -> dict[str, Any]:
    replicate, shard = _data_parallel(degrees)
    made: dict[str, Any] = {
        "data_parallel_replicate_degree": replicate,
        "data_parallel_shard_degree": shard,
        "fsdp_reshard_after_forward": _reshards(degrees),
        "tensor_parallel_degree": degrees.tp,
        "context_parallel_degree": degrees.cp,
        "pipeline_parallel_degree": degrees.pp,
        "expert_parallel_degree": degrees.ep,
    }
    if degrees.pp > 1:
        made["pipeline_parallel_schedule"] = _SCHEDULES[degrees.schedule]
        made["module_fqns_per_model_part"] = _parts(degrees, head)
        made["pipeline_parallel_microbatch_size"] = degrees.micro_batch
    return made


def _training(plan: Plan, degrees: Uniform) -> dict[str, Any]:
    passes = degrees.num_micro_batches if degrees.pp > 1 else 1
    return {
        "local_batch_size": degrees.micro_batch * passes,
        "global_batch_size": plan.global_batch,
        "seq_len": plan.seq_len,
        "mixed_precision_param": "float32" if plan.precision == "fp32" else "bfloat16",
    }


def _sections_02(plan: Plan, degrees: Uniform, family: str, flavor: str) -> dict[str, dict[str, Any]]:
    parallelism = _parallelism(degrees, "output")
    parallelism["expert_tensor_parallel_degree"] = degrees.etp
    parallelism["enable_async_tensor_parallel"] = _async_tp(plan, degrees)
    if degrees.schedule == "dualpipev" and degrees.ep > 1:
        # On by default, and refused with any recomputing (dual_pipe_v.py); no plan of it hides experts.
        parallelism["pipeline_parallel_expert_parallel_overlap"] = False
    if plan.dispatcher == "deepep":
        parallelism["expert_parallel_comm_backend"] = "deepep"
    model: dict[str, Any] = {"name": family, "flavor": flavor}
    if plan.precision == "fp8":
        model["converters"] = ["quantize.linear.float8"]
    sections: dict[str, dict[str, Any]] = {
        "model": model,
        "optimizer": {"name": "AdamW"},
        "training": _training(plan, degrees),
        "parallelism": parallelism,
        "activation_checkpoint": _checkpoint_02(degrees.recompute),
        "compile": {"enable": _compiles(plan, degrees)},
    }
    scaled: dict[str, Any] = {"enable_fsdp_float8_all_gather": True} if _narrow_gather(plan) else {}
    if plan.fp8_recipe == "rowwise":  # tensorwise is what it does without a name, and alone gathers in 8 bit
        scaled["recipe_name"] = plan.fp8_recipe
    if scaled:
        sections["quantize.linear.float8"] = scaled
    return sections


def _checkpoint_02(rule: str) -> dict[str, str]:
    if rule.startswith("every-"):
        return {"mode": "selective", "selective_ac_option": rule.removeprefix("every-")}
    if rule == "selective:op":
        return {"mode": "selective", "selective_ac_option": "op"}
    return {"mode": rule}


def _recipe(request: ExportRequest, degrees: Uniform, family: str, flavor: str) -> str:
    plan = request.plan
    parallelism = _parallelism(degrees, "lm_head") | {"enable_sequence_parallel": degrees.sp}
    training = _training(plan, degrees) | {"disable_cuda_graphs": not _graphs(plan, degrees)}
    checkpoint = {"none": None, "full": "FullAC", "selective:op": "SelectiveAC"}[degrees.recompute]
    compiled = _compiles(plan, degrees)
    quantized = plan.precision == "fp8"
    options = f"filter_fqns=['lm_head'], model_compile_enabled={compiled}"
    registered = [f"converters=[Float8LinearConverter.Config({options})]"] if quantized else []
    next_token = request.model.num_next_token if request.model else 0
    if plan.dispatcher in ("deepep", "hybridep"):
        registered.append(f"moe_comm_backend={plan.dispatcher!r}")
    if next_token:
        registered.append(f"num_mtp_layers={next_token}")
    return filled(
        "foreshard_recipe.py.txt",
        version=request.version,
        family=family,
        flavor=flavor,
        num_ranks=len(degrees.ranks),
        import_quantization=_IMPORT_QUANTIZATION if quantized else "",
        import_checkpoint=f"{_IMPORT_CHECKPOINT}{checkpoint}\n" if checkpoint else "",
        import_loss=_IMPORT_NEXT_TOKEN if next_token else _IMPORT_LOSS,
        loss=_LOSS_NEXT_TOKEN if next_token else _LOSS,
        registered="".join(f", {option}" for option in registered),
        training=_arguments(training),
        parallelism=_arguments(parallelism),
        checkpoint=f"{checkpoint}.Config()" if checkpoint else None,
        compiled=compiled,
        asynchronous=_async_tp(plan, degrees),
    )


_IMPORT_QUANTIZATION = "from torchtitan.components.quantization import Float8LinearConverter\n"
_IMPORT_LOSS = "from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss"
_LOSS = """ChunkedLossWrapper.Config(
            loss_fn=CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(model_spec)),
        )"""
_IMPORT_NEXT_TOKEN = "from torchtitan.models.deepseek_v3.mtp import MTPLoss"
_LOSS_NEXT_TOKEN = "MTPLoss.Config(global_vocab_size=decoder_vocab_size(model_spec))"
_IMPORT_CHECKPOINT = "from torchtitan.distributed.activation_checkpoint import "


def _graphs(plan: Plan, degrees: Uniform) -> bool:
    """Return whether steps run as CUDA graphs: as predicted, and never with pipelines or spread experts."""
    graphs = plan.overrides.cuda_graphs or load_framework(plan.framework).cuda_graphs
    return graphs == "full" and degrees.pp == degrees.ep == 1


def _arguments(values: dict[str, Any]) -> str:
    return "\n".join(f"            {key}={value!r}," for key, value in values.items())
