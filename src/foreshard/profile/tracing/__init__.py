"""Traces a torch module on the meta device: no weights, no arithmetic, one forward and one backward.

Decides which operations run, what they read and write, and where the module can be cut into a chain of
layers. A module and example inputs go in; a `spec.traced_module.TracedModule` comes out. Read ``trace.py``
first.
"""
