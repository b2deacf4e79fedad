"""Plans from degree flags: which ranks form which stage, and which layers it holds."""

from __future__ import annotations

from foreshard.errors import SpecError
from foreshard.spec.plan import PRECISIONS, SCHEDULES, Group, Plan, Stage, check_recompute


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


def layer_spans(num_blocks: int, pp: int, vpp: int) -> list[list[tuple[int, int]]]:
    """Half-open layer intervals [stage][chunk]; layer 0 is the embedding, num_blocks + 1 the head."""
    cuts = block_cuts(num_blocks, pp * vpp)
    spans: list[list[tuple[int, int]]] = [[] for _ in range(pp)]
    start = 0
    for virtual, count in enumerate(cuts):
        stop = start + count + (virtual == 0) + (virtual == pp * vpp - 1)
        spans[virtual % pp].append((start, stop))
        start = stop
    return spans


def _degree(name: str, value: object, low: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= 2**31:
        raise SpecError(
            f"{value!r} is not a valid {name}", key=f"--{name}", value=value, rule=f"must be a whole number >= {low}"
        )
    return value


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
    """Return the one-group plan that degree flags mean.

    `micro_batch` counts samples per data-parallel rank; the plan's own micro_batch is that times dp.

    Raises
    ------
    SpecError
        When the degrees do not use every device exactly once or do not divide.
    """
    degrees = {"tp": tp, "pp": pp, "cp": cp, "ep": ep, "etp": etp, "vpp": vpp, "micro-batch": micro_batch}
    for name, value in degrees.items():
        _degree(name, value)
    _degree("seq", seq_len)
    model_size = tp * pp * cp
    if dp is None:
        dp, rest = divmod(num_devices, model_size)
        if rest or dp == 0:
            raise SpecError(
                f"tp {tp} x pp {pp} x cp {cp} = {model_size} does not divide {num_devices} devices",
                key="--tp/--pp/--cp",
                value=model_size,
                rule="devices = dp x tp x pp x cp",
                fix=f"choose degrees whose product divides {num_devices}",
            )
    _degree("dp", dp)
    if dp * model_size != num_devices:
        raise SpecError(
            f"dp {dp} x tp {tp} x pp {pp} x cp {cp} = {dp * model_size}, the cluster has {num_devices} devices",
            key="--dp",
            value=dp,
            rule="devices = dp x tp x pp x cp; idle devices only through a plan file",
            fix=f"leave out --dp, or set it to {num_devices // model_size}" if num_devices % model_size == 0 else None,
        )
    if (tp * cp * dp) % (ep * etp):
        raise SpecError(
            f"ep {ep} x etp {etp} does not divide tp x cp x dp = {tp * cp * dp}",
            key="--ep",
            value=ep,
            rule="etp x ep divides tp x cp x dp",
        )
    if pp * vpp > num_blocks:
        raise SpecError(
            f"pp {pp} x vpp {vpp} = {pp * vpp} virtual stages for {num_blocks} blocks",
            key="--pp",
            value=pp,
            rule="every virtual stage holds at least one block",
            fix=f"use at most {num_blocks} virtual stages",
        )
    if schedule is None:
        schedule = "interleaved" if vpp > 1 else "1f1b"
    if schedule not in SCHEDULES or precision not in PRECISIONS:
        bad, known = (schedule, SCHEDULES) if schedule not in SCHEDULES else (precision, PRECISIONS)
        key = "--schedule" if schedule not in SCHEDULES else "--dtype"
        raise SpecError(f"unknown {bad!r}", key=key, value=bad, rule=f"must be one of {', '.join(known)}")
    if vpp > 1 and schedule != "interleaved":
        raise SpecError(
            f"vpp {vpp} with schedule {schedule}",
            key="--schedule",
            value=schedule,
            rule="only the interleaved schedule has virtual stages",
            fix="use --schedule interleaved, or --vpp 1",
        )
    if global_batch is None:
        global_batch = dp * pp * micro_batch
    _degree("global-batch", global_batch)
    if global_batch % dp:
        raise SpecError(
            f"global batch {global_batch} is not a multiple of dp {dp}",
            key="--global-batch",
            value=global_batch,
            rule="every data-parallel rank takes the same share; uneven shares only through a plan file",
            fix=f"use {max(1, global_batch // dp) * dp}",
        )
    recompute = check_recompute(recompute, key="--recompute")
    width = tp * cp * dp
    stages = tuple(
        Stage(
            ranks=tuple(range(i * width, (i + 1) * width)),
            layers=tuple(spans),
            tp=tp,
            cp=cp,
            ep=ep,
            etp=etp,
            zero=zero,
            shard_size=shard_size,
            recompute=recompute,
            offload=offload,
        )
        for i, spans in enumerate(layer_spans(num_blocks, pp, vpp))
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
        precision=precision,
        optimizer=optimizer,
        framework=framework,
        groups=(group,),
    )
