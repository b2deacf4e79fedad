"""Solves the abstract problem of mixed clusters: which pipelines, cut where, with how many samples.

Decides stages, cuts, counts of pipelines and shares without knowing models or devices. A `Problem` of
priced stage types goes in; the best mix of pipelines found by column generation, its duals and a lower
bound come out. Read ``problem.py`` first, then ``solve.py``.
"""
