"""A decoder trained by torch's FSDP2 and pipeline on fake ranks; torch's FSDPMemTracker counts its bytes.

Modules compute and save what torchtitan's do on a GPU; where the CPU has another kernel (the fused norm),
an autograd function allocates and saves what the GPU's does. Tensors are fake: nothing is computed.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.pipelining import schedules as torch_schedules
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

NUM_SHARDS = 8
SELECTIVE, FULL = "selective:op", "full"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """A decoder and a micro-batch; with `num_experts` every MLP is a layer of experts of that width."""

    layers: int = 4
    hidden: int = 1024
    heads: int = 16
    kv_heads: int = 4
    ffn: int = 3584
    vocab: int = 2000
    num_experts: int = 0
    top_k: int = 2
    samples: int = 2
    seq_len: int = 2048

    @property
    def rotations(self) -> tuple[int, ...]:
        """Shape of the rotary table."""
        return (1, self.seq_len, 1, self.hidden // self.heads // 2)


class _FusedNorm(torch.autograd.Function):
    """The GPU's RMSNorm: saves its input and one number per token."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        scale = torch.empty((*x.shape[:-1], 1), dtype=torch.float32)
        ctx.save_for_backward(x, weight, scale)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


class _Norm(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden))

    def forward(self, x: Tensor) -> Tensor:
        return _FusedNorm.apply(x, self.weight)


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


