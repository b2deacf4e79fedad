"""Shapes of layers, pipeline schedules, and the lowering of a plan to a program of tasks."""
