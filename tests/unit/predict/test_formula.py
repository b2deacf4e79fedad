"""Single tasks against arithmetic by hand: FLOPs against the model's own count, bytes against the wire."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from foreshard import api
from foreshard.catalog.frameworks import load_framework
from foreshard.catalog.training import TrainingConstants
from foreshard.comm.collectives import all_gather_s, all_reduce_s, all_to_all_s, reduce_scatter_s, send_s
from foreshard.cost.attention import backward_of_forward_s
from foreshard.cost.elementwise import stream_s
from foreshard.cost.memory_activations import recompute_of
from foreshard.errors import SpecError
from foreshard.predict.assumptions import assumptions
from foreshard.predict.batch import PlannedRun, build_batch
from foreshard.predict.machine import sustained
from foreshard.predict.rates import model_flops, recomputed_flops
from foreshard.predict.tasks.collectives import (
    contention,
    held_copies_s,
    message_s,
    region_times,
    shard_times,
    sync_times,
    tensor_times,
)
from foreshard.predict.tasks.formula import end_times, head_sizes, layer_times, unaligned_s
from foreshard.predict.tasks.host import host_times, offload_s, optimizer_s
from foreshard.predict.tasks.kernels import (
    adapter_times,
    attention_times,
    cast_s,
    elementwise_times,
    expert_sizes,
    linear_sizes,
    linear_times,
    weight_cast_s,
)
from foreshard.spec.adapters import with_adapters

CONSTANTS = replace(TrainingConstants(), data_comm=1.0, pipeline_comm=1.0, tensor_comm=1.0, expert_comm=1.0)
MODELS = ("llama3-8b", "gpt2", "mixtral-8x7b", "deepseek-v3", "falcon-7b")


def batch_of(model="llama3-8b", cluster="1x8xh100-sxm", framework="megatron-core", **choices):
    model = api.load_model(model) if isinstance(model, str) else model
    where = api.load_cluster(cluster)
    plan = api.make_plan(model, where, **({"seq_len": 1024, "framework": framework} | choices))
    case = PlannedRun(model=model, cluster=where, plan=plan, framework=load_framework(framework))
    return case, build_batch([case], CONSTANTS)


def batch_under(model, framework):
    model = api.load_model(model) if isinstance(model, str) else model
    where = api.load_cluster("1x8xh100-sxm")
    plan = api.make_plan(model, where, seq_len=1024)
    return build_batch([PlannedRun(model=model, cluster=where, plan=plan, framework=framework)], CONSTANTS)


def times_of(batch, kind=0, rule="none"):
    return layer_times(batch.kinds[kind], batch.machine, recompute_of(rule, 8))


def product_flops(batch, kind):
    """FLOPs of every matrix product of a layer's forward: 2 m n k each."""
    sizes = linear_sizes(batch.kinds[kind], batch.machine)
    return sum(float(np.sum(2.0 * np.asarray(m) * n * k)) for m, n, k, _ in sizes)


def tokens_of(batch):
    rank = batch.machine.rank
    return (rank.micro_batch * rank.seq_len / rank.cp).item()


@pytest.mark.parametrize("name", MODELS)
def test_products_have_the_flops_the_model_counts(name):
    case, batch = batch_of(name, "1x1xh100-sxm")
    for i, (block, _) in enumerate(case.model.block_kinds()):
        routed = block.top_k * (2 + block.gated) * block.hidden * block.expert_ffn
        expected = 2.0 * (block.matmul_params - routed - block.shared_gate * block.hidden)
        assert product_flops(batch, i) == pytest.approx(expected * tokens_of(batch), rel=1e-12)


@pytest.mark.parametrize("name", MODELS)
def test_six_flops_a_parameter_and_token_and_the_pairs_of_attention(name):
    case, _ = batch_of(name, "1x1xh100-sxm")
    model, seq_len = case.model, case.plan.seq_len
    matrices = sum(n * block.matmul_params for block, n in model.block_kinds())
    head = model.head_matmul_params
    pairs = sum(
        2 * n * block.num_heads * (block.head_dim + block.value_head_dim) * seq_len
        for block, n in model.block_kinds()
    )
    if model.num_next_token == 0:
        expected = (6 * (matrices + head) + 3 * pairs) * seq_len * case.plan.global_batch
        assert model_flops(case, causal=False) == pytest.approx(expected, rel=1e-12)
    assert model_flops(case, causal=True) < model_flops(case, causal=False)


@pytest.mark.parametrize("tp", [2, 4, 8])
@pytest.mark.parametrize("name", ["llama3-8b", "gpt2-medium"])
def test_tensor_parallelism_divides_products_and_weights(name, tp):
    model = api.load_model("gpt3-13b") if name == "gpt2-medium" else api.load_model(name)
    one, split = batch_of(model)[1], batch_of(model, tp=tp)[1]
    assert product_flops(split, 0) == pytest.approx(product_flops(one, 0) / tp, rel=1e-12)
    assert times_of(split).dense_params.item() == pytest.approx(times_of(one).dense_params.item() / tp)


@pytest.mark.parametrize("sp", [False, True])
def test_latent_down_projections_run_on_the_rank_s_own_tokens(sp):
    """Their weights are whole on every tensor rank: only sequence parallelism divides their work."""
    one, split = batch_of("deepseek-v3", ep=8)[1], batch_of("deepseek-v3", tp=2, ep=8, sp=sp)[1]
    block = api.load_model("deepseek-v3").blocks[0]
    down = 2.0 * block.hidden * (block.q_lora + block.kv_lora + block.rope_head_dim) * tokens_of(one)
    rest = product_flops(one, 0) - down
    assert product_flops(split, 0) == pytest.approx((down / 2 if sp else down) + rest / 2, rel=1e-12)


def test_context_parallelism_divides_tokens_and_pairs():
    one, split = batch_of(seq_len=32768)[1], batch_of(cp=4, seq_len=32768)[1]
    assert product_flops(split, 0) == pytest.approx(product_flops(one, 0) / 4, rel=1e-12)
    whole, part = (attention_times(batch.kinds[0], batch.machine)[0].item() for batch in (one, split))
    assert whole <= 4 * part <= 1.25 * whole, "as many pairs, run in rounds and joined"


def test_experts_are_divided_by_ep_and_etp():
    one, split = batch_of("mixtral-8x7b")[1], batch_of("mixtral-8x7b", ep=4, etp=2, tp=2)[1]
    assert times_of(split).expert_params.item() == pytest.approx(times_of(one).expert_params.item() / 8)


@pytest.mark.parametrize("name", ["llama3-8b", "mixtral-8x7b"])
def test_full_recomputation_adds_exactly_one_forward(name):
    batch = batch_of(name, tp=2, **({"ep": 4} if name.startswith("mix") else {}))[1]
    plain, full = times_of(batch), times_of(batch, rule="full")
    again = full.backward_s - plain.backward_s
    collectives = plain.tensor_forward + plain.expert_forward
    assert full.recompute.item() == pytest.approx(plain.forward.item(), rel=1e-12)
    assert np.asarray(again).item() == pytest.approx((plain.forward + collectives).item(), rel=1e-9)
    assert full.forward_s.item() == plain.forward_s.item()


def test_partial_recomputation_lies_between():
    batch = batch_of()[1]
    rules = ("none", "selective:core_attn", "selective:core_attn+mlp", "full")
    redone = [np.asarray(times_of(batch, rule=rule).recompute).item() for rule in rules]
    assert redone[0] == 0.0 and redone == sorted(redone) and len(set(redone)) == 4
    half = times_of(batch, rule="full:block:4").recompute.item()
    assert half == pytest.approx(redone[3] / 2)


