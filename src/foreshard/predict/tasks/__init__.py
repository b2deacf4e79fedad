"""Cost source `formula`: seconds of every single task of a rank.

Decides which kernels, collectives, transfers and host launches a layer's pass consists of. Shapes of a
layer, its degrees and a machine go in; seconds by part come out, for both engines. Where a step uses a
collective is in ``collectives.py``. Read ``formula.py`` first.
"""
