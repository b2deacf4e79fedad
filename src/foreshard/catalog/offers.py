"""What a framework lets its user choose, so that advice never names what it does not ship."""

from __future__ import annotations

from dataclasses import dataclass

from foreshard.spec.framework import Framework

_OVERLAPS = ("tp_overlap", "grad_overlap", "param_gather_overlap", "p2p_overlap", "expert_overlap")


@dataclass(frozen=True, slots=True, kw_only=True)
class Offers:
    """Choices of one framework.

    zero : levels of sharding; 3 is FSDP where the framework calls it so
    in_groups : levels that can shard over a part of the replicas and copy over the others
    schedules : of the pipelines it runs, empty without pipelines
    overlaps : communication options it has a switch for
    degrees : kinds of parallelism besides data parallelism
    recompute : leading words of the recompute rules it takes; with "selective", modules as Megatron names
        them and parts of a stage (full:uniform:N, full:block:N) too
    low_precision : whether it trains with 8-bit matrix products
    shards_pipelines : whether levels above 1 go with pipelines
    offload : what it can keep in host memory
    """

    zero: tuple[int, ...]
    in_groups: tuple[int, ...] = (1, 3)
    schedules: tuple[str, ...] = ()
    overlaps: tuple[str, ...] = ()
    degrees: tuple[str, ...] = ()
    recompute: tuple[str, ...] = ("none", "full")
    low_precision: bool = False
    shards_pipelines: bool = False
    offload: tuple[str, ...] = ("none",)

    def levels(self, num_stages: int) -> tuple[int, ...]:
        """Return the levels of sharding for a pipeline of so many stages."""
        if num_stages == 1 or self.shards_pipelines:
            return self.zero
        return tuple(level for level in self.zero if level <= 1)


_ALL = ("tp", "pp", "cp", "ep", "etp", "vpp")
_MEGATRON_RULES = ("none", "selective", "full")
# Megatron-LM d98e8a6 arguments.py: --use-distributed-optimizer (levels 0, 1), --use-megatron-fsdp (3),
# --overlap-grad-reduce, --overlap-param-gather, --tp-comm-overlap (needs --sequence-parallel),
# --overlap-moe-expert-parallel-comm, --optimizer-cpu-offload; schedules.py: 1F1B and interleaved 1F1B.
_MEGATRON = Offers(
    zero=(0, 1, 3),
    schedules=("1f1b", "interleaved"),
    overlaps=(*_OVERLAPS, "context_gather"),
    degrees=_ALL,
    recompute=_MEGATRON_RULES,
    low_precision=True,
    offload=("none", "optimizer"),
)
# Apex distributed optimizer and Megatron-Core under NeMo and Megatron-Bridge; their recipes use no FSDP here.
_NEMO = Offers(
    zero=(0, 1),
    schedules=("1f1b", "interleaved"),
    overlaps=(*_OVERLAPS, "context_gather"),
    degrees=_ALL,
    recompute=_MEGATRON_RULES,
    low_precision=True,
)
# arXiv 2104.04473, 2205.05198: no sharded optimizer, no overlap switches.
_EARLY_MEGATRON = Offers(
    zero=(0,),
    schedules=("gpipe", "1f1b", "interleaved"),
    degrees=("tp", "pp", "vpp"),
    recompute=_MEGATRON_RULES,
)
# SHARD_GRAD_OP and FULL_SHARD, and the hybrid form of each.
_FSDP1 = Offers(zero=(2, 3), in_groups=(2, 3), overlaps=("param_gather_overlap",))
_OFFERS = {
    "megatron-core": _MEGATRON,
    "megatron-bridge": _MEGATRON,
    "nemo": _NEMO,
    "mlperf-nemo": _NEMO,
    "megatron-lm@2024": _NEMO,
    "megatron-lm": _EARLY_MEGATRON,
    "megatron-deepspeed": Offers(
        zero=(0, 1), schedules=("1f1b",), degrees=("tp", "pp"), recompute=("none", "full")
    ),
    # runtime/zero/config.py stages, overlap_comm, offload_optimizer; runtime/pipe: 1F1B, not ZeRO-2 or 3;
    # shards over a part of the replicas (MiCS) were removed in 0.19.8.
    "deepspeed": Offers(
        zero=(0, 1, 2, 3),
        in_groups=(),
        overlaps=("grad_overlap",),
        degrees=("cp", "ep"),
        offload=("none", "optimizer"),
    ),
    "composer": _FSDP1,
    "fms-fsdp": Offers(zero=(2, 3), in_groups=(2, 3), recompute=("none", "full", "every")),
    # torchtitan job_config.py: reshard_after_forward (2 or 3), async tensor parallelism, float8 linear.
    "torchtitan": Offers(
        zero=(2, 3),
        in_groups=(2, 3),
        schedules=("gpipe", "1f1b", "interleaved"),
        overlaps=("tp_overlap", "context_gather"),
        degrees=_ALL,
        recompute=("none", "selective:op", "every", "full"),
        low_precision=True,
        shards_pipelines=True,
    ),
    "ddp": Offers(zero=(0, 1)),
    "internevo": Offers(
        zero=(0, 1),
        schedules=("1f1b", "interleaved"),
        overlaps=("grad_overlap",),
        degrees=("tp", "pp", "cp", "vpp"),
    ),
    "nanotron": Offers(zero=(0, 1), schedules=("gpipe", "1f1b"), degrees=("tp", "pp", "cp", "ep")),
    "colossalai": Offers(zero=(0, 1, 2, 3), overlaps=("grad_overlap",), degrees=("tp", "pp", "cp", "ep")),
    "maxtext": Offers(zero=(1, 3), degrees=("tp", "pp", "cp", "ep"), low_precision=True),
    "paxml": Offers(zero=(1, 3), degrees=("tp", "pp"), low_precision=True),
}


def offers_of(framework: Framework) -> Offers:
    """Return what a framework ships: of its release where that differs, else of its name.

    Examples
    --------
    >>> from foreshard.catalog.frameworks import load_framework
    >>> 2 in offers_of(load_framework("megatron-core")).zero
    False
    """
    return _OFFERS.get(framework.label) or _OFFERS[framework.name]