def test_recomputing_an_expert_layer_takes_shared_experts_and_activations_along():
    """Megatron's module `moe` is the whole layer: naming its parts beside it adds nothing."""
    batch = batch_of("deepseek-v3", ep=8)[1]
    layer, parts = (
        times_of(batch, 1, rule=rule).recompute.item()
        for rule in ("selective:moe", "selective:moe+moe_act+shared_experts")
    )
    assert layer == parts > times_of(batch, 1, rule="selective:moe_act+shared_experts").recompute.item()


def test_full_recomputation_repeats_every_block_and_not_the_head():
    case, batch = batch_of(recompute="full")
    forward = sum(n * block.forward_flops(1024, False) for block, n in case.model.block_kinds())
    assert recomputed_flops(case, batch) == pytest.approx(forward * case.plan.tokens, rel=1e-12)
    case, batch = batch_of(recompute="selective", pp=4, tp=2)
    attention = sum(n * block.attention_flops(1024, False) for block, n in case.model.block_kinds())
    assert recomputed_flops(case, batch) == pytest.approx(attention * case.plan.tokens, rel=1e-12)
    assert recomputed_flops(*batch_of()) == 0.0


def test_hfu_counts_what_runs_again():
    model, cluster = api.load_model("llama3-8b"), api.load_cluster("1x8xh100-sxm")
    full, plain = (api.predict(model, cluster, tp=8, recompute=rule) for rule in ("full", "none"))
    assert plain.hfu == pytest.approx(plain.mfu, rel=1e-12)
    blocks = model.forward_flops_per_token(8192, False) - 2 * model.head_matmul_params
    assert full.hfu / full.mfu == pytest.approx(1 + blocks / model.flops_per_token(8192, False), rel=1e-9)


def test_tensor_collectives_carry_the_activations():
    _, batch = batch_of(tp=8)
    size = 2.0 * 1024 * 4096
    gather = region_times(4096.0, batch.machine).scatter_s
    assert gather.item() == pytest.approx(all_gather_s(size, 8, 1, batch.machine.fabric).item(), rel=1e-12)
    _, batch = batch_of(tp=8, sp=False)
    whole = region_times(4096.0, batch.machine).whole_s
    assert whole.item() == pytest.approx(all_reduce_s(size, 8, 1, batch.machine.fabric).item(), rel=1e-12)


def test_a_layer_gathers_and_scatters_around_two_regions():
    _, batch = batch_of(tp=8)
    gather = region_times(4096.0, batch.machine).scatter_s
    assert times_of(batch).tensor_forward.item() == pytest.approx(4 * gather.item(), rel=1e-12)


@pytest.mark.parametrize(("precision", "width"), [("bf16", 2.0), ("fp8", 1.0), ("nvfp4", 0.5)])
def test_operands_are_gathered_at_the_width_of_the_product_and_sums_scattered_in_16_bit(precision, width):
    _, batch = batch_of(cluster="1x8xb200-sxm", tp=8, precision=precision)
    fabric, elements = batch.machine.fabric, 1024 * 4096
    operands, sums = (all_gather_s(size * elements, 8, 1, fabric).item() for size in (width, 2.0))
    times = times_of(batch)
    assert times.tensor_forward.item() == pytest.approx(2 * (operands + sums), rel=1e-12)
    assert times.tensor_backward.item() <= times.tensor_forward.item()


def test_fp32_activations_are_twice_as_large():
    sixteen, full = batch_of(tp=8)[1], batch_of(tp=8, precision="fp32")[1]
    fabric = full.machine.fabric
    expected = all_gather_s(4.0 * 1024 * 4096, 8, 1, fabric).item()
    assert region_times(4096.0, full.machine).operands_s.item() == pytest.approx(expected, rel=1e-12)
    assert region_times(4096.0, sixteen.machine).operands_s.item() < expected


def test_experts_get_their_tokens_and_send_them_back():
    _, batch = batch_of("mixtral-8x7b", ep=8, micro_batch=2)
    routed = 2.0 * 2 * (2 * 1024) * 4096  # 16 bit, top-2, tokens, hidden
    one_way = all_to_all_s(routed, 8, 1, batch.machine.fabric).item()
    assert times_of(batch).expert_forward.item() == pytest.approx(2 * one_way, rel=1e-12)


def test_gathered_keys_and_values_are_gathered_and_their_gradients_scattered():
    case, _ = batch_of(cp=4, seq_len=8192)
    gathered = replace(case, plan=replace(case.plan, comm={"context_gather": True}))
    batch = build_batch([gathered], CONSTANTS)
    whole = 2.0 * 8192 * case.model.blocks[0].kv_width
    fabric, times = batch.machine.fabric, times_of(batch)
    gather, scatter = all_gather_s(whole, 4, 1, fabric).item(), reduce_scatter_s(whole, 4, 1, fabric).item()
    assert times.context_forward.item() == pytest.approx(gather)
    assert times.context_backward.item() == pytest.approx(gather + scatter)


@pytest.mark.parametrize(("choices", "parts"), [({"tp": 4}, 4), ({"tp": 4, "sp": False}, 1), ({"cp": 2}, 2)])
def test_a_message_is_the_output_of_a_rank(choices, parts):
    _, batch = batch_of(pp=2, micro_batch=2, **choices)
    size = 2.0 * 2 * 1024 * 4096 / parts
    for crosses in (0.0, 1.0):
        expected = send_s(size, crosses, batch.machine.fabric).item()
        assert message_s(4096.0, crosses, batch.machine).item() == pytest.approx(expected, rel=1e-12)


PARAMS = 1e9


def test_without_sharding_gradients_are_reduced_and_nothing_is_gathered():
    _, batch = batch_of(zero=0)
    reduce, gather = sync_times(PARAMS, 8.0, 1.0, 1.0, batch.machine)
    assert gather.item() == 0.0
    assert reduce.item() == pytest.approx(all_reduce_s(4 * PARAMS, 8, 1, batch.machine.fabric).item())


def test_sharded_states_scatter_gradients_and_gather_weights():
    _, batch = batch_of(zero=1)
    reduce, gather = sync_times(PARAMS, 8.0, 1.0, 1.0, batch.machine)
    fabric = batch.machine.fabric
    assert reduce.item() == pytest.approx(all_gather_s(4 * PARAMS, 8, 1, fabric).item())
    assert gather.item() == pytest.approx(all_gather_s(2 * PARAMS, 8, 1, fabric).item())


def test_shard_groups_reduce_their_shards_across():
    _, batch = batch_of(zero=1, shard_size=2)
    reduce, gather = sync_times(PARAMS, 8.0, 1.0, 1.0, batch.machine)
    fabric = batch.machine.fabric
    inside = all_gather_s(4 * PARAMS, 2, 1, fabric).item()
    across = all_reduce_s(2 * PARAMS, 4, 2, fabric).item()
    assert reduce.item() == pytest.approx(inside + across)
    assert gather.item() == pytest.approx(all_gather_s(2 * PARAMS, 2, 1, fabric).item())


def test_sharded_weights_are_gathered_and_gradients_scattered():
    _, batch = batch_of(zero=3, framework="composer")
    shard = shard_times(PARAMS, 0.0, batch.machine)
    fabric, size = batch.machine.fabric, batch.machine.traits.grad_reduce_bytes.item()
    assert shard.gather.item() == pytest.approx(all_gather_s(2 * PARAMS, 8, 1, fabric).item())
    assert shard.scatter.item() == pytest.approx(all_gather_s(size * PARAMS, 8, 1, fabric).item())


