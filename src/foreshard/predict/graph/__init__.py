"""Engine `graph`: a whole step as a program of tasks, executed exactly.

Decides what overlaps and what waits. A plan whose tasks are priced goes in; the program of all its passes,
transfers and collectives is built and executed by ``sim``; the step time, its parts on the critical rank and
a timeline come out. With a shared network, ``transfers.py`` gives tasks their bytes (``occupancy.py``) on
ports (``ports.py``). Read ``engine.py`` first, then ``lowering.py``.
"""
