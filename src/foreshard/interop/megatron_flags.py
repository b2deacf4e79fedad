"""Words of Megatron-LM that its exporter writes and its importer reads."""

FSDP_STRATEGIES = {0: "no_shard", 1: "optim", 2: "optim_grads", 3: "optim_grads_params"}
"""Values of --data-parallel-sharding-strategy by ZeRO level."""
FSDP_GRADIENTS = {
    "grad_bytes": "--megatron-fsdp-main-grads-dtype",
    "grad_reduce_bytes": "--megatron-fsdp-grad-comm-dtype",
}
"""Dtypes of Megatron-FSDP's gradients in memory and on the wire; auto is the weights', and the former's."""
