"""Loops of the solver, compiled by numba where it is installed.

Plain ones add up a cost of each stage; in paced ones stages behind the slowest cost other seconds.
"""