def streamed_s(num_bytes, machine):
    return float(stream_s(num_bytes, machine.kernels).item())


def test_fsdp2_copies_weights_and_gradients_through_flat_buffers():
    """torch 2.13 _fsdp_collectives.py: cast 4 + 2, into the gathered buffer 2 + 2, out of it 2 + 2."""
    machine = batch_of(zero=3, framework="hf")[1].machine
    shard = shard_times(PARAMS, 0.0, machine)
    gathered = all_gather_s(2 * PARAMS, 8, 1, machine.fabric).item()
    assert shard.gather.item() == pytest.approx(gathered + streamed_s(10 * PARAMS / 8, machine))
    assert shard.copy_weights.item() == pytest.approx(streamed_s(4 * PARAMS, machine))
    assert shard.copy_gradients.item() == pytest.approx(
        streamed_s((2 + machine.traits.grad_reduce_bytes.item()) * PARAMS, machine)
    )


def test_one_rank_of_fsdp2_copies_too_and_others_do_not():
    machine = batch_of(zero=3, framework="torchtitan", cluster="1x1xh100-sxm")[1].machine
    shard = shard_times(PARAMS, 0.0, machine)
    assert shard.gather.item() == 0.0
    assert shard.copy_weights.item() == pytest.approx(streamed_s(10 * PARAMS, machine))
    assert shard.copy_gradients.item() == pytest.approx(streamed_s(6 * PARAMS, machine))
    assert shard.scatter.item() == pytest.approx(streamed_s(8 * PARAMS, machine))
    other = shard_times(
        PARAMS, 0.0, batch_of(zero=3, framework="composer", cluster="1x1xh100-sxm")[1].machine
    )
    moved = (other.gather, other.scatter, other.copy_weights, other.copy_gradients)
    assert [np.asarray(seconds).item() for seconds in moved] == [0.0] * 4


def test_units_that_a_pipeline_holds_are_copied_once_a_step():
    held = batch_of(zero=3, framework="torchtitan", pp=2)[1].machine
    assert float(np.max(held_copies_s(PARAMS, 0.0, held))) == pytest.approx(streamed_s(12 * PARAMS, held))
    for framework, pp in (("torchtitan", 1), ("hf", 2), ("megatron-core", 2)):
        other = batch_of(zero=3 if pp == 1 else 1, framework=framework, pp=pp)[1].machine
        assert not np.any(held_copies_s(PARAMS, 0.0, other))


def test_tensor_collectives_are_hidden_inside_a_link_domain_with_sequence_parallelism():
    for cluster, sp, hidden in (
        ("1x8xh100-sxm", True, 0.5),
        ("1x8xh100-sxm", False, 0.0),
        ("2x4xh100-sxm", True, 0.0),
    ):
        machine = batch_of(framework="torchtitan", cluster=cluster, tp=8, sp=sp)[1].machine
        machine = replace(machine, constants=replace(machine.constants, tensor_hidden=0.5))
        region = region_times(4096.0, machine)
        plain, over = (
            tensor_times(region, replace(machine, traits=replace(machine.traits, tp_overlap=on)), 0.0)[0]
            for on in (0.0, 1.0)
        )
        assert np.max(over) == pytest.approx((1.0 - hidden) * np.max(plain))


@pytest.mark.parametrize("sp", [True, False])
def test_selected_operations_gather_again_what_is_cut_along_the_sequence(sp):
    """Recomputing a layer gathers and scatters; what a scatter, or a sum, brought is kept."""
    _, batch = batch_of(framework="torchtitan", tp=8, sp=sp)
    again = {
        rule: float(np.max(times_of(batch, rule=rule).tensor_recompute))
        for rule in ("none", "selective:op", "full")
    }
    assert again["none"] == 0.0 < again["full"]
    assert again["selective:op"] == pytest.approx(0.5 * sp * again["full"])


def test_one_replica_has_nothing_to_sum():
    _, batch = batch_of(cluster="1x1xh100-sxm")
    assert [part.item() for part in sync_times(PARAMS, 1.0, 1.0, 1.0, batch.machine)] == [0.0, 0.0]


@pytest.mark.parametrize(("zero", "ranks"), [(0, 1), (1, 8), (3, 8)])
def test_the_optimizer_streams_its_shard(zero, ranks):
    """AdamW in fp32: gradient 4, weight and moments read and written 12 + 12, 16-bit weight 2: 30 bytes."""
    _, batch = batch_of(zero=zero)
    kernels = batch.machine.kernels
    bytes_per_s = (kernels.memory_bytes_per_s * kernels.stream_eff).item()
    once = CONSTANTS.step_fixed + 5 * CONSTANTS.step_per_layer
    seconds = optimizer_s(PARAMS, 0.0, 5.0, batch.machine, 8.0).item()
    assert seconds - once == pytest.approx(30.0 * PARAMS / ranks / bytes_per_s, rel=0.02)


def test_ends_cost_a_product_three_times_and_look_ups():
    _, batch = batch_of()
    ends = end_times(4096.0, 128256.0, 0.0, batch.machine)
    layer = times_of(batch)
    # Both tables have dense gradients in fp32, read and written by each micro-batch: the head's within its
    # product, the embedding's from zeros that rows of the batch are added to.
    kernels = batch.machine.kernels
    once = 128256.0 * 4096.0 / (kernels.memory_bytes_per_s * kernels.stream_eff)
    added = (ends.head_backward - 2.0 * ends.head_forward).item()
    assert added == pytest.approx(8.0 * CONSTANTS.grad_accumulate * once.item(), rel=0.02)
    dense = (ends.embedding_backward - 1.5 * ends.embedding_forward).item()
    assert dense == pytest.approx((8.0 * CONSTANTS.grad_accumulate + 4.0) * once.item(), rel=0.02)
    assert ends.embedding_forward.item() < 0.1 * layer.forward.item() < ends.head_forward.item()
    frozen = end_times(4096.0, 128256.0, 0.0, batch.machine, frozen=1.0)
    assert frozen.embedding_backward.item() == 0.0 and frozen.head_backward.item() < ends.head_backward.item()


def test_every_task_is_finite_and_not_negative():
    for name in MODELS:
        for choices in ({}, {"tp": 1, "cp": 2}, {"zero": 3, "recompute": "full"}, {"precision": "fp8"}):
            _, batch = batch_of(name, **choices)
            for kind in range(len(batch.kinds)):
                times = times_of(batch, kind, choices.get("recompute", "none"))
                for field in times.__slots__:
                    value = np.asarray(getattr(times, field))
                    assert np.all(np.isfinite(value)) and np.all(value >= 0.0), (name, choices, field)


def test_a_compiler_does_not_recompute_what_no_gradient_reads():
    rule = "selective:mlp"
    eager, compiled = (
        batch_of("llama3-8b", "1x1xh100-sxm", name)[1] for name in ("megatron-core", "maxtext")
    )
    whole, pruned = (
        times_of(eager, rule=rule).recompute.item(),
        times_of(compiled, rule=rule).recompute.item(),
    )
    up, down = (linear_sizes(eager.kinds[0], eager.machine)[i] for i in (2, 3))
    work = [m.item() * np.max(n) * np.max(k) for m, n, k, _ in (up, down)]
    assert work[0] == 2.0 * work[1]
    assert pruned == pytest.approx(whole * 2.0 / 3.0, rel=0.05)


