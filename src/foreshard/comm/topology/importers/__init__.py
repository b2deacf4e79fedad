"""Topologies from files of other tools, and the plain graph file that also writes them.

Decides what a file's words mean in vertices, links, bytes per second and seconds. Text goes in; a connected
`Topology` comes out, or an error that names the place. A new format is a file with one function, named in
``formats.py``. Read ``formats.py`` first.
"""
