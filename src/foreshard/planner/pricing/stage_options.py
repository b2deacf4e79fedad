"""The ways to run a stage that the search on mixed devices offers: degrees, samples, recompute rules."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from itertools import product

from foreshard.catalog.offers import offers_of
from foreshard.planner.request import PlanRequest
from foreshard.predict.placement import domain_block
from foreshard.spec.cluster import NodeGroup

_RULES = ("none", "selective:core_attn+mlp+layernorm", "full")
"""Recompute rules: none, what selective recomputation saves most by, all."""
MICRO_BATCHES = (1, 2, 4)
"""Samples a rank: larger ones fill pipelines more slowly and run no faster, unless they are short."""
_SHORT_TOKENS = 16384
"""Tokens of a rank's part of a micro-batch up to which it may take more samples than the usual."""
_AT_ONCE = (3, 6, 12, 16, 24, 32, 48, 64)
"""Samples that a rank of a pipeline of one stage may take besides."""
_WIDTHS = tuple(range(1, 9))
"""Inner data-parallel ranks of a stage: more replicas are pipelines of their own."""
_LEAST_TOKENS = 8192
"""Tokens of a sample that every rank has where ranks share its sequence, before tp divides them further."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageKind:
    """What makes a stage of an option: devices of one node group, degrees, and what each rank does.

    `ep` ranks hold one copy of the experts; `cp` ranks of each tensor rank share the sequence of a sample.
    """

    node_group: int
    tp: int
    inner_dp: int
    micro_batch: int
    recompute: str
    zero: int
    ep: int = 1
    cp: int = 1

    @property
    def split(self) -> int:
        """Return the ranks that a sample is split over."""
        return self.tp * self.cp

    @property
    def num_devices(self) -> int:
        """Return all ranks of the stage."""
        return self.split * self.inner_dp

    @property
    def samples(self) -> int:
        """Return the samples of a micro-batch of the stage."""
        return self.inner_dp * self.micro_batch


def stage_options(
    request: PlanRequest, use: tuple[int, ...], *, every: bool = False, at_once: bool = True
) -> list[StageKind]:
    """Return the ways to run a stage on each node group that can compute in the precision.

    With `every` also those that cut experts over ranks of the stage, or split long sequences over them. A
    rank with a part of a sequence has one sample: two whole ones on as many ranks would save the messages.
    With `at_once` ranks may also take many short samples in one micro-batch.
    """
    offers = offers_of(request.framework)
    rules = recompute_rules(request)
    levels = offers.levels(2) or offers.zero  # what runs no pipelines of stages shards whole models
    zero = request.framework.default_zero if request.framework.default_zero in levels else max(levels)
    allowed = request.choices.of("zero", levels)
    zero = zero if zero in allowed or not allowed else max(allowed)
    found = []
    for g in use:
        nodes = request.cluster.nodes[g]
        if not nodes.device.supports(request.precision):
            continue
        degrees = [n for n in range(1, domain_block(nodes) + 1) if _splits(request, n, nodes)]
        degrees = degrees if "tp" in offers.degrees else [1]
        contexts = context_degrees(request) if every else [1]
        sizes = (
            partial(rank_samples, request, alone=True) if at_once else lambda _: samples_in_chunks(request)
        )
        experts = cache(partial(_expert_degrees, request))
        shapes = [(width, size) for width in _WIDTHS for size in sizes(width)]
        for tp, cp, (width, size), rule in product(degrees, contexts, shapes, rules):
            if cp > 1 and (size > 1 or request.seq_len % (tp * cp)):
                continue
            ranks = tp * cp * width
            whole, within = ranks % nodes.per_node == 0, ranks <= nodes.per_node
            if nodes.per_node & (nodes.per_node - 1) == 0:  # other sizes would double the options
                whole, within = whole and width in (1, 2, 4, 8), nodes.per_node % ranks == 0
            least = width * (size - 1) + 1  # samples that one of the ranks takes `size` of
            if ranks > nodes.num_devices or not (whole or within) or least > request.global_batch:
                continue
            found += [
                StageKind(
                    node_group=g,
                    tp=tp,
                    inner_dp=width,
                    micro_batch=size,
                    recompute=rule,
                    zero=zero if width * cp > 1 else min(zero, 1),
                    ep=ep,
                    cp=cp,
                )
                for ep in (experts(ranks) if every else (1,))
            ]
    if not request.choices:
        return found
    names = ("tp", "cp", "ep", "micro_batch", "zero", "recompute")
    return [kind for kind in found if all(request.choices.may_be(n, getattr(kind, n)) for n in names)]


def rank_samples(request: PlanRequest, width: int, *, alone: bool = False) -> tuple[int, ...]:
    """Return how many samples each of so many ranks may take at once: more of short ones, up to all.

    One stage `alone` may take all of a share at once, which is any number: what is in memory goes by steps.
    """
    whole = -(-request.global_batch // width)
    more = {2 * MICRO_BATCHES[-1], whole}
    if alone:
        more |= {n for n in _AT_ONCE if n < whole}
    return _with_short(request, more)


def samples_in_chunks(request: PlanRequest) -> tuple[int, ...]:
    """Return how many samples each rank of an interleaved pipeline may take at once."""
    return _with_short(request, {2 * MICRO_BATCHES[-1]})


def _with_short(request: PlanRequest, more: set[int]) -> tuple[int, ...]:
    """Return the usual numbers of samples, and those of some more that are short enough together."""
    short = {n for n in more if n not in MICRO_BATCHES and n * request.seq_len <= _SHORT_TOKENS}
    return (*MICRO_BATCHES, *sorted(short))


def fits_alone(request: PlanRequest, kind: StageKind) -> bool:
    """Return whether an option is only for pipelines of one stage."""
    return kind.micro_batch not in rank_samples(request, kind.inner_dp)


def recompute_rules(request: PlanRequest) -> tuple[str, ...]:
    """Return the recompute rules that stages may follow."""
    words = offers_of(request.framework).recompute
    return request.choices.rules([rule for rule in _RULES if rule.partition(":")[0] in words])


def splits_sequences(request: PlanRequest) -> bool:
    """Return whether any stage on devices of several kinds may split sequences over its ranks."""
    return len(context_degrees(request)) > 1


def context_degrees(request: PlanRequest) -> list[int]:
    """Return over how many ranks sequences are split: powers of two that leave each rank many tokens."""
    if "cp" not in offers_of(request.framework).degrees:
        return [1]
    most = max(1, request.seq_len // _LEAST_TOKENS)
    return [n for n in (2**k for k in range(most.bit_length())) if request.seq_len % n == 0]


def _expert_degrees(request: PlanRequest, ranks: int) -> list[int]:
    """Return over how many ranks of a stage its experts are cut: not at all, or over as many as can be."""
    counts = [block.num_experts for block, _ in request.model.block_kinds() if block.num_experts]
    # Hiding their messages needs virtual stages, which pipelines here do not have.
    if not counts or "ep" not in offers_of(request.framework).degrees or request.framework.expert_overlap:
        return [1]
    fits = [n for n in range(1, ranks + 1) if ranks % n == 0 and all(count % n == 0 for count in counts)]
    return sorted({1, fits[-1]})


def _splits(request: PlanRequest, tp: int, nodes: NodeGroup) -> bool:
    """Return whether a tensor degree divides the model and the nodes."""
    blocks = [block for block, _ in request.model.block_kinds()]
    widths = [n for b in blocks for n in (b.num_heads, b.ffn, b.shared_ffn, b.expert_ffn)]
    return nodes.per_node % tp == 0 and request.seq_len % tp == 0 and all(n % tp == 0 for n in widths)