def test_what_offload_moves_has_the_width_it_is_saved_in():
    wide, narrow = (
        batch_of("llama3-8b", "1x8xh100-sxm", tp=1, dp=8, offload="activations", precision=name)[1]
        for name in ("bf16", "fp8")
    )
    layer = wide.kinds[0]
    h, kv, f = 4096.0, 2.0 * 1024.0, 14336.0
    link = wide.machine.traits.host_link_bytes_per_s.item()
    tokens = tokens_of(wide)
    saved_16 = 2.0 * (6.0 * h + kv + 3.0 * f)
    saved_8 = 2.0 * (4.0 * h + kv + 2.0 * f) + 1.0 * (3.0 * h + f)
    assert offload_s(layer, wide.machine, 0.0)[0].item() == pytest.approx(tokens * saved_16 / link, rel=1e-12)
    assert offload_s(layer, narrow.machine, 0.0)[0].item() == pytest.approx(
        tokens * saved_8 / link, rel=1e-12
    )


def test_a_tpu_keeps_its_rate_beside_collectives_and_under_load():
    for cluster, precision, kept in (
        ("1x4xtpu-v5p", "bf16", True),
        ("1x4xtpu-v6e", "fp8", False),
        ("1x4xh100-sxm", "bf16", False),
    ):
        machine = batch_of("llama3-8b", cluster, "maxtext", precision=precision)[1].machine
        machine = replace(machine, constants=replace(CONSTANTS, gemm_derate=1.5, gemm_derate_8bit=1.5))
        assert np.all(contention(machine) == 0.0) is np.bool_(kept)
        assert np.allclose(sustained(machine).gemm_eff, machine.kernels.gemm_eff) is kept


def test_recipes_of_8_bit_move_what_their_kernels_do():
    """Of torchao: 6 and 8 B an activation element, 8 and 10 B a weight, along rows at 1 / 2.6 of the rate."""
    found = {}
    for release in ("0.2", "0.3"):
        batch = batch_of(framework=f"torchtitan@{release}", precision="fp8", zero=3)[1]
        made = batch.kinds[0], batch.machine
        found[release] = cast_s(*made).item(), weight_cast_s(1e8, batch.machine).item()
    launch = np.max(batch.machine.kernels.stream_launch_s)
    (tensor, tensor_weights), (row, row_weights) = found["0.2"], found["0.3"]
    assert (row - launch) / (tensor - launch) == pytest.approx(2.6 * 8 / 6)
    assert (row_weights - launch) / (tensor_weights - launch) == pytest.approx(2.6 * 10 / 8)
    other = batch_of(framework="torchtitan", precision="mxfp8", zero=3, cluster="8xb200-sxm")[1].machine
    assert other.traits.own_casts == 0, "blocks have kernels of their own"


def test_scales_per_block_cost_what_other_block_scaled_casts_do():
    """DeepSeek-V3 section 3.3.2; under TransformerEngine every other recipe has kernels of its own."""
    case, batch = batch_of(precision="fp8")
    moved = {}
    for recipe in ("fused", "current", "blockwise"):
        framework = replace(case.framework, fp8_recipe=recipe)
        machine = build_batch([replace(case, framework=framework)], CONSTANTS).machine
        launch = np.max(machine.kernels.stream_launch_s)
        moved[recipe] = cast_s(batch.kinds[0], machine).item() - launch
    least = moved["current"] / 6.0
    assert moved["fused"] == pytest.approx(4.0 * CONSTANTS.cast_traffic * least)
    assert moved["blockwise"] == pytest.approx(4.0 * CONSTANTS.cast_blocks * least)


def test_scales_per_row_gather_in_16_bit():
    found = {}
    for release in ("0.2", "0.3"):
        batch = batch_of(framework=f"torchtitan@{release}", precision="fp8", zero=3, tp=2)[1]
        found[release] = region_times(batch.pipeline.hidden, batch.machine)
    assert found["0.2"].operands_s < found["0.2"].scatter_s == found["0.3"].operands_s


def test_norms_of_queries_and_keys_run_like_other_norms():
    model = api.load_model("llama3-8b")
    normed = replace(model, blocks=tuple(replace(block, qk_norm=True) for block in model.blocks))
    plain, more = (elementwise_times(b.kinds[0], b.machine) for _, b in map(batch_of, (model, normed)))
    block = model.blocks[0]
    channels = block.query_width + block.num_kv_heads * block.head_dim
    given = more[0] - plain[0]
    assert given * block.num_norms * model.hidden == pytest.approx(plain[2] * channels)
    assert more[2] == pytest.approx(plain[2]), "recomputation of layernorm leaves them out"


def test_model_code_of_transformers_runs_norms_rotary_and_adapters_kernel_by_kernel():
    """Bytes of every kernel, over what fused code moves; a LayerNorm is one kernel there too."""
    plain, fused = (batch_of(framework=name, zero=3)[1] for name in ("hf", "torchtitan"))
    layer, machine = plain.kinds[0], plain.machine
    rate = np.max(machine.kernels.stream_eff * machine.kernels.memory_bytes_per_s)
    tokens, c = tokens_of(plain), machine.constants
    turned = (layer.query_width + layer.key_width).item()
    norms = 2 * layer.hidden.item()
    gate, joined = layer.ffn.item(), layer.value_width.item()
    sums = ((48, 4), (114, 6)), ((28, 4), (36, 4)), ((10, 10), (18, 50 / 3))
    for way, (norm, rope, gated) in enumerate(zip(*sums, strict=True)):
        more = elementwise_times(layer, machine)[way] - elementwise_times(fused.kinds[0], fused.machine)[way]
        c_e, residual = c.eager_traffic, norms * 6
        counted = norms * (norm[0] - c_e * norm[1]) + turned * (rope[0] - c_e * rope[1])
        counted += gate * (gated[0] - c_e * gated[1]) + joined * 4 + residual * (1 - c_e)
        assert more.item() == pytest.approx(tokens * counted / rate, rel=1e-9)
    plain, fused = (batch_of("opt-1.3b", framework=name, zero=3)[1] for name in ("hf", "torchtitan"))
    assert (
        elementwise_times(plain.kinds[0], plain.machine)[0]
        == elementwise_times(fused.kinds[0], fused.machine)[0]
    )


@pytest.mark.parametrize(
    ("framework", "cluster", "timed"),
    [
        ("deepspeed", "1x8xh100-sxm", True),
        ("torchtitan", "1x8xh100-sxm", True),
        ("megatron-core", "1x8xh100-sxm", False),
        ("deepspeed", "1x8xa100-sxm-80gb", False),
    ],
)
def test_a_backward_of_attention_that_was_timed_alone_slows_as_products_do(framework, cluster, timed):
    """What is fitted over it makes up for the ratio of kernels that nobody timed."""
    batch = batch_of(cluster=cluster, framework=framework, zero=1, seq_len=16384)[1]
    layer, machine = batch.kinds[0], batch.machine
    fitted = replace(machine, constants=replace(machine.constants, flash_backward=1.5))
    own, other = (np.max(attention_times(layer, one)[1]) for one in (machine, fitted))
    ratio = 1.0 if timed else 1.5 / machine.constants.flash_backward
    assert other / own == pytest.approx(ratio)
    if timed:
        alone = backward_of_forward_s(
            np.max(attention_times(layer, machine)[0]) / machine.constants.flash_forward,
            machine.kernels,
            16384.0,
        )
        assert own / np.max(alone) == pytest.approx(np.max(sustained(machine).gemm16_slower), rel=1e-3)


