"""Searches for the best plan and proves how far the best possible one can be ahead.

Decides groups, stages, degrees, layers, samples and options. A model, a cluster and a `PlanRequest` go in;
ranked plans with their predictions, a lower bound on every plan of the stated space and the gap come out.
``grid/`` searches equal nodes, ``mixed/`` several kinds of devices by way of ``pricing/`` and ``solver/``,
``measured/`` a job by its measured costs; ``baselines/`` holds other planners to compare with. Read
``search.py`` first.
"""
