"""Formulas of single things: kernels, memory, money, energy.

Decides what one matrix product, attention, streaming kernel or rank's memory takes, never a whole step. Sizes
and constants of a device go in, as numbers or arrays; seconds, bytes, dollars or joules come out. How a step
combines them is in ``predict``, where new cost sources belong too. Read ``gemm.py`` first; the bytes of a
rank are in ``memory.py``.
"""
