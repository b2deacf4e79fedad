"""Peaks of FSDP2, which gathers weights and reduces gradients unit by unit: embedding, blocks, head.

Units are gathered while those before compute; in backward the gradient of a unit waits in the input of a
reduce-scatter while the next unit goes back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from foreshard.catalog.memory_profiles import MemoryProfile
    from foreshard.cost.memory import StageLoad
    from foreshard.cost.memory_activations import Activations
    from foreshard.cost.memory_states import States, Units
    from foreshard.spec.framework import Framework

_FEW = 4  # units of blocks that are looked at one by one

Moment = tuple[Any, Any, Any]
"""Gradients, activations, temporaries alive at one time; every part is a float or an array over rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unit:
    """Bytes of one unit: weights gathered beside those that stay, gradient, input of the reduce-scatter."""

    elements: Any
    weights: Any
    gradient: Any
    reduced: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """What the moments of a step are made of, bytes per rank."""

    load: StageLoad
    profile: MemoryProfile
    states: States
    acts: Activations
    embedding: _Unit
    block: _Unit
    head: _Unit
    whole: _Unit
    chunked: float

    @property
    def loss(self) -> Any:
        """Saved activations beside the logits: those of the final norm and of the loss."""
        element = self.load.activation_bytes_per_element
        return self.profile.loss_hidden_bytes / element * self.acts.boundary * self.load.has_head

    @property
    def chunks(self) -> Any:
        """Bytes beside saved ones where the loss goes over the head in chunks, 0 where it does not.

        The head stays gathered; its gradient is summed over the chunks in the dtype of the reduction, and all
        of it enters the reduce-scatter behind the last.
        """
        acts, head = self.acts, self.head
        logits = acts.logit_gradient  # 16 bit, as the head writes them
        most = np.maximum(np.maximum(acts.logits, 2 * logits + head.gradient), logits + head.reduced)
        return self.chunked * (head.weights + head.reduced + most)


def unit_moments(
    load: StageLoad, framework: Framework, profile: MemoryProfile, states: States, acts: Activations
) -> tuple[Moment, ...]:
    """Return the moments of a step that may be its fullest; those of rows that are not sharded are empty.

    Source
    ------
    torch 2.13 distributed/fsdp/_fully_shard/_fsdp_param_group.py (post_backward: the unit is resharded, the
    input of its reduce-scatter filled, the last one dropped), _fsdp_collectives.py foreach_reduce; checked
    against torch's FSDPMemTracker in tests/validation/test_fsdp2_memory.py.
    """
    units, element = states.units, load.activation_bytes_per_element
    embedding, block, head, whole = (
        _Unit(
            elements=size,
            weights=element * (1 - units.gathered) * size,
            gradient=element * units.trained * size,
            reduced=framework.grad_reduce_bytes * units.trained * size,
        )
        for size in (units.embedding, units.block, units.head, units.everything)
    )
    run = _Run(
        load=load,
        profile=profile,
        states=states,
        acts=acts,
        embedding=embedding,
        block=block,
        head=head,
        whole=whole,
        chunked=float(profile.loss_chunks > 1),
    )
    held, several = units.held > 0, (units.sharded > 0) & (np.asarray(units.whole) > 0)
    one_by_one = _one_unit(run) if load.wrap == 0 else _reduced_at_once(run)
    return (
        *_where((units.sharded > 0) & ~held & ~several, one_by_one),
        *_where(several & ~held, _accumulated(run)),
        *_where(held, _held(run)),
    )


def _where(rows: Any, moments: tuple[Moment, ...]) -> tuple[Moment, ...]:
    """Return the moments of some rows, nothing of the others."""
    if not np.count_nonzero(rows):
        return ()
    return tuple(
        (np.where(rows, g, 0.0), np.where(rows, a, 0.0), np.where(rows, t, 0.0)) for g, a, t in moments
    )


