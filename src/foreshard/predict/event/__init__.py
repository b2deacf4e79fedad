"""Engine `event`: the program of the graph engine, run from event to event on resources that tasks share.

Decides what contention adds to a step. A plan whose tasks are priced goes in; the tasks and dependencies that
the graph engine lowers run on streams, links and NICs by the flow simulation of ``comm/flow``, every
micro-batch of them; the parts of the step on the critical rank and a timeline come out. Read ``engine.py``
first.
"""
