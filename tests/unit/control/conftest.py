"""Chains and states for the tests of the controller."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from foreshard.control.slots import Chain, State


def chain(work, workers, *, boundary=0.0, sync=0.0, states=1.0, saved=0.0, memory=1e9):
    layers = len(work)

    def each(value, size):
        return np.broadcast_to(np.asarray(value, float), (size,)).copy()

    return Chain(
        layer_s=np.tile(np.asarray(work, float), (workers, 1)),
        boundary_bytes=each(boundary, layers - 1),
        sync_bytes=each(sync, layers),
        state_bytes=each(states, layers),
        saved_bytes=each(saved, layers),
        memory_bytes=each(memory, workers),
    )


def state(speed, **given):
    size = len(speed)
    base = {
        "available": np.ones(size, bool),
        "bandwidth_bytes_per_s": np.full((size, size), 10.0),
        "latency_s": np.zeros((size, size)),
        "usd_per_h": np.full(size, 3600.0),
        "busy_w": np.full(size, 300.0),
        "idle_w": np.full(size, 100.0),
        "usd_per_byte": np.zeros((size, size)),
        "kg_per_j": np.full(size, 1e-7),
    }
    base |= {name: np.asarray(value) for name, value in given.items()}
    return State(speed=np.asarray(speed, float), **base)


def random_case(rng, workers, *, kinds=None, layers=5, tight=False, egress=False):
    """Return a chain and a state with few or many kinds of workers."""
    kinds = kinds or workers
    which = np.sort(np.concatenate([np.arange(kinds), rng.integers(0, kinds, workers - kinds)]))
    speed, price = rng.uniform(0.5, 4.0, kinds)[which], rng.uniform(1000.0, 9000.0, kinds)[which]
    work = rng.uniform(0.5, 2.0, layers)
    site = which % 2
    apart = site[:, None] != site[None, :]
    room = rng.uniform(0.4, 1.3, kinds) * layers if tight else np.full(kinds, 1e9)
    made = chain(
        work,
        workers,
        boundary=rng.uniform(0.0, 1.0, layers - 1),
        sync=rng.uniform(0.5, 2.0, layers),
        states=1.0,
        saved=0.02,
        memory=room[which],
    )
    now = state(
        speed,
        usd_per_h=price,
        bandwidth_bytes_per_s=np.where(apart, rng.uniform(2.0, 20.0), 20.0),
        latency_s=np.where(apart, 0.01, 0.0),
        usd_per_byte=np.where(apart, 0.02, 0.0) * egress,
    )
    return made, now


@pytest.fixture(scope="session")
def cases():
    return SimpleNamespace(chain=chain, state=state, random_case=random_case)
