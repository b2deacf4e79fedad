"""Loops of the solver, compiled by numba where it is installed: decide nothing, compute fast.

Plain ones add up a cost of each stage; in paced ones stages behind the slowest cost other seconds. Read
``paths.py`` first; ``labels.py`` does the same for each demand for devices.
"""
