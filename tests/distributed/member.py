"""A rank that sums ones with the others for as long as it is let, and tells what happens to it."""

from __future__ import annotations

import time
from typing import Any

import torch

from foreshard.runtime.membership.member import Membership


def work(rank: int, port: int, secret: bytes, told: Any) -> None:
    """Sum in every generation; tell (rank, kind, when, what) through a pipe of its own."""
    torch.set_num_threads(1)

    def tell(kind: str, what: Any) -> None:
        told.send((rank, kind, time.monotonic(), what))

    member = Membership(("127.0.0.1", port), rank, secret, interface="127.0.0.1", beat_s=0.1)
    while True:
        generation, said = member.generation, False
        try:
            group = member.group(generation.ranks, "world") if len(generation.ranks) > 1 else None
            while True:
                total = torch.tensor([1.0, float(member.wanted())])
                if group is not None:
                    group.allreduce([total]).wait()
                if not said:
                    tell("sum", (generation.number, generation.ranks, float(total[0])))
                    said = True
                if total[1]:  # all leave in step, or a peer would wait for who has left
                    break
                time.sleep(0.01)
            reason = "boundary"
        except RuntimeError as error:
            reason = str(error)
            tell("fault", reason[:200])
        group = None
        member.next_generation(reason)
