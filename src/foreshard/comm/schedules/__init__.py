"""What a collective does step by step: which chunk goes from where to where, and what it waits for.

Decides the algorithm of a collective, whatever network it runs on. A collective, a number of ranks and an
algorithm go in; a `Schedule` comes out, whose sizes are parts of a size that is given later. A new algorithm
is a function that returns a `Schedule`, named in ``registry.py``; ``sequential.py`` derives what its sends
wait for, ``verify.py`` proves that it computes what its collective promises, ``cost.py`` has its time in
closed form. Read ``schedule.py`` first.
"""
