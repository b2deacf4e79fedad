"""Time of collectives on a cluster.

Decides how long an all-reduce, all-gather, reduce-scatter, all-to-all, broadcast or send takes. Bytes, ranks
and a fabric (two levels of bandwidth and latency, made from a cluster) go in; seconds come out, vectorised
over plans. An all-reduce takes the faster of ring and tree; the tree may reduce in the switch. The time of a
new collective is a function of ``collectives.py``. A new algorithm is a function of ``schedules/``, named in
``registry.py`` there, which is simulated and executed; a `Pipelined` of ``collectives.py`` is its closed form.
Constants of links are read by ``catalog/fabrics.py``, and where a step uses a collective is
``predict/tasks/collectives.py``. Read ``collectives.py`` first, then ``fabric.py``.

Below them are the layers of one collective: ``topology/`` (the network as a graph), ``schedules/`` (what is
sent when), ``flow/`` (how sends share links), ``synthesis/`` (schedules made for a network), ``nccl/`` (what
the library picks), ``fusion/`` (gradient buckets).
"""