def test_the_loss_of_megatron_costs_its_operations():
    """Vocab-parallel cross entropy, forward and backward, of logits in 16 bit that are cast and back."""
    torch = pytest.importorskip("torch")
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Moved(TorchDispatchMode):
        total = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            tensors = [x for x in tree_leaves((args, kwargs or {}, out)) if isinstance(x, torch.Tensor)]
            if kwargs and "out" in kwargs:
                tensors.pop()  # what it writes is counted once
            self.total += sum(x.nbytes for x in tensors if x.numel() == logits.numel())
            return out

    logits, gradient = torch.ones(64, 512, dtype=torch.bfloat16), torch.ones(64, 1)
    with Moved() as moved:
        wide = logits.float()
        wide -= wide.amax(dim=-1, keepdim=True)
        torch.exp(wide, out=wide)
        wide.div_(wide.sum(dim=-1, keepdim=True))
        wide.mul_(gradient).to(torch.bfloat16)
    counted = moved.total / logits.numel()
    took = {}
    for loss in ("unfused", "native", "te"):  # of the last 6 bytes a logit are fitted
        run = batch_under("llama3-8b", replace(load_framework("megatron-core"), cross_entropy=loss))
        ends = end_times(run.pipeline.hidden, run.pipeline.vocab, run.pipeline.head_rows, run.machine)
        took[loss] = np.max(ends.head_forward + ends.head_backward)
        rate = np.max(run.machine.kernels.stream_eff * run.machine.kernels.memory_bytes_per_s)
    logit_s = 1024 * 128256 / rate
    assert (took["unfused"] - took["te"]) / logit_s == pytest.approx(
        counted - 6.0 * CONSTANTS.loss_traffic, rel=1e-6
    )
    assert took["te"] < took["native"] < took["unfused"]


def moved_by_torch(made, given):
    """Bytes that operations of torch move forward and backward, an element of `given`, at a stream's rate.

    What multiplies by a factor of a row or channel reaches half that rate, a sum over tokens a sixth.
    """
    torch = pytest.importorskip("torch")
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Moved(TorchDispatchMode):
        total = 0.0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            slower = {"mul": 2.0, "sum": 6.0 if "sum" in str(func) and args[1][0] == 0 else 1.0}
            if not func.is_view:
                tensors = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, torch.Tensor)]
                large = sum(x.nbytes for x in tensors if x.numel() > given[0].numel() / 16)
                self.total += large * slower.get(func.overloadpacket.__name__, 1.0)
            return out

    with Moved() as forward:
        out = made()
    gradient = torch.ones_like(out)
    with Moved() as backward:
        torch.autograd.grad(out, given, gradient)
    return forward.total / given[0].numel(), backward.total / given[0].numel()


def test_what_megatron_leaves_to_torch_costs_its_operations():
    """Biases of experts' outputs, times weights in 32 bit or 16; rotary embeddings with a factor (YaRN)."""
    torch = pytest.importorskip("torch")
    model = api.load_model("gpt-oss-20b")

    def without(**fields):
        return replace(model, blocks=tuple(replace(block, **fields) for block in model.blocks))

    def cost(one, **changes):
        framework = replace(load_framework("megatron-core"), **changes)
        batch = batch_under(one, framework)
        rate = np.max(batch.machine.kernels.stream_eff * batch.machine.kernels.memory_bytes_per_s)
        times = elementwise_times(batch.kinds[0], batch.machine)[:2]
        return batch, np.array([float(np.max(time)) for time in times]) * rate / tokens_of(batch)

    half = {"dtype": torch.bfloat16, "requires_grad": True}
    count, tokens, width = 4, 64, 256
    for dtype, dispatcher in ((torch.float32, "hybridep"), (torch.bfloat16, "alltoall")):
        rows, bias = torch.ones(count * tokens, width, **half), torch.ones(count, width, **half)
        weights = torch.ones(count * tokens, 1, dtype=dtype, requires_grad=True)

        def summed(rows=rows, bias=bias, weights=weights):
            parts = zip(rows.split(tokens), bias.unbind(), weights.split(tokens), strict=True)
            return torch.cat([part + own * weight for part, own, weight in parts]).to(rows.dtype)

        batch, own = cost(model, dispatcher=dispatcher)
        _, none = cost(without(mlp_bias=False), dispatcher=dispatcher)
        routed = model.blocks[0].top_k * model.hidden
        assert own - none == pytest.approx(routed * np.array(moved_by_torch(summed, (rows, bias, weights))))
        graph = [cost(one, cuda_graphs="full")[1] for one in (model, without(mlp_bias=False))]
        assert graph[0] == pytest.approx(graph[1]), "a graph has them fused"

    heads, angles = torch.ones(64, 1, 64, 64, **half), torch.ones(64, 1, 1, 64, dtype=torch.bfloat16)

    def turned():
        first, second = heads.chunk(2, dim=-1)
        return torch.cat(
            (heads * angles + torch.cat((-second, first), dim=-1) * angles, heads[..., 64:]), dim=-1
        )

    batch, own = cost(model)
    _, none = cost(without(rotary_scaled=False))
    channels = (batch.kinds[0].query_width + batch.kinds[0].key_width).item()
    fused = 4.0  # read and written once
    assert own - none == pytest.approx(channels * (np.array(moved_by_torch(turned, (heads,))) - fused))
    assert not any(block.rotary_scaled for block in api.load_model("deepseek-v3").blocks)


@pytest.mark.parametrize("name", ["pythia-410m", "phi-1.5", "llama3-8b", "gpt2", "bloom-560m", "t5-base"])
def test_rotary_positions_turn_what_the_model_says(name):
    """GPT-NeoX a quarter of a head, joined with the rest; learned, relative and ALiBi positions nothing."""
    model = api.load_model(name)
    share = {"pythia-410m": 0.25, "phi-1.5": 0.5, "llama3-8b": 1.0}.get(name, 0.0)
    assert {block.rotary for block in model.blocks} == {share} and model.rope_percent == (share or 1.0)
    still = replace(model, blocks=tuple(replace(block, rotary=0.0) for block in model.blocks))
    for framework, turned, joined in (
        ("hf", (28, 36), (4, 14)),
        ("ddp", (48, 60), (12 - 4 * share, 26 - 12 * share)),
    ):
        own, none = (batch_of(one, framework=framework, zero=0)[1] for one in (model, still))
        layer, machine = own.kinds[0], own.machine
        channels = (layer.query_width + layer.key_width).item() * tokens_of(own)
        rate = np.max(machine.kernels.stream_eff * machine.kernels.memory_bytes_per_s)
        for way in (0, 1):
            if framework == "hf" and name in ("pythia-410m", "phi-1.5"):
                break  # without rotary positions nothing there is counted kernel by kernel, or all is
            more = (
                elementwise_times(layer, machine)[way] - elementwise_times(none.kinds[0], none.machine)[way]
            )
            moved = channels * (share * turned[way] + (0 < share < 1) * joined[way])
            assert float(np.max(more)) == pytest.approx(moved / rate, rel=1e-6, abs=1e-12)


