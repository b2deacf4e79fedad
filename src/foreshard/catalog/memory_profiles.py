"""Memory profiles: which bytes a framework keeps on the device, read from its source code.

The dtypes of gradients, master weights and moments are capabilities of the framework entry
(`spec.framework`); a profile adds what is kept beside them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from foreshard.catalog.shipped import inherited, shipped
from foreshard.errors import unknown

if TYPE_CHECKING:
    from foreshard.spec.framework import Framework


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryProfile:
    """What one framework keeps on a device beyond weights, gradients and optimizer states.

    dummy_wgrads : TransformerEngine caches one 16-bit gradient of each distinct weight shape
    weights_are_master : weights are kept in fp32 and are the master copy (FSDP shards, DDP with autocast)
    autocast_bytes : 16-bit copy of every weight but experts' that autocast caches until the backward is over
    lazy_gradients : gradients exist from their backward to the step only
    extra_gradient_bytes : bytes per parameter of a second, lasting copy of the gradients, with replicas
    backward_gradient_bytes : 16-bit gradients of the running backward beside fp32 main gradients
    casts_moments : the optimizer casts 16-bit moments of all parameters to fp32 for its step
    stores_remainders : beside narrow moments, of a master weight in fp32 only the 16 bits that a bf16 weight
        lacks are kept
    step_bytes : temporaries of the step with 16-bit gradients, bytes per parameter this rank updates
    step_elements : parameters of a rank that ZeRO 3 updates at a time (sub_group_size), 0 for all
    bucket_bytes : flat buffer of the gradient reduction
    bucket_of_backward : ZeRO 1 and 2 hold it in a backward only, two of them where reductions run beside it;
        ZeRO 3 keeps it, and copies it into the parts of the ranks
    gathered_elements : parameters kept gathered although sharded (ZeRO-3 max_live_parameters), and one more
        matrix: gathers go on until they reach it
    prefetched_elements, queued_elements : with Megatron-FSDP, elements of weights gathered ahead of the
        block at work, and of gradients that wait for their reduction; at least one block and two
    unit_bytes : transient bytes per element of the largest gathered unit, zero 3
    units : weights are gathered, and gradients reduced, one block, embedding or head at a time (FSDP2)
    combined_bytes : an element of experts' outputs as it is kept to be scaled by its score; of 4 the router
        reads its input in fp32, too
    loss_chunks : parts of a micro-batch for which the loss makes logits one after the other, with `units`
    loss_hidden_bytes : bytes per element of the hidden state that final norm and loss hold
    eager_mlp : the gated activation runs as separate kernels and saves one more tensor
    attention_output_bytes : in 8-bit training, bytes per element of attention's output, of which one copy
        serves its own backward and the product behind it; 0 = 16 bit beside an 8-bit copy
    fp8_mlp_input : in 8-bit training the gated activation keeps its input in 8 bit
    drops_transposes : no transposed 8-bit copy of a weight outlives its product
    default_dropout : dropout is on unless its arguments say otherwise: masks and dropped scores are kept
    packed_queries : queries are turned in place inside a copy of queries, keys and values, of which as many
        heads of keys and values are copied once more: the first copy is kept whole
    eager_norm : norms run as separate fp32 kernels and save two fp32 copies
    wide_softmax : attention without a flash kernel runs softmax in 32 bit, and keeps it
    masked : windows of attention are a mask, which every layer keeps as torch adds it to scores, and keys and
        values are copied to every query head
    compiled : torch.compile runs elementwise operations again in backward: what products and attention read
        is kept, and the logits in 16 bit
    keeps_outputs : a stage keeps its outputs until their backward (DeepSpeed and torch pipelines)
    logit_bytes : peak bytes per logit where the loss differs from what the framework entry says; 0 = as there
    held_logit_bytes : bytes per logit that the caller of the loss still holds in backward
    slack : reserved over allocated bytes of the caching allocator, less 1
    context_bytes : CUDA context and loaded kernels
    world_communicator : norms and overflow flags are reduced over all ranks, in a group of their own
    pair_communicators : a stage has a communicator with each neighbour (the ends one for tied weights), and
        one over its model replica
    """

    name: str
    dummy_wgrads: bool = False
    weights_are_master: bool = False
    autocast_bytes: float = 0.0
    lazy_gradients: bool = False
    extra_gradient_bytes: float = 0.0
    backward_gradient_bytes: float = 0.0
    casts_moments: bool = False
    stores_remainders: bool = False
    step_bytes: float = 0.0
    step_elements: float = 0.0
    bucket_bytes: float = 0.0
    bucket_of_backward: bool = False
    gathered_elements: float = 0.0
    prefetched_elements: float = 0.0
    queued_elements: float = 0.0
    unit_bytes: float = 0.0
    units: bool = False
    combined_bytes: float = 0.0
    loss_chunks: int = 1
    loss_hidden_bytes: float = 0.0
    eager_mlp: bool = False
    attention_output_bytes: float = 0.0
    fp8_mlp_input: bool = False
    drops_transposes: bool = False
    default_dropout: bool = False
    packed_queries: bool = False
    eager_norm: bool = False
    wide_softmax: bool = False
    masked: bool = False
    compiled: bool = False
    keeps_outputs: bool = False
    logit_bytes: float = 0.0
    held_logit_bytes: float = 0.0
    slack: float = 0.04
    context_bytes: float = 0.75 * 2**30
    world_communicator: bool = False
    pair_communicators: bool = False
    source: str = ""


@cache
def memory_profile(name: str) -> MemoryProfile:
    """Return the memory profile of that name."""
    table: dict[str, dict[str, Any]] = shipped("memory_profiles.toml")
    if name not in table:
        raise unknown("memory profile", name, table, key="memory", rule="Profiles are")
    return MemoryProfile(name=name, **inherited(name, table))


# In 16 bit the logits, their gradient, and zeros: the gradient of the logits that the model returns beside
# its loss, which aot_autograd makes though nobody has one.
_COMPILED_LOGIT_BYTES = 6.0


def profile_of(framework: Framework) -> MemoryProfile:
    """Return the memory profile of a framework, as torch.compile changes it where it makes the kernels.

    Source
    ------
    torch 2.13 _functorch/partitioners.py min_cut_rematerialization_partition: a chain of elementwise
    operations and reductions is computed again from what products keep; bytes per token of transformers'
    models compiled (`tests/validation/test_hf_memory.py`).
    """
    profile = memory_profile(framework.memory)
    if framework.masked:
        profile = replace(profile, masked=True)
    if framework.softmax == "wide":
        profile = replace(profile, wide_softmax=True)
    if framework.elementwise != "compiled" or not profile.eager_mlp:
        return profile
    logits = _COMPILED_LOGIT_BYTES if profile.eager_norm else profile.logit_bytes
    return replace(profile, compiled=True, eager_mlp=False, logit_bytes=logits)