class _Attention(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.width = sizes.hidden // sizes.heads
        self.q = _linear(sizes.hidden, sizes.hidden)
        self.k = _linear(sizes.hidden, sizes.kv_heads * self.width)
        self.v = _linear(sizes.hidden, sizes.kv_heads * self.width)
        self.out = _linear(sizes.hidden, sizes.hidden)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        shape = (*x.shape[:2], -1, self.width)
        q, k, v = (product(x).view(shape) for product in (self.q, self.k, self.v))
        q, k, v = (t.transpose(1, 2) for t in (_rotated(q, table), _rotated(k, table), v))
        made = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(made.transpose(1, 2).reshape(x.shape))


def _rotated(x: Tensor, table: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * table).flatten(3).type_as(x)


class _Gated(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.gate = _linear(sizes.hidden, sizes.ffn)
        self.down = _linear(sizes.ffn, sizes.hidden)
        self.up = _linear(sizes.hidden, sizes.ffn)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class _Experts(nn.Module):
    """Routed experts without capacity, every expert with the same number of tokens."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.count, self.top_k = sizes.num_experts, sizes.top_k
        self.router = _linear(sizes.hidden, self.count)
        up, down = (self.count, sizes.ffn, sizes.hidden), (self.count, sizes.hidden, sizes.ffn)
        self.gate, self.down, self.up = (nn.Parameter(torch.empty(shape)) for shape in (up, down, up))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        scores = torch.sigmoid(F.linear(tokens.float(), self.router.weight.float()))
        chosen = torch.topk(scores, self.top_k, dim=-1, sorted=False)[1]
        order = torch.argsort(chosen.view(-1), stable=True)
        weights = (scores.gather(-1, chosen) * 1.0).view(-1)[order]
        source = order // self.top_k
        sent = tokens[source].view(self.count, -1, x.shape[-1])
        inner = F.silu(torch.bmm(sent, self.gate.transpose(1, 2)))
        inner = inner * torch.bmm(sent, self.up.transpose(1, 2))
        made = torch.bmm(inner, self.down.transpose(1, 2)).flatten(0, 1)
        made = (made.float() * weights[:, None]).to(x.dtype)
        target = source[:, None].expand(-1, x.shape[-1])
        return torch.zeros_like(tokens).scatter_add(0, target, made).view(x.shape)


class _Block(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.attention = _Attention(sizes)
        self.mlp = _Experts(sizes) if sizes.num_experts else _Gated(sizes)
        self.norms = nn.ModuleList(_Norm(sizes.hidden) for _ in range(2))

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x), table)
        return x + self.mlp(self.norms[1](x))


class _Head(nn.Module):
    """Final norm and head, one unit. The norm comes last: the tracker keeps the last gradient it has seen."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.product = _linear(sizes.hidden, sizes.vocab)
        self.norm = _Norm(sizes.hidden)

    def forward(self, x: Tensor, part: str = "all") -> Tensor:
        x = x if part == "product" else self.norm(x)
        return x if part == "norm" else self.product(x)


class _Unit(nn.Module):
    """Blocks that are gathered together."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, table)
        return x


class _Stage(nn.Module):
    def __init__(self, sizes: Sizes, layers: int, *, first: bool, last: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocab, sizes.hidden) if first else None
        self.layers = nn.ModuleList(_Block(sizes) for _ in range(layers))
        self.head = _Head(sizes) if last else None
        self.table: Tensor | None = None

    def forward(self, x: Tensor, part: str = "all") -> Tensor:
        x = x if self.embedding is None else self.embedding(x)
        for layer in self.layers:
            x = layer(x, self.table)
        return x if self.head is None else self.head(x, part)


def _every_second_product() -> Callable[..., CheckpointPolicy]:
    """Return torchtitan's policy: attention, choices of experts and every second product stay."""
    seen = {False: 0, True: 0}
    kept = (
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.aten.topk.default,
    )

    def policy(ctx, op, *args, **_kwargs) -> CheckpointPolicy:
        save = op in kept
        if op is torch.ops.aten.mm.default and args[0].dtype is torch.bfloat16:  # not the router
            seen[ctx.is_recompute] += 1
            save = seen[ctx.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def _wrapped(layer: nn.Module, recompute: str) -> nn.Module:
    if recompute == FULL:
        return checkpoint_wrapper(layer, early_stop=False)
    if recompute == SELECTIVE:
        return checkpoint_wrapper(
            layer,
            early_stop=False,
            context_fn=lambda: create_selective_checkpoint_contexts(_every_second_product()),
        )
    return layer


def _sharded(
    stage: _Stage,
    mesh: DeviceMesh,
    recompute: str,
    *,
    pipeline: bool,
    wrap: int | str = 1,
    prefetch: int | None = None,
    reduce_dtype: torch.dtype = torch.float32,
) -> _Stage:
    """Return the stage in torchtitan's units; the last of them stays gathered after its forward.

    `wrap` blocks are a unit, 'model' makes one of all; so many units as `prefetch` are gathered ahead.
    """
    for i, layer in enumerate(stage.layers):
        stage.layers[i] = _wrapped(layer, recompute)
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype, cast_forward_inputs=False
    )
    options = {"mesh": mesh, "mp_policy": policy}
    if wrap == "model":
        fully_shard(stage, **options).set_gradient_divide_factor(1.0)
        return stage
    if wrap > 1:
        layers = list(stage.layers)
        stage.layers = nn.ModuleList(_Unit(layers[i : i + wrap]) for i in range(0, len(layers), wrap))
    if stage.embedding is not None:
        fully_shard(stage.embedding, **options, reshard_after_forward=not pipeline)
    if stage.head is not None:
        fully_shard(stage.head, **options, reshard_after_forward=False)
    for layer in stage.layers:
        fully_shard(layer, **options, reshard_after_forward=not pipeline)
    fully_shard(stage, **options)
    if prefetch is not None:
        units = [stage.embedding, *stage.layers, stage.head]
        for i, unit in enumerate(units):
            unit.set_modules_to_forward_prefetch(units[i + 1 : i + 1 + prefetch])
            unit.set_modules_to_backward_prefetch(units[max(i - prefetch, 0) : i][::-1])
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
    return stage


class _Tracker(FSDPMemTracker):
    """Counts the peak of the second step: the optimizer's first one traces whole tensors."""

    @contextmanager
    def step(self):
        self.reset_mod_stats()
        self._peak_mem.clear()
        self._peak_mem_snap.clear()
        yield

    @property
    def peak_bytes(self) -> int:
        snapshot = self.get_tracker_snapshot("peak")
        return next(sum(parts.values()) - parts["Total"] for d, parts in snapshot.items() if d.type == "cpu")


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, -2), labels.flatten(), reduction="sum")


def _step_in_chunks(stage: _Stage, tokens: Tensor, labels: Tensor, num_chunks: int) -> None:
    """Run forward and backward with torchtitan's loss in chunks."""
    head, hidden = stage.head, stage(tokens, "norm").flatten(0, 1)
    chunks = [part.detach().requires_grad_() for part in hidden.chunk(num_chunks)]
    total = torch.zeros_like(hidden, dtype=torch.float32)
    head.set_reshard_after_forward(False)
    head.set_reshard_after_backward(False)
    head.set_requires_gradient_sync(False, recurse=False)
    head.unshard()
    for i, (chunk, own) in enumerate(zip(chunks, labels.flatten().chunk(num_chunks), strict=True)):
        head.set_requires_gradient_sync(i == num_chunks - 1, recurse=False)
        logits = head(chunk, "product")
        loss = _loss(logits, own)
        loss.backward()
        total[i * len(own) : (i + 1) * len(own)] = chunk.grad
        chunk.grad = None
    head.set_reshard_after_forward(True)
    head.set_reshard_after_backward(True)
    head.reshard()
    del logits, loss, chunk, chunks
    gradient = total.to(hidden.dtype)
    del total
    hidden.backward(gradient)


