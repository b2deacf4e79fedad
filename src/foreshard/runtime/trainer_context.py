"""What a rank's training is given once and keeps to the end: the job, its options, and callbacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch

from foreshard.runtime.committed_step import StepDone
from foreshard.runtime.engine.clock import Clock
from foreshard.runtime.job.job import Job
from foreshard.runtime.job.readers import Readers
from foreshard.runtime.membership.fixed_membership import GroupMembership
from foreshard.runtime.records.durable_jsonl import OnEvent
from foreshard.runtime.records.ledger import Ledger
from foreshard.runtime.run_settings import Options
from foreshard.runtime.state.rank_state import RankState

OnAction = Callable[[str, int, int, float, float], None]
"""Called after each action with (name, chunk, micro_batch, start_s, end_s)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerContext:
    """The surroundings of a rank's training.

    Attributes
    ----------
    job : Job
    membership : GroupMembership
        The other ranks, and how they find each other.
    options : Options
    clock : Clock
    device : torch.device
    checkpoints : Path or None
        Folder that all ranks reach.
    phase : callable of name
        Called when the rank turns to another part of a step or of a change.
    on_action : OnAction or None
    on_event : OnEvent
        Writes the operator's log.
    ledger : Ledger or None
        Records which samples were trained.
    memory_bytes : float or None
        Of this rank's device: ZeRO divides a stage's parameters in proportion to it.
    within_memory : callable of RankState
        Gives the context in which a rank computes its part of a step: it raises where the rank holds more
        than its device has.
    readers : Readers or None
        Processes that read samples.
    before_step : callable of step
    on_step : callable of StepDone
        Called on the leader after every step.
    on_evaluation : callable of (step, numbers by name)
        Called on one rank after every evaluation.
    """

    job: Job
    membership: GroupMembership
    options: Options = field(default_factory=Options)
    clock: Clock = field(default_factory=Clock)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    checkpoints: Path | None = None
    phase: Callable[[str], None] = lambda name: None
    on_action: OnAction | None = None
    on_event: OnEvent = lambda kind, text, **facts: None
    ledger: Ledger | None = None
    memory_bytes: float | None = None
    within_memory: Callable[[RankState], AbstractContextManager[None]] = lambda state: nullcontext()
    readers: Readers | None = None
    before_step: Callable[[int], None] = lambda step: None
    on_step: Callable[[StepDone], None] = lambda done: None
    on_evaluation: Callable[[int, Mapping[str, float]], None] = lambda step, values: None
