"""Engine `analytical`: closed formulas over arrays of plans.

Decides step times where nothing needs to be executed task by task. A batch of pipelines, or a table of
plans of one model on one cluster, goes in; times and their parts come out as arrays, for searches over
many plans. Read ``engine.py`` first.
"""
