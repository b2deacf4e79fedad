"""Lower bounds of a flow program: no order of the same tasks over the same routes takes less."""

from __future__ import annotations

import numpy as np

from foreshard.comm.flow.program import FlowProgram
from foreshard.comm.flow.simulation import kernel_tasks
from foreshard.comm.flow.symmetry import Fold
from foreshard.compiled import is_worth_compiling, loops


def resource_times_s(program: FlowProgram) -> np.ndarray:
    """Return how long each resource carries its bytes at its full capacity, shape (R,)."""
    return program.resource_bytes / program.capacity_bytes_per_s


def longest_path_s(program: FlowProgram, small: Fold | None = None, *, compiled: bool | None = None) -> float:
    """Return the makespan if every flow had its route to itself: sharing never makes it shorter.

    Parameters
    ----------
    program : FlowProgram
        Without circles.
    small : Fold, optional
        Its symmetric form, which gives the same sooner.
    compiled : bool, optional
        As in `simulate`.
    """
    alone_s = program.alone_s
    if small is not None:
        program, alone_s = small.program, alone_s[small.kept]
    if compiled is None:
        compiled = is_worth_compiling(program.num_tasks)
    kernel = loops("foreshard.comm.flow._kernel", compiled)
    tasks, waits = kernel_tasks(program, kernel)
    stack = np.empty(program.num_tasks, dtype=np.int64)
    return float(kernel.longest_path(tasks, waits, alone_s, program.release_s.copy(), stack))
