"""Time of collectives on a cluster, by the faster of ring, tree and in-switch reduction.

Decides how long an all-reduce, all-gather, reduce-scatter, all-to-all, broadcast or send takes. Bytes,
ranks and a fabric (two levels of bandwidth and latency, made from a cluster) go in; seconds come out,
vectorised over plans. A new collective is a function of ``collectives.py``; read it first, then
``fabric.py``.
"""