def _reduced_at_once(run: _Run) -> tuple[Moment, ...]:
    """Return the moments where every backward reduces what it has: from the loss to the embedding."""
    acts, units, states = run.acts, run.states.units, run.states
    embedding, block, head = run.embedding, run.block, run.head
    again = np.asarray(run.load.num_micro_batches) > 1  # gradients of earlier micro-batches are there

    def done(elements: Any) -> Any:
        """Return the gradients after so many elements have been reduced."""
        share = np.minimum(elements, units.everything) / np.maximum(units.everything, 1)
        return states.gradients * np.where(again, 1.0, share)

    saved = acts.saved
    waiting = np.minimum(units.ahead, units.count) * block.weights  # gathered while the head goes back
    gone = units.everything - units.embedding
    return (
        (done(0), saved + run.loss, head.weights + acts.logits),
        (done(0), saved + acts.boundary, head.weights + head.gradient + waiting + acts.logit_gradient),
        (done(head.elements), saved + acts.boundary, head.gradient + head.reduced + waiting),
        (done(run.chunked * head.elements), saved + run.loss, run.chunks),
        *(moment for left in _places(units) for moment in _going_back(run, done, left)),
        (done(gone), acts.boundary, block.reduced + embedding.weights + embedding.gradient),
        (states.gradients, 0.0, embedding.gradient + embedding.reduced),
        (states.gradients, 0.0, states.step),
    )


def _places(units: Units) -> tuple[Any, ...]:
    """Return how many units of blocks are left where a backward may be fullest: each where they are few.

    From unit to unit activations and gradients change evenly, but for the first, behind the head, and the
    last ones, which have fewer units left to gather.
    """
    count = units.count
    if np.size(count) and np.max(count) <= _FEW:
        return tuple(range(int(np.max(count)), 0, -1))
    last = range(int(np.max(units.ahead)) + 1, 0, -1)
    return (count, np.maximum(count - 1, 1), *last)


def _going_back(run: _Run, done: Callable[[Any], Any], left: Any) -> tuple[Moment, ...]:
    """Return the moments of the backward of a unit of blocks, with which so many are left."""
    acts, units, block, embedding = run.acts, run.states.units, run.block, run.embedding
    left = np.minimum(left, units.count)
    blocks = np.minimum(left * units.blocks, units.layers)  # those of the unit and before it
    own = blocks - (left - 1) * units.blocks  # the last unit may have fewer
    behind = units.layers - blocks
    each = np.maximum(units.blocks, 1)

    def saved(blocks: Any) -> Any:
        """Return the activations of the first blocks."""
        behind = units.layers - blocks
        near = np.maximum(acts.saved - behind * acts.one_layer, 0)
        return np.where(behind <= blocks, near, np.minimum(blocks * acts.one_layer, acts.saved))

    before = np.where(
        left == units.count, units.layers - (left - 1) * units.blocks, each
    )  # of the one behind
    before = np.where(left == units.count - 1, units.layers - left * units.blocks, before) / each
    reduced = np.where(left == units.count, run.head.reduced, before * block.reduced)
    ahead = np.minimum(left - 1, units.ahead) * block.weights + (units.ahead >= left) * embedding.weights
    alive = reduced + own / each * block.weights + ahead
    gradient = block.gradient / each
    gradients = done(run.head.elements + behind / each * block.elements)
    return (
        (gradients, saved(blocks), alive + acts.temporary),
        (gradients, saved(blocks - own + 1), alive + acts.temporary + (own - 1) * gradient),
        (gradients, saved(blocks - own) + 3 * acts.boundary, alive + own * gradient),
        (gradients, saved(blocks - own) + acts.boundary, ahead + own * (gradient + block.reduced / each)),
    )


def _accumulated(run: _Run) -> tuple[Moment, ...]:
    """Return the moments where micro-batches add to whole gradients, which the last one reduces.

    A gradient of one more micro-batch is there for as long as it takes to add it, matrix by matrix. In the
    last backward whole gradients go as they are reduced, unit by unit.
    """
    acts, units, states, load = run.acts, run.states.units, run.states, run.load
    embedding, block, head, whole = run.embedding, run.block, run.head, run.whole
    element = load.activation_bytes_per_element
    matrix = element * units.matrix * (units.trained > 0)
    ahead = np.minimum(np.maximum(units.count - 1, 0), units.ahead) * block.weights
    at_work = block.weights + ahead + np.maximum(acts.temporary, matrix)
    of_head, waiting, copied, reduced = head.weights, ahead, 0.0, embedding.reduced
    of_embedding, left = embedding.weights, states.gradients + embedding.gradient
    if load.wrap == 0:  # all weights stay, and what was gathered until the forward is over
        copied = element * whole.elements
        of_head = of_embedding = whole.weights
        at_work, waiting = whole.weights + np.maximum(acts.temporary, matrix), 0.0
        reduced, left = whole.weights - copied + whole.reduced, whole.gradient
    shards = states.gradients * head.elements / np.maximum(units.everything, 1)
    logits = acts.logit_gradient
    return (
        (whole.gradient, acts.saved, of_head + copied + logits),
        (whole.gradient, acts.saved + run.loss, of_head + acts.logits),
        (whole.gradient, acts.saved + acts.boundary, of_head + head.gradient + waiting + logits),
        (whole.gradient + shards, acts.saved + acts.boundary, head.reduced + waiting),
        (whole.gradient, acts.saved, at_work),
        (whole.gradient - head.gradient + shards, acts.saved, at_work + head.reduced),
        (whole.gradient, acts.boundary, of_embedding + embedding.gradient),
        (left, 0.0, reduced),
        (states.gradients, 0.0, reduced),
        (states.gradients, 0.0, states.step),
    )


