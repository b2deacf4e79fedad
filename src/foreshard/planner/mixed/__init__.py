"""The search over unequal pipelines, on one or several kinds of devices.

Splits the space of plans, divides the time among its parts, and decides which plan wins. A request on a mixed
cluster goes in; the best plan that the engine confirmed and a bound come out. It states abstract problems
through ``planner/pricing`` and has them solved by ``planner/solver``. Read ``search.py`` first.
"""
