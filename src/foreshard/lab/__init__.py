"""A test bed: a mixed cluster emulated on one machine, its speeds and links changed at stated steps.

`lab.py` is the lab as its file states it; `emulation.py` and `worker.py` are how a run is started on it;
`network.py` enforces speeds and links on the wall clock, `runtime.device_memory` memory on every clock;
`simulated_run.py` plays policies in a lab without training. The runtime knows nothing of labs: it takes the
hardware of its ranks from them. Read `lab.py` first.
"""
