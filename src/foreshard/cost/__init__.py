"""Formulas of single things: kernels, memory, money, energy.

Decides what one matrix product, attention, streaming kernel or rank's memory takes, never a whole step. Sizes
and constants of a device go in, as numbers or arrays; seconds, bytes, dollars or joules come out. How a step
combines them, and where the seconds of a task come from (its cost source), is in ``predict``. Read ``gemm.py`` first; the bytes of a
rank are in ``memory.py``, those of an optimizer's states in ``memory_states.py``.
"""
