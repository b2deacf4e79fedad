"""Processes that read samples of a map dataset for a rank, each a part of every batch.

A sample depends on its position alone, whoever reads it, so their number changes nothing. They are forked
before the rank has threads and connections, with the dataset as it is, and end with the rank.
"""

from __future__ import annotations

import multiprocessing
import pickle
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

from foreshard.errors import ForeshardError, SpecError
from foreshard.runtime.job.seeding import seed_generators
from foreshard.runtime.job.user_code import user_code
from foreshard.runtime.membership.processes import die_with_parent

Place = tuple[int, int]
"""(position in the training, index in the dataset)."""


class ReaderLost(ForeshardError):
    """A reader has ended: the rank starts again, with new ones."""


class Readers:
    """So many reader processes; an iterable is refused, since it is read in its own order."""

    def __init__(self, dataset: Any, count: int, *, seed: int, path: str | None = None):
        if not hasattr(dataset, "__getitem__"):
            raise SpecError(
                f"the dataset is a {type(dataset).__name__}, which is read in its own order",
                file=path,
                key="--readers",
                value=count,
                rule="Several processes read a dataset with __getitem__",
                fix="Leave out --readers, or give samples by index",
            )
        self._lock = threading.Lock()
        context = multiprocessing.get_context("fork")
        self._readers: list[tuple[Any, Connection]] = []
        for _ in range(count):
            mine, other = context.Pipe()
            process = context.Process(target=_read, args=(dataset, seed, path, other), daemon=True)
            process.start()
            other.close()
            self._readers.append((process, mine))

    def samples(self, places: Sequence[Place]) -> list[Any]:
        """Return the samples at some places, read by all processes at the same time.

        Raises `ReaderLost`, naming the process that has ended.
        """
        each = -(-len(places) // len(self._readers))
        parts = [places[at : at + each] for at in range(0, len(places), each)]
        busy = self._readers[: len(parts)]
        with self._lock:
            for (process, pipe), part in zip(busy, parts, strict=True):
                try:
                    pipe.send(part)
                except OSError:
                    raise self._lost(process) from None
            answers = [self._answer(process, pipe) for process, pipe in busy]  # all, or one is left for later
        for _, error in answers:
            if error is not None:
                raise SpecError(error.pop("what"), **error)
        return [sample for samples, _ in answers for sample in samples]

    def _answer(self, process: Any, pipe: Connection) -> tuple[list[Any], dict[str, Any] | None]:
        try:
            samples, error = pickle.loads(pipe.recv_bytes())  # of this process's own child
        except (EOFError, OSError):
            raise self._lost(process) from None
        return samples, error

    def _lost(self, process: Any) -> ReaderLost:
        process.join(1.0)
        number = [reader for reader, _ in self._readers].index(process)
        code = process.exitcode
        how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        return ReaderLost(
            f"reader {number} (process {process.pid}) died ({how})",
            rule="Readers of a rank live as long as it does; the rank starts again",
            fix="If it was killed for memory, use fewer --readers or smaller samples",
        )


def _read(dataset: Any, seed: int, path: str | None, pipe: Connection) -> None:
    """Answer with the samples at the places that are asked for, until the rank is gone."""
    die_with_parent()
    torch.set_num_threads(1)
    while True:
        try:
            places = pipe.recv()
        except EOFError:
            return
        samples, error = [], None
        try:
            with user_code("dataset", path, rule="Every sample can be read at any time"):
                for position, index in places:
                    seed_generators(seed, position, 0)
                    samples.append(dataset[index])
        except ForeshardError as fault:
            keys = ("file", "key", "value", "rule", "fix")
            error = {"what": fault.what, **{key: getattr(fault, key) for key in keys}}
        pipe.send_bytes(pickle.dumps((samples, error)))
