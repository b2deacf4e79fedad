"""Events per second of the event kernel, and processor seconds of whole steps: python bench/bench_event.py.

The first table runs ranks that compute and then send to their neighbour, over NICs that share the uplink of a
node (four times oversubscribed), compiled and warm. An operation is a task; an event is the end of a delay or
of a flow. The second predicts the step of Llama-3-405B on 16,384 devices by both engines that have tasks.
Best of five and median of three; processor time of one core.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from foreshard import api
from foreshard.comm.flow.program import FlowProgram, FlowProgramBuilder
from foreshard.comm.flow.simulation import simulate
from foreshard.predict import predict
from foreshard.spec.variation import Noise

NODE = 8
OVERSUBSCRIBED = 4.0
NIC_BYTES_PER_S = 50e9


def neighbours(num_ranks: int, num_passes: int) -> FlowProgram:
    rng = np.random.default_rng(0)
    uplink = NODE * NIC_BYTES_PER_S / OVERSUBSCRIBED
    rates = [np.full(num_ranks, NIC_BYTES_PER_S), np.full(num_ranks // NODE, uplink)]
    builder = FlowProgramBuilder(np.concatenate(rates))
    builder.new_queue(2 * num_ranks)
    routes = np.array([builder.route([rank, num_ranks + rank // NODE]) for rank in range(num_ranks)])
    count = num_passes * num_ranks
    at = np.arange(count)
    rank, turn = at % num_ranks, at // num_ranks
    compute = builder.add_many(delay_s=rng.uniform(1e-3, 2e-3, count), queue=rank)
    sizes = rng.uniform(1e6, 4e7, count)
    send = builder.add_many(delay_s=5e-6, num_bytes=sizes, route=routes[rank], queue=num_ranks + rank)
    builder.depend(send + at, compute + at)
    later = at[turn > 0]
    builder.depend(compute + later, send + (turn[later] - 1) * num_ranks + (rank[later] - 1) % num_ranks)
    return builder.build()


def processor_s(work: Callable[[], object], repeats: int) -> list[float]:
    taken = []
    for _ in range(repeats):
        begin_s = time.process_time()
        work()
        taken.append(time.process_time() - begin_s)
    return sorted(taken)


def main() -> None:
    print("| operations | events | seconds | million events/s |")
    print("|---|---|---|---|")
    for num_ranks, num_passes in ((64, 800), (512, 1000)):
        program = neighbours(num_ranks, num_passes)
        simulate(program, compiled=True)  # compiles
        best_s = processor_s(lambda p=program: simulate(p, compiled=True), 5)[0]
        events = program.num_tasks + program.num_flows
        print(
            f"| {program.num_tasks:,} | {events:,} | {best_s:.3f} | {events / best_s / 1e6:.2f} |", flush=True
        )
    model, cluster = api.load_model("llama3-405b"), api.load_cluster("2048x8xh100-sxm")
    plan = api.make_plan(model, cluster, tp=8, pp=16, global_batch=2048, seq_len=8192)
    print("\n| step of llama3-405b on 16,384 devices | processor s | step s |")
    print("|---|---|---|")
    cases = {
        "graph": ("graph", None),
        "event": ("event", None),
        "event, jitter 3 %, 32 draws": ("event", Noise(jitter=0.03)),
    }
    for name, (engine, noise) in cases.items():

        def work(engine: str = engine, noise: Noise | None = noise) -> float:
            return predict(model, cluster, plan, engine=engine, noise=noise, timeline=False).step_time_s

        step_s = work()
        print(f"| {name} | {processor_s(work, 3)[1]:.2f} | {step_s:.3f} |", flush=True)


if __name__ == "__main__":
    main()
