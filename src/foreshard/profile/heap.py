"""Memory that is freed stays with the process: the next step takes it again without asking the kernel.

glibc hands memory at the top of its heap back as soon as it is free, and maps large blocks apart. A step of
training frees all its activations: where that happens, each step gets them back page by page, which was seen
to make a forward twice as long, in some steps and not in others.
"""

from __future__ import annotations

import ctypes
import os

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # names of parameters in malloc.h
_NEVER = -1
_MOST_MMAP_BYTES = 32 << 20
"""The largest threshold that glibc takes; larger blocks are mapped apart."""
_LEAST_MMAP_BYTES = 128 << 10
"""The threshold that glibc begins with; it grows by itself unless it is set."""
_OWN_CHOICE = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")


def map_large_blocks() -> bool:
    """Let large blocks lie apart from the heap, and return whether they do now.

    Weights, gradients and optimizer states, which stay, then leave no gaps between what comes and goes.
    """
    return _set(_MMAP_THRESHOLD, _LEAST_MMAP_BYTES)


def keep_heap() -> bool:
    """Let the allocator keep what is freed, and return whether it does now."""
    return _set(_TRIM_THRESHOLD, _NEVER) and _set(_MMAP_THRESHOLD, _MOST_MMAP_BYTES)


def _set(parameter: int, value: int) -> bool:
    """Set a parameter of malloc, where the C library is glibc and the environment does not set its own.

    Source
    ------
    mallopt(3): M_TRIM_THRESHOLD, M_MMAP_THRESHOLD; GNU C Library, "Memory Allocation Tunables".
    """
    if any(name in os.environ for name in _OWN_CHOICE) or "malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(parameter, value))
