"""Plans from degree flags: which ranks form which stage, and which layers it holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from foreshard.errors import SpecError
from foreshard.spec.codec import invalid, one_of, whole
from foreshard.spec.plan import (
    MAX_SEQ_LEN,
    OFFLOADS,
    OPTIMIZERS,
    PRECISIONS,
    SCHEDULES,
    TURNING,
    Group,
    Plan,
    Stage,
    check_recompute,
)
from foreshard.units import number_of


def divisors(number: int) -> str:
    """Return the divisors of a number, as an error message lists them.

    Examples
    --------
    >>> divisors(12)
    '1, 2, 3, 4, 6, 12'
    """
    return ", ".join(str(d) for d in range(1, number + 1) if number % d == 0)


def block_cuts(num_blocks: int, num_chunks: int) -> list[int]:
    """Blocks of each virtual stage, in model order.

    Even when they divide. Otherwise embedding and head count as a layer each when that divides
    (Megatron's account_for_embedding/loss), else the head alone, else the remainder goes to the
    middle, where no embedding or head waits.

    Examples
    --------
    >>> block_cuts(126, 16)[0], block_cuts(126, 16)[1], block_cuts(126, 16)[-1]
    (7, 8, 7)
    """
    base, rest = divmod(num_blocks, num_chunks)
    cuts = [base] * num_chunks
    if rest == 0:
        return cuts
    if (num_blocks + 2) % num_chunks == 0 and num_chunks > 1:
        cuts = [(num_blocks + 2) // num_chunks] * num_chunks
        cuts[0] -= 1
        cuts[-1] -= 1
        return cuts
    if (num_blocks + 1) % num_chunks == 0:
        cuts = [(num_blocks + 1) // num_chunks] * num_chunks
        cuts[-1] -= 1
        return cuts
    order = [*range(1, num_chunks - 1), 0, num_chunks - 1]
    for chunk in order[:rest]:
        cuts[chunk] += 1
    return cuts


def layer_spans(num_blocks: int, pp: int, vpp: int, *, turning: bool = False) -> list[list[tuple[int, int]]]:
    """Half-open layer intervals [stage][chunk]; layer 0 is the embedding, num_blocks + 1 the head."""
    return spans_of(block_cuts(num_blocks, pp * vpp), pp, turning=turning)


def spans_of(cuts: Sequence[int], pp: int, *, turning: bool = False) -> list[list[tuple[int, int]]]:
    """Layer intervals [stage][chunk] of so many blocks per virtual stage, in model order.

    Where pipelines are `turning`, every second chunk goes through the stages the other way round.

    Examples
    --------
    >>> spans_of([1, 1, 1, 1], 2, turning=True)
    [[(0, 2), (4, 6)], [(2, 3), (3, 4)]]
    """
    spans: list[list[tuple[int, int]]] = [[] for _ in range(pp)]
    start = 0
    for virtual, count in enumerate(cuts):
        stop = start + count + (virtual == 0) + (virtual == len(cuts) - 1)
        chunk, stage = divmod(virtual, pp)
        spans[pp - 1 - stage if turning and chunk % 2 else stage].append((start, stop))
        start = stop
    return spans


def plan_from_degrees(
    num_blocks: int,
    num_devices: int,
    *,
    tp: int = 1,
    pp: int = 1,
    dp: int | None = None,
    cp: int = 1,
    ep: int = 1,
    etp: int = 1,
    vpp: int = 1,
    micro_batch: int = 1,
    global_batch: int | None = None,
    seq_len: int,
    sp: bool | None = None,
    zero: int = 1,
    shard_size: int | None = None,
    recompute: str = "none",
    schedule: str | None = None,
    precision: str = "bf16",
    optimizer: str = "adamw",
    framework: str = "megatron-core",
    offload: str = "none",
) -> Plan:
    """Return the plan of one group that degree flags describe.

    `micro_batch` counts samples per data-parallel rank; the plan's own micro_batch is that times dp.
    Without `global_batch` a step takes dp x pp samples, rounded up to what micro-batches and schedule need.

    Raises
    ------
    SpecError
        When the degrees do not use every device exactly once or do not divide.
    """
    degrees = {"tp": tp, "pp": pp, "cp": cp, "ep": ep, "etp": etp, "vpp": vpp, "micro-batch": micro_batch}
    for name, value in degrees.items():
        whole(value, key=f"--{name}", name=name)
    whole(seq_len, 1, MAX_SEQ_LEN, key="--seq", name="seq")
    dp = _data_parallel(dp, tp, pp, cp, num_devices)
    width = tp * cp * dp
    if width % (ep * etp):
        what = f"ep {ep} x etp {etp} does not divide tp x cp x dp = {width}"
        fix = f"Choose ep x etp among the divisors of {width}: {divisors(width)}"
        raise SpecError(what, key="--ep", value=ep, rule="etp x ep divides tp x cp x dp", fix=fix)
    if schedule in TURNING and vpp == 1:
        vpp = 2
    schedule = _schedule(schedule, pp, vpp, num_blocks)
    if sp is not None and not isinstance(sp, bool):
        raise invalid(sp, "Must be true or false, not a text", key="--sp", name="sp", fix="Give sp=False")
    global_batch = _global_batch(global_batch, dp, _default_batch(dp, pp, micro_batch, schedule))
    options: dict[str, Any] = {
        "tp": tp,
        "cp": cp,
        "ep": ep,
        "etp": etp,
        "zero": whole(zero, 0, 3, key="--zero", name="zero"),
        "shard_size": None
        if shard_size is None
        else whole(shard_size, key="--shard-size", name="shard-size"),
        "recompute": check_recompute(recompute, key="--recompute"),
        "offload": one_of(offload, OFFLOADS, key="--offload", name="offload"),
    }
    stages = tuple(
        Stage(ranks=tuple(range(i * width, (i + 1) * width)), layers=tuple(spans), **options)
        for i, spans in enumerate(layer_spans(num_blocks, pp, vpp, turning=schedule in TURNING))
    )
    group = Group(
        share=global_batch,
        stages=stages,
        micro_batch=micro_batch * dp,
        schedule=schedule,
        sp=tp > 1 if sp is None else sp,
    )
    return Plan(
        global_batch=global_batch,
        seq_len=seq_len,
        precision=one_of(precision, PRECISIONS, key="--dtype", name="dtype"),
        optimizer=one_of(optimizer, OPTIMIZERS, key="--optimizer", name="optimizer"),
        framework=framework,
        groups=(group,),
    )


def _data_parallel(dp: Any, tp: int, pp: int, cp: int, num_devices: int) -> int:
    """Return dp, from the devices when it is not given; every device is used exactly once."""
    model_size = tp * pp * cp
    fits, rest = divmod(num_devices, model_size)
    if dp is None:
        if rest or fits == 0:
            raise SpecError(
                f"tp {tp} x pp {pp} x cp {cp} = {model_size} does not divide "
                f"{number_of(num_devices, 'device')}",
                key="--tp/--pp/--cp",
                value=model_size,
                rule="devices = dp x tp x pp x cp",
                fix=f"Choose degrees whose product divides {num_devices}",
            )
        return fits
    whole(dp, key="--dp", name="dp")
    if dp * model_size != num_devices:
        raise SpecError(
            f"dp {dp} x tp {tp} x pp {pp} x cp {cp} = {dp * model_size}, "
            f"the cluster has {number_of(num_devices, 'device')}",
            key="--dp",
            value=dp,
            rule="devices = dp x tp x pp x cp; idle devices only through a plan file",
            fix=f"Choose degrees whose product divides {num_devices}"
            if rest or fits == 0
            else f"Leave out --dp, or set it to {fits}",
        )
    return int(dp)


def _schedule(schedule: Any, pp: int, vpp: int, num_blocks: int) -> str:
    """Return the schedule of a pipeline whose virtual stages the model fills."""
    if pp * vpp > num_blocks:
        what = f"pp {pp} x vpp {vpp} = {pp * vpp} virtual stages for {num_blocks} blocks"
        rule = "Every virtual stage holds at least one block"
        raise SpecError(what, key="--pp", value=pp, rule=rule, fix=f"Use at most {num_blocks} virtual stages")
    if schedule is None:
        return "interleaved" if vpp > 1 else "1f1b"
    schedule = one_of(schedule, SCHEDULES, key="--schedule", name="schedule")
    if vpp > 1 and schedule != "interleaved" and not (vpp == 2 and schedule in TURNING):
        what = f"vpp {vpp} with schedule {schedule}"
        rule = "Only the interleaved schedule has virtual stages, and zbv and dualpipev have two"
        fix = "Use --schedule interleaved, or leave --vpp out"
        raise SpecError(what, key="--schedule", value=schedule, rule=rule, fix=fix)
    return str(schedule)


def _default_batch(dp: int, pp: int, micro_batch: int, schedule: str) -> int:
    """Return dp x pp samples in whole micro-batches, in rounds of pp of them where stages interleave.

    Examples
    --------
    >>> _default_batch(4, 2, 1, "1f1b"), _default_batch(4, 3, 2, "1f1b")
    (8, 16)
    >>> _default_batch(4, 2, 2, "interleaved")
    16
    """
    micro_batches = -(-pp // micro_batch)
    if schedule == "interleaved":
        micro_batches = -(-micro_batches // pp) * pp
    if schedule.startswith("dualpipe"):
        micro_batches = 2 * pp
    return dp * micro_batch * micro_batches


def _global_batch(global_batch: Any, dp: int, default: int) -> int:
    """Return the samples of a step, which data-parallel ranks share evenly."""
    batch = whole(
        default if global_batch is None else global_batch, key="--global-batch", name="global-batch"
    )
    if batch % dp:
        what = f"global batch {batch} is not a multiple of dp {dp}"
        rule = "Every data-parallel rank takes the same share; uneven shares only through a plan file"
        fix = f"Use {max(1, batch // dp) * dp}"
        raise SpecError(what, key="--global-batch", value=batch, rule=rule, fix=fix)
    return batch
