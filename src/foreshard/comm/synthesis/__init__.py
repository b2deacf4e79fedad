"""Schedules made for one network, with a proof of how good they are.

Decides which chunk crosses which link when. A collective, its size and a `Topology` go in; a `Schedule`, its
seconds, and the seconds that no schedule takes fewer of come out. A new method is a function that returns a
schedule, yielded by ``attempts.py``. Read ``synthesize.py`` first, then ``bounds.py``.
"""