def _one_unit(run: _Run) -> tuple[Moment, ...]:
    """Return the moments where one unit holds the whole model: all weights, and at last all gradients.

    As the root it keeps its weights from forward to backward, and is reduced when the embedding has gone
    back, without its weights.
    """
    acts, states, whole = run.acts, run.states, run.whole
    embedding, head = run.embedding.gradient, run.head.gradient
    count = np.maximum(run.states.units.layers, 1)
    layer = (whole.gradient - embedding - head) / count  # gradients of a block
    again = states.gradients * (np.asarray(run.load.num_micro_batches) > 1)
    one, end = np.minimum(acts.one_layer, acts.saved), 3 * acts.boundary
    gathered = run.load.activation_bytes_per_element * whole.elements
    chunk = run.chunked * np.maximum(acts.logits, 2 * acts.logit_gradient + head)
    return (
        # What was gathered stays until the next unit is, or the forward is over.
        (again, acts.saved, whole.weights + gathered + acts.logit_gradient),
        (again, acts.saved + run.loss, whole.weights + np.maximum(acts.logits, chunk)),
        (again, acts.saved + acts.boundary, whole.weights + head + acts.logit_gradient),
        (again, acts.saved, whole.weights + head + acts.temporary),
        (again, one, whole.weights + head + (count - 1) * layer + acts.temporary),
        (again, end, whole.weights + head + count * layer),
        (again, acts.boundary, whole.weights + whole.gradient),
        (again, 0.0, whole.weights - gathered + whole.gradient + whole.reduced),
        (states.gradients, 0.0, whole.weights - gathered + whole.reduced),
        (states.gradients, 0.0, whole.weights - gathered + states.step),
    )


def _held(run: _Run) -> tuple[Moment, ...]:
    """Return the moments of a stage that keeps weights and gradients whole until its last micro-batch.

    The torch pipeline allocates the inputs and gradients it receives for all micro-batches at once.

    Source
    ------
    torch 2.13 distributed/pipelining/stage.py _create_act_recv_info, _create_grad_recv_info,
    backward_maybe_with_nosync, perform_reduce_grad; torchtitan b5bcd76 distributed/fsdp.py.
    """
    load, acts, whole = run.load, run.acts, run.states.gradients
    embedding, block, head = run.embedding, run.block, run.head
    count, flying = np.asarray(load.num_micro_batches), np.maximum(load.in_flight, 1)
    # A saved input lies in its buffer, which stays where what is saved goes to the host.
    inputs = np.maximum(count - flying * (1 - np.asarray(load.offload_activations)), 0)
    inputs = inputs * (1 - np.asarray(load.has_embedding))
    # The last stage holds a gradient until it is sent instead.
    received = acts.boundary * (inputs + np.where(np.asarray(load.has_head) > 0, 1, count))
    saved, each = acts.saved + received, acts.saved / flying
    before = whole * (count > flying)
    first = np.where(np.asarray(load.has_embedding) > 0, embedding.reduced, block.reduced)
    released = np.where(np.asarray(load.has_embedding) > 0, embedding.elements, block.elements)
    left = np.maximum(whole - block.reduced - embedding.reduced, before)
    return (
        (before, saved + run.loss, acts.logits),
        (before, saved + acts.boundary, head.gradient + acts.logit_gradient),
        (np.maximum(before, head.reduced), saved, head.gradient),
        (np.maximum(before, head.reduced), saved, acts.temporary),
        (whole * (count > 1), saved - each, acts.temporary),
        (left, saved - each + acts.one_layer, acts.temporary),
        (whole, saved - each + 3 * acts.boundary, np.maximum(block.gradient, embedding.gradient)),
        (whole, received + acts.boundary, first - load.activation_bytes_per_element * released),
    )