def test_under_autocast_the_residual_is_in_32_bit_and_every_product_casts_its_input():
    """Llama's block: two norms, three and two products that read the residual, kernel by kernel."""
    batch = batch_of(framework="ddp", zero=0)[1]
    layer, machine = batch.kinds[0], batch.machine
    rate = np.max(machine.kernels.stream_eff * machine.kernels.memory_bytes_per_s)
    turned, hidden = (layer.query_width + layer.key_width).item(), layer.hidden.item()
    rest = 4 * layer.value_width.item()
    forward = hidden * (2 * 44 + 2 * 10 + 5 * 6) + turned * 48 + rest + layer.ffn.item() * 10
    back = hidden * (2 * 128 + 2 * 18 + 5 * 6 + 3 * 12) + turned * 60 + rest + layer.ffn.item() * 18
    for found, counted in zip(elementwise_times(layer, machine)[:2], (forward, back), strict=True):
        assert found.item() == pytest.approx(tokens_of(batch) * counted / rate, rel=1e-9)


@pytest.mark.parametrize(("name", "changes"), [("llama3-8b", {"rotary": 0.0}), ("t5-large", {})])
def test_fused_kernels_turn_rotary_layers_only_and_join_every_attention(name, changes):
    """Rotary positions move 4 bytes a channel of queries and keys, each of the attentions a residual of 6."""
    model = api.load_model(name)
    block = model.blocks[-1]
    less = replace(block, **changes or {"cross_attention": False, "num_norms": 2})
    stages = (replace(model, blocks=tuple(one for _ in model.blocks)) for one in (block, less))
    more, plain = (batch_of(one)[1] for one in stages)
    layer, machine = more.kinds[0], more.machine
    traffic = machine.constants.fused_traffic
    traffic = traffic + machine.traits.eager * (machine.constants.eager_traffic - traffic)
    rate = np.max(machine.kernels.stream_eff * machine.kernels.memory_bytes_per_s)
    turned, hidden = (layer.query_width + layer.key_width).item(), layer.hidden.item()
    counts = (4 * turned,) * 2 if changes else ((4 + 6) * hidden, (6 + 6) * hidden)  # with a norm
    for way, count in enumerate(counts):
        found = elementwise_times(layer, machine)[way] - elementwise_times(plain.kinds[0], machine)[way]
        counted = tokens_of(more) * np.max(traffic) * count / rate
        assert found.item() == pytest.approx(counted, rel=1e-9)


def test_a_layer_of_a_hybrid_casts_what_its_own_products_read():
    """Norm, residual, and one cast: a scan reads by one product, so does an MLP that is not gated."""
    batch = batch_of("nemotron-h-8b", framework="ddp", zero=0)[1]
    rate = np.max(batch.machine.kernels.stream_eff * batch.machine.kernels.memory_bytes_per_s)
    for layer in batch.kinds[:2]:
        hidden, is_scan = layer.hidden.item(), layer.scan_state.item() > 0
        inner = 0.0 if is_scan else layer.ffn.item()
        heads = 4 * layer.value_width.item()
        counts = hidden * (44 + 10 + 6) + 4 * inner + heads, hidden * (128 + 18 + 6) + 6 * inner + heads
        for found, count in zip(elementwise_times(layer, batch.machine)[:2], counts, strict=True):
            assert found.item() == pytest.approx(tokens_of(batch) * count / rate, rel=1e-9)


def test_gelu_by_its_formula_runs_operation_by_operation_where_transformers_runs_it():
    model = api.load_model("gpt2")
    kernel = replace(model, blocks=tuple(replace(block, spelled_activation="") for block in model.blocks))
    for framework, counts in (("ddp", (76 - 4, 118 - 6)), ("megatron-core", (0, 0)), ("torchtitan", (0, 0))):
        spelled, fused = (batch_of(m, framework=framework, zero=0)[1] for m in (model, kernel))
        layer, machine = spelled.kinds[0], spelled.machine
        rate = np.max(machine.kernels.stream_eff * machine.kernels.memory_bytes_per_s)
        for way, count in enumerate(counts):
            more = elementwise_times(layer, machine)[way] - elementwise_times(fused.kinds[0], machine)[way]
            counted = tokens_of(spelled) * layer.ffn.item() * count / rate
            assert more.item() == pytest.approx(counted, rel=1e-9, abs=1e-12)
    batch = batch_of(model, framework="hf", zero=3)[1]  # no autocast: 36 and 60, dropout off
    layer, machine = batch.kinds[0], batch.machine
    hidden, inner = layer.hidden.item(), layer.ffn.item()
    drop = 2 * 5 * hidden * np.max(layer.dropout)
    rest = 2 * 6 * hidden + 4 * layer.value_width.item() + drop
    counts = 2 * 4 * hidden + 36 * inner + rest, 2 * 10 * hidden + 60 * inner + rest
    for found, count in zip(elementwise_times(layer, machine)[:2], counts, strict=True):
        assert found.item() == pytest.approx(tokens_of(batch) * count / rate, rel=1e-9)


@pytest.mark.parametrize(
    ("name", "formula", "framework", "autocast"),
    [
        ("gpt-neox-20b", "gelu_fast", "ddp", True),
        ("gpt-neox-20b", "gelu_fast", "hf", False),
        ("bloom-560m", "bloom", "ddp", True),
        ("gpt-neox-20b", "xielu", "hf", False),
        ("gpt-neox-20b", "xielu", "ddp", True),
    ],
)
def test_bytes_of_gelu_by_its_formulas_are_those_of_transformers_code(name, formula, framework, autocast):
    """Read and written by the operations of a trace of the activation, forward and backward."""
    torch = pytest.importorskip("torch")
    activations = pytest.importorskip("transformers.activations")
    bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom")
    from foreshard.profile.tracing.trace import trace_module

    given = api.load_model(name)
    model, kernel = (
        replace(given, blocks=tuple(replace(block, spelled_activation=code) for block in given.blocks))
        for code in (formula, "")
    )
    batches = [batch_of(m, framework=framework, zero=0 if autocast else 3)[1] for m in (model, kernel)]
    (layer, plain), machine = (batch.kinds[0] for batch in batches), batches[0].machine
    rate = np.max(machine.kernels.stream_eff * machine.kernels.memory_bytes_per_s)
    linear, image = [torch.nn.Linear(64, 64, bias=False) for _ in range(2)], torch.empty(1, 64)
    spelled = bloom.BloomGelu() if formula == "bloom" else activations.ACT2FN[formula]
    counts = [
        streamed(trace_module(torch.nn.Sequential(linear[0], one, linear[1]), image, autocast=autocast))
        for one in (spelled, activations.ACT2FN["gelu"])
    ]
    for way in (0, 1):
        more = elementwise_times(layer, machine)[way] - elementwise_times(plain, machine)[way]
        elements = tokens_of(batches[0]) * layer.ffn.item() / 64
        assert more.item() == pytest.approx((counts[0][way] - counts[1][way]) * elements / rate, rel=1e-6)


def streamed(module):
    """Return the bytes of a sample that operations besides products move, forward and backward."""
    ways = [[op for layer in module.layers for op in getattr(layer, way)] for way in ("forward", "backward")]
    return [sum(op.bytes.each for op in ops if op.kind == "stream") for ops in ways]


