"""Distinct stages of pipelines that degree flags cut, and what they recompute, from arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from foreshard.cost.memory_activations import Recompute, recompute_of
from foreshard.spec.model import Block, Model


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRows:
    """Stages of many pipelines; axis 0 the distinct stages, axis 1 the pipelines.

    A pipeline with fewer distinct stages has rows of multiplicity 0. Of equal stages the first counts: it
    holds the most micro-batches in flight.
    """

    blocks: tuple[Block, ...]
    counts: tuple[np.ndarray, ...]  # layers of each kind of block
    first_stage: np.ndarray
    multiplicity: np.ndarray
    has_embedding: np.ndarray
    has_head: np.ndarray


def extra_chunks(num_blocks: int, num_chunks: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return how `spec.layout.block_cuts` cuts: blocks of every chunk, and which chunks have one more.

    Chunks 1 to the second result have one more, and chunk 0 where the third is 1: the three rules of
    `block_cuts` are one, the remainder fills the middle, then the first chunk.
    """
    base = np.floor(num_blocks / num_chunks)
    rest = num_blocks - base * num_chunks
    full = (rest == num_chunks - 1) & (rest > 0)
    return base, rest - full, full * 1


def stage_rows_of(model: Model, pp: np.ndarray, vpp: np.ndarray) -> StageRows:
    """Return the distinct stages of pipelines of `pp` stages and `vpp` chunks per stage, shape (plans,) each.

    At most 4 rows for a model of equal blocks; all stages when its blocks differ.
    """
    kinds = model.block_kinds()
    if len(kinds) == 1:
        return _equal_blocks(model, pp, vpp)
    return _mixed_blocks(model, [block for block, _ in kinds], pp, vpp)


def _equal_blocks(model: Model, pp: np.ndarray, vpp: np.ndarray) -> StageRows:
    """Rows: first stage, middle stages with one block more, the other middle stages, last stage."""
    pp, vpp = pp.astype(np.float64), vpp.astype(np.float64)
    base, filled, head_start = extra_chunks(model.num_layers, pp * vpp)
    each = np.floor(filled / pp)
    longer = filled - each * pp  # stages 1 to this have one more
    shape = (4, pp.size)
    counts, first_stage, multiplicity = np.empty(shape), np.zeros(shape), np.ones(shape)
    has_embedding, has_head = np.zeros(shape), np.zeros(shape)
    multiplicity[3] = pp > 1.0
    middle = np.maximum(pp - 2.0, 0.0)
    np.minimum(longer, middle, out=multiplicity[1])
    np.subtract(middle, multiplicity[1], out=multiplicity[2])
    has_embedding[0] = has_head[3] = 1.0
    has_head[0] = pp == 1.0
    counts[:] = vpp * base + each
    counts[0] += head_start
    counts[1] += 1.0
    counts[3] += longer >= pp - 1.0
    if model.num_next_token:
        counts += has_head * model.num_next_token
    first_stage[1] = 1.0
    first_stage[2] = multiplicity[1] + 1.0
    first_stage[3] = pp - 1.0
    used = [i for i in range(4) if np.count_nonzero(multiplicity[i])]
    all_rows = (counts, first_stage, multiplicity, has_embedding, has_head)
    rows = all_rows if len(used) == 4 else tuple(row[used] for row in all_rows)
    return StageRows(
        blocks=(model.blocks[0],),
        counts=(rows[0],),
        first_stage=rows[1],
        multiplicity=rows[2],
        has_embedding=rows[3],
        has_head=rows[4],
    )


def _mixed_blocks(model: Model, kinds: list[Block], pp: np.ndarray, vpp: np.ndarray) -> StageRows:
    """Rows: every stage."""
    base, filled, head_start = (part.astype(np.int64) for part in extra_chunks(model.num_layers, pp * vpp))
    stage = np.arange(int(pp.max()))[:, None]
    present = stage < pp
    index = {block: i for i, block in enumerate(kinds)}
    kind_of = np.array([index[block] for block in model.blocks])
    before = np.zeros((len(kinds), model.num_layers + 1))
    for i in range(len(kinds)):
        before[i, 1:] = np.cumsum(kind_of == i)
    counts = np.zeros((len(kinds), *present.shape))
    for chunk in range(int(vpp.max())):
        virtual = chunk * pp + stage
        start = virtual * base + np.minimum(np.maximum(virtual - 1, 0), filled) + head_start * (virtual > 0)
        inner = (virtual > 0) & (virtual <= filled)
        stop = start + base + inner + head_start * (virtual == 0)
        here = present & (chunk < vpp)
        start, stop = np.where(here, start, 0), np.where(here, stop, 0)
        counts += before[:, stop] - before[:, start]
    last = stage == pp - 1
    counts[kind_of[-1]] += last * model.num_next_token
    return StageRows(
        blocks=tuple(kinds),
        counts=tuple(counts),
        first_stage=np.minimum(stage, pp - 1),
        multiplicity=present * 1.0,
        has_embedding=(stage == 0) * present * 1.0,
        has_head=last * 1.0,
    )


def recompute_columns(
    rules: tuple[str, ...], code: np.ndarray, rows: StageRows, vpp: np.ndarray
) -> Recompute:
    """Return the recompute rules of pipelines as numbers, one row where no stage differs.

    As `recompute_of` of rule `rules[code]`, where `block`, `uniform` and `every` count the blocks of a chunk.
    """
    values, counting = _rule_values(rules)
    columns = {name: value if isinstance(value, float) else value[code][None] for name, value in values}
    if counting:
        layers = np.maximum(np.rint(sum(rows.counts) / vpp), 1.0)
        for i, text in counting:
            here = code == i
            name, value = _counted(text, layers)
            columns[name] = np.where(here, value, columns[name])
    return Recompute(**columns)


@lru_cache(maxsize=64)
def _rule_values(rules: tuple[str, ...]) -> tuple[list[tuple[str, Any]], list[tuple[int, str]]]:
    """Return each number of the rules, one value where they agree, and the rules that count blocks."""
    fixed = [recompute_of(text, 1) for text in rules]
    values: list[tuple[str, Any]] = []
    for name in Recompute.__slots__:
        column = [float(getattr(rule, name)) for rule in fixed]
        values.append((name, np.array(column) if len(set(column)) > 1 else column[0]))
    counts = [text.startswith("every-") or text.count(":") == 2 for text in rules]
    return values, [(i, text) for i, text in enumerate(rules) if counts[i]]


def _counted(text: str, layers: np.ndarray) -> tuple[str, np.ndarray]:
    """Return which number of a rule depends on the blocks of a chunk, and its value."""
    if text.startswith("every-"):
        return "full", np.floor(layers / int(text[6:])) / layers
    count = float(text.rpartition(":")[2])
    if text.startswith("full:block:"):
        return "full", np.minimum(count, layers) / layers
    return "unit", np.minimum(count, layers)
