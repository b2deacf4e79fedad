"""Measured kernels predicted by the same costs as models: which kernel a row of a table is, and its interval.

A table of kernels goes in, one case for each row comes out. Read ``cases.py`` first; ``deepbench.py`` has the
convolutions and recurrent layers of DeepBench, which are traced as layers of a module are.
"""