def test_cross_attention_casts_the_residual_and_what_the_encoder_made():
    """A decoder layer of T5 beside one of its encoder, under autocast: a norm, a residual, three casts."""
    batch = batch_of("t5-base", framework="ddp", zero=0)[1]
    encoder, decoder = (next(k for k in batch.kinds if k.cross_attention.item() == cross) for cross in (0, 1))
    rate = np.max(batch.machine.kernels.stream_eff * batch.machine.kernels.memory_bytes_per_s)
    hidden, drop = encoder.hidden.item(), 5 * encoder.hidden.item() * np.max(encoder.dropout)
    heads = 4 * encoder.value_width.item()
    # backward: gradients of keys and values are added to each other and to those of other layers
    counts = 44 + 10 + 3 * 6, 128 + 18 + 3 * 6 + 2 * 12
    for way, count in enumerate(counts):
        more = elementwise_times(decoder, batch.machine)[way] - elementwise_times(encoder, batch.machine)[way]
        dropped = (more.item() * rate / tokens_of(batch) - count * hidden - heads) / max(drop, 1e-9)
        assert dropped == pytest.approx(round(dropped), abs=1e-6) and 0 <= dropped <= 2


def test_in_32_bit_model_code_widens_nothing():
    """Norms of transformers move what they do under autocast; torch's loss casts no logits."""
    wide, mixed = (batch_of(framework="ddp", zero=0, precision=name)[1] for name in ("fp32", "bf16"))
    models = [batch.machine.kernels for batch in (wide, mixed)]
    rates = [np.max(kernels.stream_eff * kernels.memory_bytes_per_s) for kernels in models]
    norms = [elementwise_times(wide.kinds[0], batch.machine)[2].item() for batch in (wide, mixed)]
    assert norms[0] * rates[0] == pytest.approx(norms[1] * rates[1], rel=1e-9)
    logits = 1e6 * tokens_of(wide)
    for batch, at, count in zip((wide, mixed), rates, (36, 48), strict=True):
        ends = (end_times(0.0, vocab, 0.0, batch.machine) for vocab in (2e6, 1e6))
        more, less = (end.head_forward.item() * 3 * at for end in ends)
        assert more - less == pytest.approx(count * logits, rel=1e-6)


@pytest.mark.parametrize(("vocab", "share"), [(50304, None), (50257, 0.125), (30522, 0.265)])
def test_a_head_whose_rows_are_not_aligned_runs_on_kernels_of_older_devices(vocab, share):
    batch = batch_of(framework="ddp", zero=0)[1]
    hidden, rows, machine = 4096.0, 8192.0, batch.machine
    least = unaligned_s(rows, float(vocab), hidden, machine)
    if share is None:
        assert least == 0.0
        return
    flops = 2.0 * rows * vocab * hidden
    peak = machine.kernels.bf16_peak_flops_per_s.item()
    assert np.max(least) == pytest.approx(flops / (share * peak), rel=5e-3)
    # As many cycles on other matrix units, twice as many in tf32.
    for precision, cluster, flops_a_cycle in (("bf16", "4xa100-sxm-80gb", 474), ("tf32", "4xh200", 474 / 2)):
        other = batch_of(framework="ddp", zero=0, precision=precision, cluster=cluster)[1].machine
        cycles = api.load_cluster(cluster).nodes[0].device
        rate = flops_a_cycle * cycles.num_sms * cycles.clock_hz
        assert np.max(unaligned_s(rows, 50257.0, hidden, other)) == pytest.approx(
            2.0 * rows * 50257 * hidden / rate
        )
    small = batch_of(framework="ddp", zero=0, precision="fp16", cluster="1x1xt4")[1].machine
    most = 0.6 * small.kernels.bf16_peak_flops_per_s.item()
    assert np.max(unaligned_s(rows, 30522.0, hidden, small)) == pytest.approx(
        2.0 * rows * 30522 * hidden / most
    )
    padded = batch_of(framework="megatron-core")[1].machine
    assert head_sizes(float(vocab), 0.0, padded)[1] % 8 == 0, "Megatron pads it"
    others = [("fp32", "1x1xh200", "ddp"), ("bf16", "4xmi300x", "ddp"), ("bf16", "4xtpu-v4", "maxtext")]
    for precision, cluster, framework in others:
        other = batch_of(framework=framework, precision=precision, cluster=cluster)[1].machine
        assert unaligned_s(rows, float(vocab), hidden, other) == 0.0, "no matrix unit of NVIDIA"


@pytest.mark.parametrize(
    ("framework", "moved"),
    [("ddp", 80), ("hf@5", 28 + 12), ("hf@4", 80 + 12), ("torchtitan@0.3", 28 + 12), ("megatron-core", 30)],
)
def test_updates_move_what_their_kernels_do(framework, moved):
    traits = batch_of(framework=framework)[1].machine.traits
    assert np.max(traits.optimizer_bytes) == moved
    assert np.max(traits.once_fitted) == (framework == "megatron-core")


def test_adapters_of_peft_cast_their_input_and_scale_their_output():
    tuned = with_adapters(api.load_model("llama3-8b"), "16:q+v")
    plain, fused = (batch_of(tuned, framework=name, zero=3)[1] for name in ("hf", "torchtitan"))
    forward, back = (
        np.subtract(*pair)
        for pair in zip(
            adapter_times(plain.kinds[0], plain.machine),
            adapter_times(fused.kinds[0], fused.machine),
            strict=True,
        )
    )
    rate = np.max(plain.machine.kernels.stream_eff * plain.machine.kernels.memory_bytes_per_s)
    elements = 2 * tokens_of(plain) * plain.kinds[0].hidden.item()
    assert forward.item() == pytest.approx(elements * (22 - 6) / rate, rel=1e-9)
    # The two sums of backward were one launch each.
    assert back.item() < elements * (22 - 12) / rate


def test_shared_experts_hide_the_exchange_beside_them():
    """Left is the rest of the exchange, or what it slows; otherwise hidden ones are as before."""

    def exchanged(**comm):
        batch = batch_of("deepseek-v3", "2x8xh100-sxm", ep=16, **comm)[1]
        return batch, times_of(batch, 1)

    batch, plain = exchanged()
    _, hidden = exchanged(shared_overlap=True)
    busy, share = linear_times(batch.kinds[1], batch.machine).shared.item(), contention(batch.machine)
    for way, room in (("expert_forward", busy), ("expert_backward", 2 * busy)):
        before, after = getattr(plain, way).item(), getattr(hidden, way).item()
        assert after == pytest.approx(max(before - room, share * min(room, before))) and after < before
    both, other = (exchanged(expert_overlap=True, shared_overlap=on)[1] for on in (True, False))
    assert both.expert_forward == other.expert_forward


def test_weights_gathered_in_8_bit_are_half_the_bytes():
    wide, narrow = (
        batch_of(framework="torchtitan@0.2", precision="fp8", zero=3, narrow_gather=on)[1].machine
        for on in (False, True)
    )
    assert (wide.traits.param_bytes, narrow.traits.param_bytes) == (2.0, 1.0)
    for precision in ("bf16", "tf32", "mxfp8"):
        with pytest.raises(SpecError, match=f"products run in {precision}"):
            batch_of(framework="torchtitan@0.2", precision=precision, zero=3, narrow_gather=True)


def eff_of(machine, kernels):
    return float(sustained(replace(machine, kernels=kernels)).gemm16_eff.item())


