"""Tasks per second of the executor and programs per second of the lowering: python bench/bench_graph.py."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from foreshard.graph.pipeline import add_pipeline, pipeline_durations, pipeline_program, pipeline_shape
from foreshard.graph.program import Program, ProgramBuilder
from foreshard.sim import critical_path


def best_s(work: Callable[[], object], repeats: int = 5) -> float:
    times_s = []
    for _ in range(repeats):
        begin_s = time.perf_counter()
        work()
        times_s.append(time.perf_counter() - begin_s)
    return min(times_s)


def megatron(num_stages: int, num_micro_batches: int, num_chunks: int, num_groups: int = 1) -> Program:
    shape = pipeline_shape(
        "interleaved",
        num_stages=num_stages,
        num_micro_batches=num_micro_batches,
        num_chunks=num_chunks,
        overlap_p2p=True,
    )
    builder = ProgramBuilder()
    for group in range(num_groups):
        forward_s = np.random.default_rng(group).uniform(1.0, 1.2, (num_stages, num_chunks))
        times = {"forward_s": forward_s, "backward_s": 2 * forward_s, "send_forward_s": 0.1}
        add_pipeline(builder, shape, pipeline_durations(shape, send_backward_s=0.1, **times), group=group)
    return builder.build()


def main() -> None:
    print(f"{'program':>34} {'tasks':>9} {'compiled/s':>11} {'python/s':>11} {'build/s':>11}")
    for stages, micro_batches, chunks, groups in ((8, 32, 2, 1), (16, 128, 4, 1), (16, 512, 4, 8)):
        program = megatron(stages, micro_batches, chunks, groups)
        tasks = program.num_tasks
        critical_path.run(program, compiled=True)
        compiled_s = best_s(lambda p=program: critical_path.run(p, compiled=True))
        python_s = best_s(lambda p=program: critical_path.run(p), repeats=2)
        build_s = best_s(lambda s=(stages, micro_batches, chunks, groups): megatron(*s))
        name = f"{groups} x interleaved p{stages} m{micro_batches} v{chunks}"
        rates = (tasks / work_s for work_s in (compiled_s, python_s, build_s))
        print(f"{name:>34} {tasks:>9}", *(f"{rate:>11.3g}" for rate in rates))
    forward_s = np.linspace(1.0, 1.5, 8)

    def one(compiled: bool) -> float:
        times = {"forward_s": forward_s, "backward_s": 2 * forward_s, "send_forward_s": 0.1}
        program = pipeline_program(schedule="1f1b", num_micro_batches=32, **times)
        return critical_path.run(program, compiled=compiled).makespan_s

    print(f"1f1b p8 m32, lower and run: {1 / best_s(lambda: one(True)):.0f} programs/s compiled,", end=" ")
    print(f"{1 / best_s(lambda: one(False)):.0f} python")


if __name__ == "__main__":
    main()
