"""Connects a policy of `control` to the trainer of a run.

A policy receives the events of every step and orders plans; `steering` builds the events from what ranks
measured and proposes the plans to the trainer. In: a cluster, measured or predicted costs, the options of
`run --policy`. Out: proposed plans. Read `steering.py` first, then `controller_config.py` for how a policy is
built and `starting_costs.py` for what it knows before the first step. The policies themselves are in
`control`; `stage_balancer` sets the shares inside a stage.
"""