def test_power_counts_for_the_flops_that_kernels_reach():
    """A device that reaches less of its peak needs less power: the limit then costs it less, never more."""
    _, batch = batch_of(cluster="1x8xb200-sxm", precision="bf16")
    machine, kernels = batch.machine, batch.machine.kernels
    lost = [
        share / eff_of(machine, replace(kernels, gemm16_eff=np.array([share])))
        for share in (0.3, 0.5, 0.7, 0.9)
    ]
    assert lost == sorted(lost) and lost[0] < lost[-1]
    # Joules a FLOP of an H100-SXM or more: no power is short, and more watts change nothing.
    enough = np.array([1e4])
    rich = replace(machine, traits=replace(machine.traits, watts=enough))
    assert eff_of(rich, kernels) > eff_of(machine, kernels)
    assert eff_of(rich, kernels) == eff_of(
        replace(rich, traits=replace(rich.traits, watts=2 * enough)), kernels
    )


def test_what_a_flop_takes_is_that_of_an_h100():
    """The reference is the power limit of an H100-SXM over what its curve reaches, so it lacks nothing."""
    _, batch = batch_of(precision="bf16")
    machine = batch.machine
    poor = replace(machine, traits=replace(machine.traits, watts=machine.traits.watts * 0.98))
    rich = replace(machine, traits=replace(machine.traits, watts=machine.traits.watts * 1.02))
    assert eff_of(poor, machine.kernels) < eff_of(rich, machine.kernels)
    assert eff_of(machine, machine.kernels) == pytest.approx(eff_of(rich, machine.kernels), rel=1e-3)


def test_dropout_of_arguments_is_priced_where_memory_keeps_its_masks():
    """Megatron-LM drops 0.1 unless told otherwise: 5 bytes a score, twice 5 an element, both ways."""
    _, batch = batch_of("gpt3-1.3b", "1x8xa100-sxm-80gb", "megatron-deepspeed", tp=1)
    layer, machine = batch.kinds[0], batch.machine
    still = replace(machine, traits=replace(machine.traits, drops=np.zeros_like(machine.traits.drops)))
    assert float(machine.traits.drops.item()) == 1.0
    bytes_per_s = float((machine.kernels.stream_eff * machine.kernels.memory_bytes_per_s).item())
    tokens = tokens_of(batch)
    scores = 16 * 1024 * tokens
    for with_drop, without in zip(
        attention_times(layer, machine), attention_times(layer, still), strict=True
    ):
        more = float((with_drop - without).item()) - float(machine.kernels.stream_launch_s.item())
        assert more == pytest.approx(CONSTANTS.unfused * 5 * scores / bytes_per_s, rel=0.02)
    pairs = zip(elementwise_times(layer, machine), elementwise_times(layer, still), strict=True)
    for with_drop, without in list(pairs)[:2]:
        expected = CONSTANTS.fused_traffic * 2 * 5 * tokens * 2048 / bytes_per_s
        assert float((with_drop - without).item()) == pytest.approx(expected, rel=1e-6)


def test_kernels_that_torchscript_fuses_move_what_fused_ones_do():
    """Megatron-LM fuses bias, GeLU, dropout and residual (megatron/model/fused_bias_gelu.py): not eager."""
    _, batch = batch_of("gpt3-1.3b", "1x8xa100-sxm-80gb", "megatron-lm", tp=1)
    _, eager = batch_of("gpt3-1.3b", "1x8xa100-sxm-80gb", "torchtitan", tp=1)
    assert batch.machine.traits.eager.item() == 0.0 and eager.machine.traits.eager.item() == 1.0


@pytest.mark.parametrize(
    ("model", "switch", "said"),
    [
        ("llama3-8b", "expert_overlap", "--expert-overlap: llama3-8b has no experts"),
        ("llama3-8b", "shared_overlap", "--shared-overlap: llama3-8b has no shared experts"),
        ("mixtral-8x7b", "shared_overlap", "--shared-overlap: mixtral-8x7b has no shared experts"),
        ("llama3-8b", "narrow_gather", "--narrow-gather: weights are gathered in 8 bit"),
    ],
)
def test_a_switch_with_nothing_to_hide_is_an_error(model, switch, said):
    with pytest.raises(SpecError) as error:
        batch_of(model, **{switch: True})
    assert said in str(error.value) and "eave out --" in str(error.value)
    batch_of(model, **{switch: False})


def test_transformers_sends_every_token_through_all_experts_of_llama_4():
    """16 times the products of experts; torchtitan routes tokens to one."""
    options = {"cluster": "32x8xh100-sxm", "zero": 3, "micro_batch": 1}
    _, plain = batch_of("llama4-scout", framework="torchtitan", **options)
    case, all_of_them = batch_of("llama4-scout", framework="hf", **options)
    sent, routed = (expert_sizes(batch.kinds[0], batch.machine)[0].item() for batch in (all_of_them, plain))
    assert sent == 16 * routed
    said = [text for text in assumptions(case) if "all 16 experts" in text]
    assert len(said) == 1 and not any("a learned router" in text for text in assumptions(case))


@pytest.mark.parametrize(
    ("model", "framework", "warned"),
    [("mixtral-8x7b", "ddp", 1), ("mixtral-8x7b", "hf", 0), ("llama4-scout", "ddp", 0), ("gpt2", "ddp", 0)],
)
def test_experts_in_32_bit_under_autocast_are_warned_of(model, framework, warned):
    """DDP alone trains with autocast, and Llama 4's products of all experts are cast."""
    case, _ = batch_of(model, "1x8xh100-sxm", framework, micro_batch=1, tp=1)
    assert sum("autocast knows no" in text for text in assumptions(case)) == warned


def test_a_router_multiplies_in_32_bit_where_transformers_does_and_autocast_lets_it():
    """At the rate of fp32, of an input that is widened, 6 bytes each way, unless the residual is wide."""
    model = api.load_model("mixtral-8x7b")
    coded = {
        code: replace(model, blocks=tuple(replace(block, router_code=code) for block in model.blocks))
        for code in ("", "wide", "exact")
    }
    slower = 989 / 67  # H100: peaks in 16 bit and fp32
    for framework, expected in (("hf", (slower, slower)), ("ddp", (1.0, slower)), ("megatron-core", (1, 1))):
        batches = [batch_of(one, framework=framework, zero=0)[1] for one in coded.values()]
        rows = [
            next(m for m, n, k, group in linear_sizes(batch.kinds[0], batch.machine) if group == "router")
            for batch in batches
        ]
        assert [np.max(row) / np.max(rows[0]) for row in rows[1:]] == pytest.approx(expected, rel=0.01)
        plain, wide = (elementwise_times(batch.kinds[0], batch.machine) for batch in batches[:2])
        kernels = batches[0].machine.kernels
        widened = 6 * tokens_of(batches[0]) * model.blocks[0].hidden * (framework == "hf")
        rate = np.max(kernels.stream_eff * kernels.memory_bytes_per_s)
        for way in (0, 1):
            assert wide[way] - plain[way] == pytest.approx(widened / rate, rel=1e-9, abs=1e-12)


def test_partial_graphs_end_where_tokens_leave_for_experts():
    def launched(graphs, ep):
        case, _ = batch_of("qwen3-30b-a3b", "1x8xb200-sxm", "megatron-bridge@26.04", dp=8, ep=ep)
        framework = replace(case.framework, cuda_graphs=graphs)
        batch = build_batch([replace(case, framework=framework)], CONSTANTS)
        return host_times(batch.kinds[0], batch.machine, batch.recompute)[0].item()

    for graphs in ("none", "partial"):  # each of 48 experts more on a rank is launched by the host
        more = launched(graphs, 2) - launched(graphs, 8)
        assert more == pytest.approx(48 * CONSTANTS.host_expert)
    assert launched("partial", 8) < launched("none", 8)
    assert launched("full", 8) == 0.0
