"""The search on devices of several kinds.

Decides which subspaces of plans are searched for how long and which plan wins. A request on a mixed
cluster goes in; the best plan that the engine confirmed and a bound come out. It states abstract problems
through ``planner/pricing`` and has them solved by ``planner/solver``. Read ``search.py`` first.
"""
