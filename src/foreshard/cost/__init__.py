"""Formulas of single things: matrix products, attention, streaming kernels, memory, money, energy."""
