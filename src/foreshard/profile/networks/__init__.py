"""Classic networks as torch modules, to be traced: what published measurements of training name.

A network is a function that returns the module, or the module and example inputs of one sample. Read
``catalog.py`` first.
"""
