"""The exhaustive search on equal nodes: every plan that tp, pp, dp and the other degrees describe.

Decides which plans need to be timed. A request on one kind of node goes in; every plan of the grid is timed
or excluded by a bound, and the best ones with a bound on the rest come out. Read ``search.py`` first, then
``space.py`` and ``bounds.py``.
"""
