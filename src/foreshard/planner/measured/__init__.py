"""Plans for a job from its measured costs.

Decides cuts, shares, micro-batches and devices of pipelines whose layers were timed. Measured costs and a
cluster go in; ranked plans with a bound come out, as from the other searches. Read ``plans.py`` first.
"""
