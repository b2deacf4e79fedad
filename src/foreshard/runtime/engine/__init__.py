"""Executes one training step on one rank.

Decides the order of work inside a step: the actions of the pipeline schedule, when gradients are summed, and
when the step counts. In go the layers of a rank and the position of the step; out come summed gradients, a
vote (one all-reduce of counts and flags), and updated parameters. Every sample draws its own random numbers,
so the result does not depend on the plan. Which schedules run is `RUN_SCHEDULES` of `state/layout`. Read
`executor` first (one step of one rank), then `vote` (what ends a step).
"""
