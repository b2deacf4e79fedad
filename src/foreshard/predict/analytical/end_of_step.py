"""What gradients and weights take outside the steady state: before the first micro-batch, behind the last.

Each chunk of layers gathers its updated weights before its first forward, where that overlaps, and reduces
its gradients from its last backward on. A rank moves one chunk after the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from foreshard.predict.analytical.stage import StageTimes
from foreshard.predict.batch import Batch
from foreshard.predict.tasks.collectives import (
    across_groups_s,
    bucket_elements,
    contention,
    gradient_sync_s,
    held_copies_s,
    tied_sync_s,
)
from foreshard.predict.tasks.host import optimizer_s
from foreshard.predict.tasks.orthogonal import orthogonal_s


@dataclass(frozen=True, slots=True, kw_only=True)
class EndOfStep:
    """Seconds that gradients and weights take on each run of stages, shape (runs, pipelines)."""

    ready: Any  # gathering the weights that the first forward needs first
    wait: Any  # what the first forwards of all chunks wait for the rest of their weights
    next_chunk: Any  # gathering the weights of another chunk
    # of the gradients of the first chunk what its own last backward hides, and the rest
    beside: Any
    exposed: Any
    slowed: Any  # what the last backward of a chunk takes longer beside them, where its output waits for that
    cut: Any  # whether the other chunks have several buckets too, so that their own passes hide as much
    last_of_all: Any  # whether gradients move behind the backward of all chunks
    sums: Any  # sums over groups of pipelines and over both ends of one, and copies of all, behind all else
    # the optimizer, behind it gathering updated weights that no forward hides
    optimizer: Any
    late_gather: Any
    # chunks, and seconds from one to the next, forward and backward
    chunks: Any
    rounds: tuple[Any, Any]

    @property
    def update_s(self) -> Any:
        """Seconds from the last gradient of all stages on."""
        return self.optimizer + self.late_gather

    @property
    def first_s(self) -> Any:
        """Seconds for which the first forward waits, so that no chunk waits later on."""
        more = self.next_chunk + (self.chunks - 1.0) * (self.next_chunk - self.rounds[0])
        return np.maximum(self.ready, np.where(self.chunks > 1, more, 0.0))

    @property
    def tail_s(self) -> Any:
        """Seconds from the last backward until all gradients are reduced."""
        chunk = self.beside + self.exposed
        earlier = np.where(self.last_of_all, chunk, chunk - self.rounds[1])
        return (
            np.maximum(self.exposed, np.where(self.chunks > 1, chunk + (self.chunks - 1.0) * earlier, 0.0))
            + self.sums
        )


def end_of_step(batch: Batch, stage: StageTimes, *, least: Any = 0.0) -> EndOfStep:
    """Return what precedes the first micro-batch and follows the last one on each run of stages.

    Where `least` is above 0, the last micro-batch may be as short as leaves fewest gradients exposed.
    """
    machine, p = batch.machine, batch.pipeline
    rank, traits, chunks = machine.rank, machine.traits, p.num_chunks
    buckets = _num_buckets(batch, stage)
    reduce, gather = (
        np.where(rank.zero >= 3, 0.0, buckets * seconds)
        for seconds in gradient_sync_s(stage.params / buckets, stage.expert_params / buckets, machine)
    )
    first, last = _bucket_shares(batch, stage)
    # Gradients move beside the last micro-batch, which may be short.
    part = np.minimum(stage.last_share, 1.0)
    # The last gradients of weights put off come in the last piece of the backward alone.
    last_backward = np.where(p.zero_bubble > 0, stage.later, stage.backward)
    hidden_b = last_backward * (1.0 - chunks * first)
    hidden_b = np.where(chunks > 1, hidden_b, last_backward - _first_bucket_s(batch, stage, last_backward))
    hidden_b = part * hidden_b
    first_forward = np.where(p.num_micro_batches > 1.0, 1.0, part) * stage.forward
    hidden_f = first_forward * (1.0 - chunks * last)
    # Compute beside a collective is slowed, which counts where compute is what the step waits for.
    slowed = contention(machine)
    hides_most = np.maximum(reduce * (1.0 - chunks * last), 0.0) / (1.0 + slowed)
    hidden_b = np.where(least > 0, np.minimum(hidden_b, hides_most), hidden_b)
    slowed_b = slowed * np.minimum(hidden_b / chunks, np.maximum(reduce / chunks - reduce * last, 0.0))
    slowed_f = slowed * (chunks == 1) * np.minimum(hidden_f, gather * (1.0 - last))
    exposed = np.maximum(reduce * last + slowed_b, (reduce - hidden_b) / chunks)
    # Every stage waits for its own buckets, if it has several; a chunk that is one bucket does not. Two come
    # while a stage waits for its first input, but for the first stage, which has its own.
    each = (chunks == 1) | (traits.bucket_elements > 0)
    bucket_s = (1.0 - last) * np.maximum(gather - first_forward, 0.0) / np.maximum(buckets - 1.0, 1.0)
    later = np.maximum(slowed_f, np.maximum(buckets - 2.0 * chunks, 0.0) * bucket_s)
    waited = np.maximum(slowed_f, later + bucket_s * (buckets >= 1.5))
    own = np.maximum(gather * last, (gather - hidden_f) / chunks)
    in_line = 1.0 * (traits.grad_overlap <= 0)
    beside = 1.0 * (traits.param_gather_overlap > 0)
    wait = beside * np.where(each, later, 0.0)
    optimizer = optimizer_s(stage.params, stage.expert_params, sum(batch.counts), machine, p.num_devices)
    optimizer = optimizer + orthogonal_s(batch.kinds, batch.counts, machine)
    return EndOfStep(
        ready=beside * np.where(each, gather * last + waited - later, own),
        wait=wait,
        next_chunk=beside * gather / chunks,
        beside=(1.0 - in_line) * np.maximum(reduce / chunks - exposed, 0.0),
        exposed=np.where(in_line > 0, reduce / chunks, exposed),
        slowed=(1.0 - in_line) * (p.zero_bubble <= 0) * slowed_b,
        cut=each,
        last_of_all=in_line > 0,
        sums=_sums_s(batch, stage),
        optimizer=optimizer,
        late_gather=(1.0 - beside) * gather,
        chunks=chunks,
        rounds=_rounds_s(batch, stage, wait / chunks),
    )


def _sums_s(batch: Batch, stage: StageTimes) -> Any:
    """Return seconds of the sums of gradients over groups of pipelines, and of tables that both ends hold."""
    machine, p = batch.machine, batch.pipeline
    held = stage.params, stage.expert_params
    sums = across_groups_s(*held, machine) + held_copies_s(*held, machine)
    if not np.count_nonzero(p.tied):
        return sums
    tied = tied_sync_s(p.hidden, p.vocab, p.ends_cross, machine) * p.tied
    ends = np.maximum(batch.has_embedding, batch.has_head)
    # Each end waits for the other, and the sum takes as long as the slower one needs.
    slower = (ends * tied).max(0) if batch.boundaries.is_chain else tied
    return sums + np.where(p.num_stages > 1, ends * slower, 0.0)


def _rounds_s(batch: Batch, stage: StageTimes, wait_s: Any) -> tuple[Any, Any]:
    """Return seconds from one chunk of a stage to the next, forward and backward.

    As many micro-batches as there are stages pass the slowest stage, each with a message, and one passes all
    of them, whichever is longer; in forward every stage has `wait_s` to wait for its weights. A stage that is
    priced alone may have any others: its rounds have no end.
    """
    p, count = batch.pipeline, batch.multiplicity
    if not np.count_nonzero(p.num_chunks > 1):
        return 0.0, 0.0
    if not batch.boundaries.is_chain:
        endless = np.where(p.num_chunks > 1, np.inf, 0.0)
        return endless, endless
    way = way_of(batch, stage)
    messages_s = (way.inside + way.after).sum(0) + way.wrap

    def round_s(op_s: np.ndarray) -> Any:
        each = np.where(count > 0, op_s / p.num_chunks, 0.0)
        slowest = np.where(count > 0, each + stage.messages.widest, 0.0).max(0)
        return np.maximum(p.num_stages * slowest, (count * each).sum(0) + messages_s)

    return round_s(stage.forward) + (count * wait_s).sum(0), round_s(stage.backward)


class Way(NamedTuple):
    """Seconds of the messages of one micro-batch on its way through the stages, one chunk of each."""

    # over all boundaries between stages of a run, and over the one after it: shape (runs, pipelines)
    inside: np.ndarray
    after: np.ndarray
    wrap: np.ndarray  # from the last stage back to the first, where a chunk follows; shape (pipelines,)


def way_of(batch: Batch, stage: StageTimes) -> Way:
    """Return the messages between the stages of each pipeline."""
    p, places, count, messages = batch.pipeline, batch.boundaries, batch.multiplicity, stage.messages
    is_last = places.first + count >= p.num_stages
    inside = (np.maximum(count - 1.0, 0.0) - places.far_inside) * messages.near
    return Way(
        inside=np.where(count > 0, inside + places.far_inside * messages.far, 0.0),
        after=np.where(is_last | (p.num_stages <= 1) | (count <= 0), 0.0, messages.after),
        wrap=np.where(is_last & (p.num_chunks > 1) & (count > 0), messages.after, 0.0).max(0),
    )


def _bucket_limit(batch: Batch) -> Any:
    """Return the elements after which a bucket of each stage leaves."""
    traits, rank = batch.machine.traits, batch.machine.rank
    first = (batch.has_embedding > 0) & (traits.grad_overlap > 0)
    return bucket_elements(traits.bucket_elements, rank.dp * rank.cp, first)


def _num_buckets(batch: Batch, stage: StageTimes) -> Any:
    """Return in how many collectives the gradients of a stage move, which each take their start-up.

    A bucket leaves behind the layer that fills it.
    """
    limit = _bucket_limit(batch)
    params = np.maximum(stage.params + stage.expert_params, 1.0)
    layer = params / np.maximum(np.asarray(sum(batch.counts)), 1.0)
    filled = np.where(np.isfinite(limit), np.ceil(np.minimum(limit, params) / layer) * layer, params)
    return np.maximum(params / filled, 1.0)


def _first_bucket_s(batch: Batch, stage: StageTimes, last_backward: Any) -> Any:
    """Return seconds of a stage's last backward before its first bucket leaves: head and first layers.

    A head that shares its table has no gradients of its own; one that does may fill the bucket alone.
    """
    p, limit = batch.pipeline, _bucket_limit(batch)
    _, given, late = stage.head
    head_s = np.where(p.zero_bubble > 0, late, given + late)
    table = (1.0 - p.head_frozen) * p.hidden * p.vocab / batch.machine.rank.tp
    head = batch.own_head * table
    params = np.maximum(stage.params + stage.expert_params, 1.0)
    layers = np.maximum(np.asarray(sum(batch.counts)), 1.0)
    layer = np.maximum(params - head - batch.has_embedding * table, 1.0) / layers
    count = np.minimum(np.ceil(np.maximum(limit - head, 0.0) / layer), layers)
    return head_s + count / layers * np.maximum(last_backward - head_s, 0.0)


def _bucket_shares(batch: Batch, stage: StageTimes) -> tuple[Any, Any]:
    """Return the shares of a stage's gradients in the bucket that leaves first, and last.

    The last holds the embedding, if the stage does; chunks of layers are buckets at least.
    """
    p, rank, limit = batch.pipeline, batch.machine.rank, _bucket_limit(batch)
    params = np.maximum(stage.params + stage.expert_params, 1.0)
    first = np.minimum(1.0, limit / params)
    table = (1.0 - p.head_frozen) * p.hidden * p.vocab / rank.tp
    chunk = np.maximum(params - (batch.has_embedding + batch.own_head) * table, 0.0) / p.num_chunks
    table = batch.has_embedding * table
    layer = chunk / np.maximum(np.asarray(sum(batch.counts)) / p.num_chunks, 1.0)
    held, most = np.broadcast_arrays(chunk + table, limit)
    rest = np.mod(held, most, where=np.isfinite(most), out=np.full(held.shape, np.inf))
    rest = np.where(limit <= layer, layer, rest)
    last = np.minimum(np.maximum(rest, table), chunk + table)
    return np.minimum(first, 1.0 / p.num_chunks), np.where(first >= 1.0, 1.0 / p.num_chunks, last / params)
