"""Shapes of layers, pipeline schedules, and the lowering of a pipeline to a program of tasks.

Decides in which order every stage works through its micro-batches and what waits for what. A schedule with
its stages and micro-batches goes in; the order of actions comes out, which the runtime executes, and a
program of tasks with dependencies, which ``sim`` executes. A new pipeline schedule starts in
``pipeline_schedules.py``; docs/design.md lists the other places. Read it first, then ``pipeline.py``.
"""
