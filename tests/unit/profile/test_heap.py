"""What a process frees it takes again without the kernel's help, unless the environment says otherwise."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys

import pytest

BODY = """
import json, resource
from foreshard.profile.heap import keep_heap
kept = keep_heap()
def step():
    blocks = [b"x" * (1 << 20) for _ in range(32)]
faults = []
for _ in range(4):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step()
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(json.dumps([kept, faults[-1]]))
"""
PAGES = 32 * (1 << 20) // os.sysconf("SC_PAGE_SIZE")


def told(**environment):
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))}
    made = subprocess.run(
        [sys.executable, "-c", BODY], env=clean | environment, capture_output=True, text=True, timeout=60
    )
    assert made.returncode == 0, made.stderr
    return json.loads(made.stdout)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library has no mallopt")
def test_memory_is_touched_once():
    kept, faults = told()
    assert kept and faults < PAGES / 10


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library has no mallopt")
def test_the_environment_has_the_last_word():
    kept, faults = told(MALLOC_TRIM_THRESHOLD_="131072", MALLOC_MMAP_THRESHOLD_="131072")
    assert not kept and faults > PAGES / 2
    assert not told(GLIBC_TUNABLES="glibc.malloc.trim_threshold=131072")[0]
