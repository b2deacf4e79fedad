"""Which gradients are reduced together, in which order, and what of it the backward does not hide.

Decides the buckets of a data-parallel backward. In go the gradients in the order in which backward makes
them (bytes and the second each is ready) and the time of an all-reduce as a function of its bytes; out come
buckets under the rules of DDP, Horovod and MG-WFBP, the best buckets of all, and the time each of them leaves
exposed. Priorities with partitions (P3, ByteScheduler) are simulated instead, because they also reorder. Read
``timeline.py`` first, then ``rules.py``, ``optimum.py``, ``priority.py`` and ``advice.py``, which compares
them.
"""
