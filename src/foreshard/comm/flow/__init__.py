"""Flows that share a network: when each starts and ends, and how busy every resource is.

Decides the rate of every flow at every moment (weighted max-min fair, strict priority classes) and from it
the time of a collective, of several jobs, or of a whole step. A `FlowProgram` (fixed-time tasks and flows on
queues, with dependencies) or a `Schedule` with a `Topology` and a routing function goes in; start and end of
each task, bytes on each resource and a lower bound come out. Symmetric ranks are simulated once. Read
``program.py`` first, then ``simulation.py``.
"""
