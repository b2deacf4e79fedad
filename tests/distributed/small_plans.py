"""Plans of eight layers, twelve samples and up to four ranks, of every kind the runtime runs."""

from __future__ import annotations

from rehearsal import plan_of

from foreshard.spec.plan import Plan

B = 12


def _plan(*groups: dict, **defaults) -> Plan:
    return plan_of(groups, global_batch=B, **defaults)


ALONE = _plan({"share": 12, "micro_batch": 12, "stages": [([0], [[0, 8]])]})

PLANS: dict[str, Plan] = {
    "many micro-batches": _plan({"share": 12, "micro_batch": 5, "stages": [([0], [[0, 8]])]}),
    "even replicas": _plan(*[{"share": 3, "micro_batch": 3, "stages": [([r], [[0, 8]])]} for r in range(4)]),
    "uneven replicas": _plan(
        *[
            {"share": s, "micro_batch": m, "stages": [([r], [[0, 8]])]}
            for r, (s, m) in enumerate([(6, 4), (3, 3), (2, 1), (1, 1)])
        ]
    ),
    "four stages": _plan(
        {
            "share": 12,
            "micro_batch": 2,
            "stages": [([r], [[lo, hi]]) for r, (lo, hi) in enumerate([(0, 1), (1, 4), (4, 7), (7, 8)])],
        }
    ),
    "four stages, gpipe": _plan(
        {
            "share": 12,
            "micro_batch": 5,
            "schedule": "gpipe",
            "stages": [([3 - r], [[lo, hi]]) for r, (lo, hi) in enumerate([(0, 3), (3, 4), (4, 6), (6, 8)])],
        }
    ),
    "three stages, zb-h1": _plan(
        {
            "share": 12,
            "micro_batch": 1,
            "schedule": "zb-h1",
            "stages": [([r], [[lo, hi]]) for r, (lo, hi) in enumerate([(0, 3), (3, 4), (4, 8)])],
        }
    ),
    "interleaved": _plan(
        {
            "share": 12,
            "micro_batch": 2,
            "schedule": "interleaved",
            "stages": [([0], [[0, 1], [3, 5]]), ([1], [[1, 3], [5, 8]])],
        }
    ),
    "two uneven pipelines": _plan(
        {"share": 9, "micro_batch": 2, "stages": [([0], [[0, 3]]), ([1], [[3, 8]])]},
        {"share": 3, "micro_batch": 1, "stages": [([2], [[0, 6]]), ([3], [[6, 8]])]},
    ),
    "a pipeline and a device": _plan(
        {
            "share": 10,
            "micro_batch": 3,
            "schedule": "gpipe",
            "stages": [([3], [[0, 2]]), ([0], [[2, 6]]), ([1], [[6, 8]])],
        },
        {"share": 2, "micro_batch": 2, "stages": [([2], [[0, 8]])]},
    ),
    "uneven data in a stage": _plan(
        {
            "share": 12,
            "micro_batch": 5,
            "stages": [([0, 3], [[0, 3]], {"rank_shares": [4, 1]}), ([1], [[3, 6]]), ([2], [[6, 8]])],
        },
        zero=0,
    ),
    "uneven data in both stages, zero 1": _plan(
        {
            "share": 12,
            "micro_batch": 5,
            "schedule": "zb-h1",
            "stages": [
                ([0, 3], [[0, 3]], {"rank_shares": [4, 1]}),
                ([1, 2], [[3, 8]], {"rank_shares": [2, 3]}),
            ],
        },
        zero=1,
    ),
    "four ranks in a stage, zero 1": _plan(
        {"share": 12, "micro_batch": 7, "stages": [([0, 1, 2, 3], [[0, 8]], {"rank_shares": [3, 2, 1, 1]})]},
        zero=1,
    ),
    "uneven data in both stages, zero 2": _plan(
        {
            "share": 12,
            "micro_batch": 5,
            "stages": [
                ([0, 3], [[0, 3]], {"rank_shares": [4, 1]}),
                ([1, 2], [[3, 8]], {"rank_shares": [2, 3]}),
            ],
        },
        zero=2,
    ),
    "three ranks sharded whole beside one, zero 3": _plan(
        {"share": 9, "micro_batch": 4, "stages": [([0, 2, 3], [[0, 8]], {"rank_shares": [2, 0, 2]})]},
        {"share": 3, "micro_batch": 2, "stages": [([1], [[0, 8]])]},
        zero=3,
    ),
    "sharded pipeline with recompute, zero 3": _plan(
        {
            "share": 12,
            "micro_batch": 5,
            "schedule": "zb-h1",
            "stages": [([0, 3], [[0, 3]]), ([1, 2], [[3, 8]], {"rank_shares": [2, 3]})],
        },
        zero=3,
        recompute="full",
    ),
    "recompute": _plan(
        {
            "share": 8,
            "micro_batch": 2,
            "stages": [([0], [[0, 3]], {"recompute": "full"}), ([1], [[3, 8]], {"recompute": "every-2"})],
        },
        {
            "share": 4,
            "micro_batch": 2,
            "stages": [
                ([2], [[0, 6]], {"recompute": "full:uniform:4"}),
                ([3], [[6, 8]], {"recompute": "full:block:1"}),
            ],
        },
    ),
    "an idle rank": _plan({"share": 12, "micro_batch": 4, "stages": [([0], [[0, 5]]), ([2], [[5, 8]])]}),
}
