"""What data moves over: devices, switches, NICs and CPUs, and the links between them.

Decides which links a message takes and what it shares them with. A cluster, a generator or an imported file
goes in; a `Topology` of vertices, directed links and shared resources comes out, with routes over it. A new
machine or fabric is a generator; a new file format is an importer. Read ``graph.py`` first.
"""
