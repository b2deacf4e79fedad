"""Loops of the solver, compiled by numba where it is installed: decide nothing, compute fast.

Plain ones add up a cost of each stage; in paced ones stages behind the slowest cost other seconds. Read
``plain_paths.py`` first, then ``paced_paths.py``; the labels do the same for each demand for devices.
"""