def flat_peak(
    sizes: Sizes,
    recompute: str,
    *,
    num_chunks: int = 1,
    num_steps: int = 1,
    reduces_last: bool = False,
    **units: int | str | None,
) -> int:
    """Return the peak bytes of a rank without pipeline, with so many micro-batches a step.

    `units` are `wrap` and `prefetch` of `_sharded`. Where it `reduces_last`, as accelerate does, in 16 bit
    behind the last micro-batch.
    """
    if reduces_last:
        units["reduce_dtype"] = torch.bfloat16
    mesh = init_device_mesh("cpu", (4, NUM_SHARDS), mesh_dim_names=("pp", "dp"))["dp"]
    with FakeTensorMode():
        whole = _Stage(sizes, sizes.layers, first=True, last=True)
        stage = _sharded(whole, mesh, recompute, pipeline=False, **units)
        tokens, labels = torch.zeros(2, sizes.samples, sizes.seq_len, dtype=torch.int64).unbind()
        stage.table = torch.empty(sizes.rotations, dtype=torch.complex64)
        optimizer = torch.optim.AdamW(stage.parameters(), fused=True)
        tracker = _Tracker(stage, optimizer)
        with tracker:
            stage.head.register_forward_pre_hook(
                lambda *_: tracker.memory_tracking.pop(stage.head, None) and None, prepend=True
            )
            stage.register_forward_pre_hook(lambda *_: tracker.reset_mod_stats(), prepend=True)
            for _ in range(2):
                with tracker.step():
                    for step in range(num_steps):
                        if reduces_last:
                            stage.set_requires_gradient_sync(step == num_steps - 1)
                        if num_chunks > 1:
                            _step_in_chunks(stage, tokens, labels, num_chunks)
                        else:
                            _loss(stage(tokens), labels).backward()
                    optimizer.step()
                    optimizer.zero_grad()
        peak = tracker.peak_bytes
    gc.collect()
    return peak


def stage_peak(sizes: Sizes, recompute: str, *, num_stages: int, stage: int, num_micro_batches: int) -> int:
    """Return the peak bytes of a rank of one stage of a torch pipeline under 1F1B."""
    mesh = init_device_mesh("cpu", (num_stages, NUM_SHARDS), mesh_dim_names=("pp", "dp"))
    first, last = stage == 0, stage == num_stages - 1
    with FakeTensorMode():
        part = _Stage(sizes, sizes.layers // num_stages, first=first, last=last)
        part = _sharded(part, mesh["dp"], recompute, pipeline=True)
        batch = (sizes.samples * num_micro_batches, sizes.seq_len)
        tokens, labels = torch.zeros(2, *batch, dtype=torch.int64).unbind()
        part.table = torch.empty(sizes.rotations, dtype=torch.complex64)
        width = sizes.vocab if last else sizes.hidden
        passed, made = (
            torch.empty(sizes.samples, sizes.seq_len, size, dtype=torch.bfloat16, requires_grad=True)
            for size in (sizes.hidden, width)
        )
        schedule = Schedule1F1B(
            PipelineStage(
                part,
                stage,
                num_stages,
                torch.device("cpu"),
                input_args=tokens[: sizes.samples] if first else passed,
                output_args=made,
                group=mesh["pp"].get_group(),
            ),
            num_micro_batches,
            loss_fn=_loss,
            scale_grads=False,
        )
        schedule._warmup_p2p = _without_votes
        del passed, made
        optimizer = torch.optim.AdamW(part.parameters(), fused=True)
        tracker = _Tracker(part, optimizer)
        with tracker:
            part.register_forward_pre_hook(lambda *_: tracker.reset_mod_stats(), prepend=True)
            for _ in range(2):
                with tracker.step():
                    inputs = (tokens,) if first else ()
                    schedule.step(*inputs, return_outputs=False, **({"target": labels} if last else {}))
                    optimizer.step()
                    optimizer.zero_grad()
        peak = tracker.peak_bytes
    gc.collect()
    return peak


def _without_votes(stages, _has_backward, _p2p_done) -> None:
    """Stand in for the exchange in which stages agree on static shapes: fake ranks do not answer."""
    for stage in stages:
        stage._inference_mode = torch_schedules.InferenceMode.STATIC
