"""Cost source `measured`: layers and links timed on the user's own machines.

Decides step times and memory of a job that is in no catalog. A costs file (``foreshard calibrate``) and a
plan go in; a `Prediction` comes out, as from ``tasks``. Read ``engine.py`` first, then ``costs.py``.
"""
