"""Executes a program: when every task starts and ends.

Decides the start and end of tasks that occupy resources in order and wait for other tasks. A program
(``graph/program``) goes in, times come out. Read ``critical_path.py`` first; ``_kernel.py`` is its compiled
loop. ``contention.py`` runs the same program where transfers share a network, by the simulation of
``comm/flow``. ``replicas.py`` runs it on many ranks with seconds of their own, ``contended_replicas.py`` does
both.
"""
